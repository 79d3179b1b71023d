"""Quantized weights for the native kernels: how stored codes are laid out, and their packing. Imports numpy.

The layout is that of include/paged/quantized.h: codes of 4 or 8 bits in groups that begin at multiples of 16 input
features. Codes of 2 and 3 bits are packed as 4, those of 6 as 8. Where groups are not in order (act-order), or have odd
sizes, the weight carries an order of its input features, and rows are put into it once for all weights that share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paged_kernels import _native
from paged_kernels.checks import ShapeError

ROW_KINDS = {"float32": 0, "bfloat16": 1, "int8": 2}
"""What the rows are that meet a quantized weight."""
PACKED_BITS = {2: 4, 3: 4, 4: 4, 6: 8, 8: 8}
INT8_BLOCK = 128
"""Features of an int8 row that share a scale, at most; fewer where the weight's groups are smaller."""
PIECE_CODES = 1 << 20
"""Codes that are copied at a time if their array has gaps."""

_DEPTH, _GROUP, _ROWS = 64, 16, 16


class StoredCodes(Protocol):
    """A quantized linear as a checkpoint has it: w = scale * (code - zero), or scale * code + offset."""

    @property
    def bits(self) -> int:
        """2, 3, 4, 6 or 8."""

    @property
    def group_size(self) -> int:
        """Input features of a scale."""

    @property
    def codes(self) -> npt.NDArray[Any]:
        """[out, in] uint8."""

    @property
    def scales(self) -> npt.NDArray[Any]:
        """[out, groups] float32."""

    @property
    def zeros(self) -> npt.NDArray[Any] | None:
        """[out, groups] whole numbers, or None: `offsets` are there."""

    @property
    def offsets(self) -> npt.NDArray[Any] | None:
        """[out, groups] float32, or None: `zeros` are there."""

    @property
    def g_idx(self) -> npt.NDArray[Any] | None:
        """[in] the group of each input feature, or None: in order."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """[out_features, in_features] packed.

    Attributes:
        codes: 4 or 8 bits, `bits`.
        scales: Halves if `half_scales`, else float32.
        zeros: float32 offsets if `float_offsets`, else uint8 zero points.
        columns: int32 [depth], the input feature that comes there or -1; None: in order.
        out_features: Outputs.
        in_features: Inputs.
        depth: Inputs with padding.
        group_size: Inputs of a scale, in the order of `columns`.
        bits: 4 or 8.
        half_scales: Whether halves hold all scales exactly.
        float_offsets: Whether some zero point is no small whole number.
    """

    codes: _native.Buffer
    scales: _native.Buffer
    zeros: _native.Buffer
    columns: _native.Buffer | None
    out_features: int
    in_features: int
    depth: int
    group_size: int
    bits: int
    half_scales: bool
    float_offsets: bool

    @property
    def nbytes(self) -> int:
        """Memory of it all."""
        buffers = (self.codes, self.scales, self.zeros, self.columns)
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As the native module takes it."""
        return (
            *(self.codes, self.scales, self.zeros, self.columns, self.out_features, self.depth),
            *(self.group_size, self.bits, self.half_scales, self.float_offsets),
        )


def alike(a: StoredCodes, b: StoredCodes) -> bool:
    """Whether two tensors over the same input can be packed as one weight."""
    if PACKED_BITS[a.bits] != PACKED_BITS[b.bits] or a.codes.shape[1] != b.codes.shape[1]:
        return False
    if a.group_size != b.group_size or (a.offsets is None) != (b.offsets is None):
        return False
    first, second = _order(a), _order(b)
    return first is second or (first is not None and second is not None and np.array_equal(first, second))


def pack(runtime: _native.Runtime, parts: Sequence[StoredCodes]) -> QuantizedWeight:
    """One weight of tensors one below the other, which are `alike`."""
    first = parts[0]
    if not all(alike(first, part) for part in parts[1:]):
        raise ShapeError("the parts of a quantized weight differ in bits, group size or order of inputs")
    columns, group_size, depth = _grid(_order(first), first.group_size, first.codes.shape[1])
    weight = _empty(parts, columns, group_size, depth)
    offset = 0
    for part in parts:
        rows = part.codes.shape[0]
        scales = np.ascontiguousarray(part.scales, np.float32)
        zeros = _zeros(part, weight.float_offsets)
        step = max(1, PIECE_CODES // part.codes.shape[1] // _ROWS) * _ROWS
        for at in range(0, rows, step):
            piece = slice(at, min(at + step, rows))
            codes = np.ascontiguousarray(part.codes[piece], np.uint8)
            runtime.pack_quantized(
                *weight.arguments, offset + at, weight.in_features, codes, scales[piece], zeros[piece]
            )
        offset += rows
    return weight


def _empty(
    parts: Sequence[StoredCodes], columns: npt.NDArray[np.int32] | None, group_size: int, depth: int
) -> QuantizedWeight:
    out_features = sum(part.codes.shape[0] for part in parts)
    bits = PACKED_BITS[parts[0].bits]
    half_scales = all(_are_halves(part.scales) for part in parts)
    float_offsets = any(_needs_offsets(part, bits) for part in parts)
    padded = -(-out_features // _ROWS) * _ROWS
    scales = padded * -(-depth // group_size)
    order = None
    if columns is not None:
        order = _native.Buffer(columns.nbytes)
        np.frombuffer(memoryview(order), np.int32)[:] = columns
    return QuantizedWeight(
        _native.Buffer(padded * depth * bits // 8),
        _native.Buffer(scales * (2 if half_scales else 4)),
        _native.Buffer(scales * (4 if float_offsets else 1)),
        *(order, out_features, parts[0].codes.shape[1], depth, group_size, bits, half_scales, float_offsets),
    )


def _are_halves(scales: npt.NDArray[Any]) -> bool:
    with np.errstate(over="ignore"):
        return bool((scales.astype(np.float16).astype(np.float32) == scales).all())


def _needs_offsets(part: StoredCodes, bits: int) -> bool:
    if part.zeros is None:
        return True
    return bool((part.zeros < 0).any() or (part.zeros > (127 if bits == 4 else 255)).any())


def _zeros(part: StoredCodes, as_offsets: bool) -> npt.NDArray[Any]:
    if part.offsets is not None:
        return np.ascontiguousarray(part.offsets, np.float32)
    assert part.zeros is not None, "a tensor has zeros or offsets"
    if as_offsets:
        return np.ascontiguousarray(-part.scales * part.zeros.astype(np.float32), np.float32)
    return np.ascontiguousarray(part.zeros, np.uint8)


def _order(part: StoredCodes) -> npt.NDArray[np.int32] | None:
    """The group of each input feature where groups are out of order or begin at odd places."""
    size, count = part.group_size, part.codes.shape[1]
    in_order = np.arange(count, dtype=np.int32) // np.int32(size)
    if part.g_idx is not None and not np.array_equal(part.g_idx, in_order):
        return np.asarray(part.g_idx, np.int32)
    return in_order if size % _GROUP and size < count else None


def _grid(
    order: npt.NDArray[np.int32] | None, group_size: int, in_features: int
) -> tuple[npt.NDArray[np.int32] | None, int, int]:
    """(columns or None, group size, depth) of the packed weight."""
    if order is None:
        depth = -(-in_features // _DEPTH) * _DEPTH
        return None, depth if group_size >= in_features else group_size, depth
    counts = np.bincount(order, minlength=-(-in_features // group_size))
    size = max(-(-int(counts.max()) // _GROUP), 1) * _GROUP
    depth = -(-len(counts) * size // _DEPTH) * _DEPTH
    columns = np.full(depth, -1, np.int32)
    sorted_features = np.argsort(order, kind="stable").astype(np.int32)
    starts = np.cumsum(counts) - counts
    within = np.arange(in_features) - np.repeat(starts, counts)
    columns[np.repeat(np.arange(len(counts)) * size, counts) + within] = sorted_features
    return columns, size, depth
