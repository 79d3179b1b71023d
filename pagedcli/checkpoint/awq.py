"""AWQ as AutoAWQ's `gemm` stores it, to and from `QuantTensor`. Imports numpy alone; shapes are checked by the caller.

A linear X [out, in] in groups of g is X.qweight int32 [in, out / 8], X.qzeros int32 [in / g, out / 8] and X.scales
float16 [in / g, out]. Eight codes of a word stand for eight neighbouring outputs, in this order from the lowest bits:

    outputs 8w + 0 2 4 6 1 3 5 7
"""

from __future__ import annotations

import numpy as np

from pagedcli.checkpoint.bit_packing import pack_last, unpack_last
from pagedcli.checkpoint.code_rows import CodeRows
from pagedcli.checkpoint.quant_tensor import QuantTensor

BITS = 4
LANES = 8
ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])
INVERSE = np.argsort(ORDER)


def unpack(
    name: str, qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, group_size: int
) -> QuantTensor:
    """From the stored arrays; `scales` of any float type."""
    return QuantTensor(
        name=name,
        bits=BITS,
        group_size=group_size,
        codes=CodeRows((scales.shape[1], qweight.shape[0]), lambda first, last: _rows(qweight, first, last)),
        scales=np.ascontiguousarray(scales.T, dtype=np.float32),
        zeros=np.ascontiguousarray(_unpack(qzeros).T),
        offsets=None,
        g_idx=None,
        method="awq",
    )


def pack(tensor: QuantTensor) -> dict[str, np.ndarray]:
    """The stored arrays by their leaf names; outputs must be a multiple of 8."""
    assert tensor.bits == BITS, tensor.name
    assert tensor.zeros is not None, tensor.name
    assert tensor.g_idx is None, tensor.name
    assert tensor.out_features % LANES == 0, tensor.name
    return {
        "qweight": _pack(tensor.all_codes().T),
        "qzeros": _pack(tensor.zeros.T.astype(np.uint8)),
        "scales": np.ascontiguousarray(tensor.scales.T.astype(np.float16)),
    }


def _rows(qweight: np.ndarray, first: int, last: int) -> np.ndarray:
    """Codes of some outputs, [outputs, in]; words hold eight of them."""
    start = first // LANES
    codes = _unpack(qweight[:, start : -(-last // LANES)])
    return np.ascontiguousarray(codes.T[first - start * LANES : last - start * LANES])


def _unpack(words: np.ndarray) -> np.ndarray:
    lanes = unpack_last(words, BITS, words.shape[-1] * LANES).reshape(words.shape[0], -1, LANES)
    return np.asarray(lanes[:, :, INVERSE].reshape(words.shape[0], -1))


def _pack(codes: np.ndarray) -> np.ndarray:
    lanes = codes.reshape(codes.shape[0], -1, LANES)[:, :, ORDER]
    return pack_last(lanes.reshape(codes.shape[0], -1), BITS)
