"""Quantized GGUF rows as float32. Imports numpy and `gguf`.

The kinds that the usual small files consist of are computed here, in pieces that stay in a core's cache and into an
array of the caller's; `gguf` makes several copies of everything, which takes more than twice as long. The same
arithmetic in the same order, so that the numbers are equal to the last bit (tested). All other kinds are `gguf`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

Codes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

PIECE_ELEMENTS = 1 << 16
"""Elements computed at a time: 256 KB of results."""


def is_known(kind: Kind) -> bool:
    """Whether rows of this kind can be computed here, or by the installed `gguf`."""
    block, num_bytes = GGML_QUANT_SIZES[kind]
    try:
        dequantize_rows(np.zeros((1, num_bytes), np.uint8), kind, block)
    except NotImplementedError:
        return False
    return True


def dequantize_rows(codes: Codes, kind: Kind, columns: int) -> Floats:
    """Values of some rows.

    Args:
        codes: [rows, bytes of a row].
        kind: How they are stored.
        columns: Elements of a row, a multiple of the kind's block.

    Returns:
        [rows, columns] float32.

    Raises:
        NotImplementedError: `gguf` does not know the kind.
    """
    out = np.empty((codes.shape[0], columns), np.float32)
    step = max(1, PIECE_ELEMENTS // columns)
    compute = _OWN.get(kind)
    with np.errstate(all="ignore"):  # a scale of inf or nan is the file's own
        for first in range(0, codes.shape[0], step):
            piece = np.ascontiguousarray(codes[first : first + step])
            if compute is None:
                out[first : first + step] = dequantize(piece, kind)
            else:
                compute(piece, out[first : first + step])
    return out


def _scales(blocks: Codes) -> Floats:
    """The float16 numbers that blocks begin with, [blocks, count]."""
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _q4_0(codes: Codes, out: Floats) -> None:
    """(code - 8) * scale; a block is a scale and 16 bytes, low halves first."""
    blocks = codes.reshape(-1, 18)
    scale, halves = _scales(blocks[:, :2]), out.reshape(-1, 2, 16)
    np.multiply(((blocks[:, 2:] & 15).view(np.int8) - np.int8(8)), scale, out=halves[:, 0])
    np.multiply(((blocks[:, 2:] >> 4).view(np.int8) - np.int8(8)), scale, out=halves[:, 1])


def _q4_1(codes: Codes, out: Floats) -> None:
    """Code * scale + least; a block is a scale, the least value and 16 bytes, low halves first."""
    blocks = codes.reshape(-1, 20)
    numbers, halves = _scales(blocks[:, :4]), out.reshape(-1, 2, 16)
    np.multiply(blocks[:, 4:] & 15, numbers[:, :1], out=halves[:, 0])
    np.multiply(blocks[:, 4:] >> 4, numbers[:, :1], out=halves[:, 1])
    halves += numbers[:, 1, None, None]


def _q8_0(codes: Codes, out: Floats) -> None:
    """Code * scale; a block is a scale and 32 signed bytes."""
    blocks = codes.reshape(-1, 34)
    np.multiply(blocks[:, 2:].view(np.int8), _scales(blocks[:, :2]), out=out.reshape(-1, 32))


_OWN: dict[Kind, Callable[[Codes, Floats], None]] = {Kind.Q4_0: _q4_0, Kind.Q4_1: _q4_1, Kind.Q8_0: _q8_0}
