"""compressed-tensors' `pack-quantized`, to and from `QuantTensor`. Imports numpy alone; the caller checks shapes.

A linear X [out, in] of b bits in groups of g is X.weight_packed int32 [out, in * b / 32] (codes along the inputs, each
stored as q + 2**(b - 1)), X.weight_scale [out, in / g] ([out, 1] for whole rows, [1] for the whole tensor),
X.weight_shape int64 [2]; asymmetric ones have X.weight_zero_point, packed along the outputs, int32 [out * b / 32,
in / g], with the same shift (or int8 as it is); with groups out of order X.weight_g_idx int32 [in].
"""

from __future__ import annotations

import numpy as np

from pagedcli.checkpoint.bit_packing import pack_first, pack_last, unpack_first, unpack_last
from pagedcli.checkpoint.code_rows import CodeRows
from pagedcli.checkpoint.gptq import order_of
from pagedcli.checkpoint.quant_tensor import QuantTensor


def unpack(
    name: str,
    arrays: dict[str, np.ndarray],
    *,
    bits: int,
    group_size: int,
    shape: tuple[int, int],
) -> QuantTensor:
    """From the stored arrays by leaf name; `weight_scale` of any float type."""
    (out_features, in_features), words = shape, arrays["weight_packed"]
    groups = -(-in_features // group_size)
    scales = np.broadcast_to(arrays["weight_scale"].astype(np.float32), (out_features, groups))
    return QuantTensor(
        name=name,
        bits=bits,
        group_size=group_size,
        codes=CodeRows(shape, lambda first, last: unpack_last(words[first:last], bits, in_features)),
        scales=np.ascontiguousarray(scales),
        zeros=_zeros(arrays.get("weight_zero_point"), bits, (out_features, groups)),
        offsets=None,
        g_idx=order_of(arrays.get("weight_g_idx"), in_features, group_size),
        method="compressed-tensors",
    )


def _zeros(stored: np.ndarray | None, bits: int, shape: tuple[int, int]) -> np.ndarray:
    middle = 1 << (bits - 1)
    if stored is None:
        return np.full(shape, middle, np.uint8)
    if stored.dtype == np.int32:
        return np.ascontiguousarray(unpack_first(stored, bits, shape[0]))
    return np.ascontiguousarray(np.broadcast_to(stored.astype(np.int16) + np.int16(middle), shape))


def pack(tensor: QuantTensor) -> dict[str, np.ndarray]:
    """The stored arrays by their leaf names; zero points are left out where all are the middle (symmetric)."""
    assert tensor.zeros is not None, tensor.name
    arrays = {
        "weight_packed": pack_last(tensor.all_codes(), tensor.bits),
        "weight_scale": np.ascontiguousarray(tensor.scales.astype(np.float16)),
        "weight_shape": np.array(tensor.shape, np.int64),
    }
    if np.any(tensor.zeros != 1 << (tensor.bits - 1)):
        arrays["weight_zero_point"] = pack_first(tensor.zeros.astype(np.uint8), tensor.bits)
    if tensor.g_idx is not None:
        arrays["weight_g_idx"] = tensor.g_idx.astype(np.int32)
    return arrays
