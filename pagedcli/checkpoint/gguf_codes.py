"""Quantized GGUF rows as codes, scales and zero points (or least values), so that they run as they are stored.

Imports numpy and `gguf`'s constants. Read as `QuantTensor`s they give the same numbers, to the last bit, as
`dequantize` does, for the kinds that map onto groups of codes: Q4_0, Q4_1, Q8_0, Q4_K and Q6_K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

from pagedcli.checkpoint.code_rows import CodeRows
from pagedcli.checkpoint.quant_tensor import QuantTensor

Codes = np.ndarray[Any, np.dtype[np.uint8]]
Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]
"""Codes [rows, blocks * block], scales, zeros and offsets [rows, groups]."""


WHOLE_BYTES, _PIECE_BYTES = 32 << 20, 4 << 20
"""Larger matrices (embeddings, heads) are read twice, for scales and for codes, so that no memory holds all codes."""


def runs_as_codes(kind: Kind) -> bool:
    """Whether rows of this kind can be read as codes."""
    return kind in _READERS


def width_of(kind: Kind) -> int:
    """Bits of a code."""
    return _READERS[kind][0]


def read_codes(name: str, kind: Kind, rows: Codes) -> QuantTensor:
    """Rows of a matrix.

    Args:
        name: The linear's, without ".weight".
        kind: For which `runs_as_codes`.
        rows: [rows, bytes of a row].
    """
    bits, group_size, read = _READERS[kind]
    if rows.nbytes <= WHOLE_BYTES:
        codes, scales, zeros, offsets = read(np.ascontiguousarray(rows))
        return QuantTensor(name, bits, group_size, codes, scales, zeros, offsets, None, "gguf")
    step = max(1, _PIECE_BYTES // rows.shape[1])
    numbers: list[tuple[np.ndarray | None, ...]] = []
    for at in range(0, len(rows), step):
        codes, *others = read(np.ascontiguousarray(rows[at : at + step]))
        numbers.append(tuple(others))
    shape = (len(rows), codes.shape[1])
    later = CodeRows(shape, lambda first, last: read(np.ascontiguousarray(rows[first:last]))[0])
    joined = [_joined(parts) for parts in zip(*numbers, strict=True)]
    assert joined[0] is not None
    return QuantTensor(name, bits, group_size, later, joined[0], joined[1], joined[2], None, "gguf")


def _joined(parts: tuple[np.ndarray | None, ...]) -> np.ndarray | None:
    """One below the other; None where a kind has none."""
    found = [part for part in parts if part is not None]
    return np.concatenate(found) if found else None


def _blocks(rows: Codes, num_bytes: int) -> Codes:
    return rows.reshape(rows.shape[0], -1, num_bytes)


def _halves(data: Codes) -> Codes:
    """Bytes [..., n] to codes: all low halves, then all high halves, [..., 2 n]."""
    return np.concatenate((data & 15, data >> 4), axis=-1)


def _float16(data: Codes) -> np.ndarray:
    """Pairs of bytes [..., 2 n] as float32 [..., n]."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _q4_0(rows: Codes) -> Parts:
    blocks = _blocks(rows, 18)
    scales = _float16(blocks[:, :, :2])[..., 0]
    return _flat(_halves(blocks[:, :, 2:])), scales, np.full(scales.shape, 8, np.uint8), None


def _q4_1(rows: Codes) -> Parts:
    blocks = _blocks(rows, 20)
    numbers = _float16(blocks[:, :, :4])
    return _flat(_halves(blocks[:, :, 4:])), _own(numbers[..., 0]), None, _own(numbers[..., 1])


def _q8_0(rows: Codes) -> Parts:
    """Signed bytes; the highest bit turned over adds 128."""
    blocks = _blocks(rows, 34)
    scales = _float16(blocks[:, :, :2])[..., 0]
    return _flat(blocks[:, :, 2:] ^ np.uint8(0x80)), scales, np.full(scales.shape, 128, np.uint8), None


def _q4_k(rows: Codes) -> Parts:
    """256 codes: two float16, eight scales and eight minima of 6 bits in 12 bytes, then four times 32 bytes."""
    blocks = _blocks(rows, 144)
    numbers = _float16(blocks[:, :, :4])
    scale, least = _six_bits(blocks[:, :, 4:16])
    scales = numbers[..., :1] * scale.astype(np.float32)
    offsets = -(numbers[..., 1:] * least.astype(np.float32))
    codes = _halves(blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 32))
    return _flat(codes), _flat(scales), None, _flat(offsets)


def _six_bits(data: Codes) -> tuple[Codes, Codes]:
    """Scales and minima, [..., 8] each.

    bytes 0-3: scale 0-3, upper bits of scale 4-7; 4-7: the same of the minima; 8-11: lower bits of both, 4-7.
    """
    first, second, third = data[..., :4], data[..., 4:8], data[..., 8:]
    scale = np.concatenate((first & 63, (third & 15) | ((first >> 2) & 0x30)), axis=-1)
    least = np.concatenate((second & 63, (third >> 4) | ((second >> 2) & 0x30)), axis=-1)
    return scale, least


def _q6_k(rows: Codes) -> Parts:
    """256 codes: 128 bytes of lower halves, 64 bytes of upper quarters, 16 signed scales and a float16."""
    blocks = _blocks(rows, 210)
    low = _halves(blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 64)).reshape(*blocks.shape[:2], 2, 4, 32)
    high = blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    codes = low | (((high >> shifts) & 3) << 4)
    number = _float16(blocks[:, :, 208:])
    scales = _flat(number * np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8).astype(np.float32))
    return _flat(codes), scales, np.full(scales.shape, 32, np.uint8), None


def _flat(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values.reshape(values.shape[0], -1))


def _own(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values)


_READERS: dict[Kind, tuple[int, int, Callable[[Codes], Parts]]] = {
    Kind.Q4_0: (4, 32, _q4_0),
    Kind.Q4_1: (4, 32, _q4_1),
    Kind.Q8_0: (8, 32, _q8_0),
    Kind.Q4_K: (4, 32, _q4_k),
    Kind.Q6_K: (6, 16, _q6_k),
}
