"""Weight handles: what a layer holds instead of a tensor. Imports nothing of a backend.

A layer names a handle and passes it to an op; only the backend that made the handle looks inside `data`. Linears that
share their input (q, k, v; gate and up) are one `FusedLinear` of named parts: one call, and one group for quantization.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

Shard = Literal["none", "column", "row"]


class HostTensor(Protocol):
    """A stored tensor, as a checkpoint gives it. `data` may be computed when it is asked for: ask once."""

    @property
    def name(self) -> str:
        """As in the checkpoint."""

    @property
    def dtype(self) -> str:
        """Name as in safetensors: "F32", "BF16", "F16", "F64"."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As in PyTorch."""

    @property
    def data(self) -> Any:
        """1-D numpy uint8 view of the bytes, row-major, little-endian."""

    def rows(self, first: int, last: int) -> HostTensor:
        """Rows `first` to `last` - 1, for a backend that wants no whole copy."""

    def release(self) -> None:
        """The bytes are not needed again: memory that holds them may go."""


class QuantizedPart(Protocol):
    """A quantized linear, as a checkpoint gives it (`checkpoint.quant_tensor.QuantTensor`, which says it all).

    w[o, i] = scales[o, g(i)] * codes[o, i] + offsets[o, g(i)], where offsets may be given as -scales * zeros.
    """

    @property
    def name(self) -> str:
        """The linear's, without ".weight"."""

    @property
    def bits(self) -> int:
        """Width of a code: 2, 3, 4, 6 or 8."""

    @property
    def group_size(self) -> int:
        """Input features that share a scale."""

    @property
    def codes(self) -> Any:
        """Numpy uint8 [out, in]."""

    @property
    def scales(self) -> Any:
        """Numpy float32 [out, groups]."""

    @property
    def zeros(self) -> Any:
        """Numpy uint8 or int16 [out, groups], or None."""

    @property
    def offsets(self) -> Any:
        """Numpy float32 [out, groups], or None; exactly one of both is there."""

    @property
    def g_idx(self) -> Any:
        """Numpy int32 [in], the group of each input feature; None: in order. Each group has its share of them."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""

    def dequantize(self) -> Any:
        """Numpy float32 [out, in]."""

    def rows(self, first: int, last: int) -> QuantizedPart:
        """Output features `first` to `last` - 1."""


StoredPart = HostTensor | QuantizedPart
"""One of the checkpoint's linears, dense or quantized."""


def is_quantized(part: StoredPart) -> TypeGuard[QuantizedPart]:
    """Whether a part comes as codes."""
    return hasattr(part, "codes")


def part_name(part: StoredPart) -> str:
    """The linear's name, without ".weight"."""
    return part.name.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A quantized tensor as its file has it.

    Attributes:
        dtype: Kind of its blocks, as GGUF names them: "Q4_1".
        shape: As in PyTorch.
        data: 1-D numpy uint8 view of the blocks, row by row.
        order: [rows] int64, which stored row comes where; None: as they lie.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Any
    order: Any


@runtime_checkable
class HasBlocks(Protocol):
    """A `HostTensor` whose values are computed from blocks, for a backend that reads these itself."""

    def blocks(self) -> tuple[str, Any, Any]:
        """Kind, bytes and order of its rows, as `StoredBlocks` has them."""


@dataclass(frozen=True, slots=True)
class LinearPart:
    """One of the checkpoint's linears inside a fused one: `size` consecutive output features."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """Output features of all parts one after the other, over one input.

    Attributes:
        parts: In the order of the output features; `name` is the checkpoint's, without ".weight".
        in_features: Input features.
        shard: How tensor parallelism would cut it: by output (column), by input (row) or not at all.
        method: How the weight is stored; "dense" is [out_features, in_features] of the run's dtype, "quantized" what
            the backend made of codes (and of dense parts among them).
        weight: The backend's.
        bias: The backend's [out_features], or None.
    """

    parts: tuple[LinearPart, ...]
    in_features: int
    shard: Shard
    method: str
    weight: Any
    bias: Any

    @property
    def out_features(self) -> int:
        """Of all parts."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True, slots=True)
class Vector:
    """A norm's weight, [size] of the run's dtype."""

    name: str
    size: int
    data: Any


@dataclass(frozen=True, slots=True)
class EmbeddingTable:
    """[vocab_size, hidden_size] of the run's dtype; a tied head shares `data`."""

    name: str
    vocab_size: int
    hidden_size: int
    data: Any


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosines and sines of every position, [max_positions, head_dim / 2] float32 each, attention factor included."""

    max_positions: int
    head_dim: int
    cos: Any
    sin: Any
