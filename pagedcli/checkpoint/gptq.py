"""GPTQ as AutoGPTQ stores it (v1 and v2), to and from `QuantTensor`. Imports numpy alone; the caller checks shapes.

A linear X [out, in] of b bits in groups of g is X.qweight int32 [in * b / 32, out] (codes of one output one below the
other), X.qzeros int32 [in / g, out * b / 32], X.scales float16 [in / g, out] and X.g_idx int32 [in], the group of each
input. Version 1 stores each zero point less one, version 2 the zero point itself. A zero point of 0 has no room in
version 1. Those who write it all the same take 1 from every code of a packed word at once, borrowing from the next
code, and add it again on reading; so it is done here, which changes nothing where no zero point is 0.
"""

from __future__ import annotations

import numpy as np

from pagedcli.checkpoint.bit_packing import pack_first, pack_last, unpack_first, unpack_last
from pagedcli.checkpoint.code_rows import CodeRows
from pagedcli.checkpoint.quant_tensor import QuantTensor


def unpack(
    name: str,
    arrays: dict[str, np.ndarray],
    *,
    bits: int,
    group_size: int,
    in_features: int,
    version: int,
) -> QuantTensor:
    """From the stored arrays by leaf name: qweight, qzeros, scales, and g_idx or not."""
    out_features, words = arrays["scales"].shape[1], arrays["qweight"]

    def rows(first: int, last: int) -> np.ndarray:
        return np.ascontiguousarray(unpack_first(words[:, first:last], bits, in_features).T)

    zeros = unpack_last(
        _one_more(arrays["qzeros"], bits) if version == 1 else arrays["qzeros"], bits, out_features
    )
    return QuantTensor(
        name=name,
        bits=bits,
        group_size=group_size,
        codes=CodeRows((out_features, in_features), rows),
        scales=np.ascontiguousarray(arrays["scales"].T, dtype=np.float32),
        zeros=np.ascontiguousarray(zeros.T),
        offsets=None,
        g_idx=order_of(arrays.get("g_idx"), in_features, group_size),
        method="gptq",
    )


def _one_more(words: np.ndarray, bits: int) -> np.ndarray:
    """Words whose codes are all one higher, carrying within a word; 3 bits lie across words and have no carry."""
    if bits == 3:
        return pack_last((unpack_last(words, bits, words.shape[1] * 32 // bits) + 1) & 7, bits)
    ones = pack_last(np.ones(words.shape[1] * 32 // bits, np.uint8), bits)
    return np.asarray((words.view(np.uint32) + ones.view(np.uint32)).view(np.int32))


def order_of(g_idx: np.ndarray | None, in_features: int, group_size: int) -> np.ndarray | None:
    """The groups of the inputs, or None if they are in order (or the array is missing or empty)."""
    if g_idx is None or g_idx.size == 0:
        return None
    trivial = np.arange(in_features, dtype=np.int32) // np.int32(group_size)
    return None if np.array_equal(g_idx, trivial) else np.array(g_idx, np.int32)


def pack(tensor: QuantTensor, *, version: int) -> dict[str, np.ndarray]:
    """The stored arrays by their leaf names, g_idx always among them.

    Inputs and outputs must be multiples of 32 / bits; version 1 takes no zero point of 0.
    """
    assert tensor.zeros is not None, tensor.name
    less = 1 if version == 1 else 0
    assert int(tensor.zeros.min()) >= less, f"{tensor.name}: a zero point of 0 has no room in version 1"
    stored = (tensor.zeros.astype(np.int16) - np.int16(less)).astype(np.uint8)
    return {
        "qweight": pack_first(tensor.all_codes().T, tensor.bits),
        "qzeros": pack_last(np.ascontiguousarray(stored.T), tensor.bits),
        "scales": np.ascontiguousarray(tensor.scales.T.astype(np.float16)),
        "g_idx": tensor.groups().astype(np.int32),
    }
