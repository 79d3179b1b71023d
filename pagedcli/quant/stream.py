"""`CalibrationOps`: a decoder layer run over all calibration samples at once, one operation after the other.

Imports torch. The model definitions that serve are what is quantized: they are called with these ops, whose values are
streams of all samples. At every linear the input of all samples is known and the hook chooses the weight that the
linear is computed with; so the true sequential order is that of the model's own code, and no linear is computed
twice. Streams compute sample by sample, as late as they can: of the wide values in between only a linear's input and
the residual exist as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from pagedcli.ops.batch import ForwardBatch, KVCache
from pagedcli.ops.protocol import Activation, AttentionShape, HeadNorms
from pagedcli.ops.weights import FusedLinear, RopeTable, Vector
from pagedcli.quant.workers import Workers


@dataclass(frozen=True, slots=True)
class Origin:
    """What made a stream, where its features can be scaled.

    Attributes:
        kind: "norm" (of the norm `name`), "values" (attention: the values, last part of linear `linear`) or "gated"
            (an MLP: its second half, last part of linear `linear`).
        name: Full name of the norm's weight, else "".
        linear: The linear before, else None.
    """

    kind: Literal["norm", "values", "gated"]
    name: str = ""
    linear: FusedLinear | None = None


class Stream:
    """One value for all samples, [rows of the sample, features] float32 each.

    Args:
        sample: Computes one; or the samples themselves.
        count: Samples.
        origin: If its features can be scaled where they are made.
    """

    def __init__(
        self, sample: Callable[[int], Tensor] | list[Tensor], count: int, origin: Origin | None = None
    ) -> None:
        self._sample, self._count, self.origin = sample, count, origin
        self.read = False

    @property
    def count(self) -> int:
        """Samples."""
        return self._count

    def at(self, index: int) -> Tensor:
        """One sample's value."""
        return self._sample[index] if isinstance(self._sample, list) else self._sample(index)

    def all(self, workers: Workers) -> list[Tensor]:
        """All values, kept from now on."""
        if not isinstance(self._sample, list):
            self._sample = workers.map(self._sample, range(self._count))
        return self._sample


LinearHook = Callable[[FusedLinear, list[Tensor], Origin | None], tuple[Tensor, Tensor | None]]
"""From a linear, its input and where that comes from to the weight [out, in] and bias to compute it with."""


class CalibrationOps:
    """The ops that a decoder layer calls.

    Args:
        vector: Reads a norm's weight by its full name, [size] float32.
        linear: Called once for each linear, in the model's order.
        workers: Compute the samples.
        products: What linears and attention are computed in, `product_dtype`; everything else is float32.
    """

    def __init__(
        self,
        vector: Callable[[str], Tensor],
        linear: LinearHook,
        workers: Workers,
        products: torch.dtype = torch.float32,
    ) -> None:
        self._vector, self._linear, self._workers, self._products = vector, linear, workers, products

    def rms_norm(self, x: Stream, weight: Vector, eps: float) -> Stream:
        """As `Ops.rms_norm`."""
        values = self._vector(weight.name)

        def sample(index: int) -> Tensor:
            return _rms_norm(x.at(index), values, eps)

        return Stream(sample, x.count, Origin("norm", weight.name))

    def add_rms_norm(self, x: Stream, residual: Stream, weight: Vector, eps: float) -> tuple[Stream, Stream]:
        """As `Ops.add_rms_norm`."""
        total = self.add(x, residual)
        return self.rms_norm(total, weight, eps), total

    def add(self, x: Stream, residual: Stream) -> Stream:
        """As `Ops.add`; the sum of all samples is computed here."""
        total = self._workers.map(lambda index: x.at(index) + residual.at(index), range(x.count))
        return Stream(total, x.count)

    def linear(self, x: Stream, weight: FusedLinear) -> Stream:
        """As `Ops.linear`, with the weight that the hook gives."""
        assert not x.read, f"{weight.parts[0].name}: a value that two linears read cannot be scaled for one"
        x.read = True
        values = x.all(self._workers)
        matrix, bias = self._linear(weight, values, x.origin)
        matrix = matrix.to(self._products)
        made_by = Origin("gated", linear=weight)

        def sample(index: int) -> Tensor:
            product = functional.linear(values[index].to(matrix.dtype), matrix).float()
            return product if bias is None else product.add_(bias)

        return Stream(sample, x.count, made_by)

    def rope_kv_write(
        self,
        qkv: Stream,
        shape: AttentionShape,
        rope: RopeTable,
        norms: HeadNorms | None,
        batch: ForwardBatch,
        kv: KVCache,
        layer: int,
    ) -> Stream:
        """As `Ops.rope_kv_write`, but keys and values stay in the stream: [rows, q_size + 2 * kv_size]."""
        norm = None if norms is None else (self._vector(norms.q.name), self._vector(norms.k.name), norms.eps)

        def sample(index: int) -> Tensor:
            return _rotated(qkv.at(index), shape, rope, norm)

        origin = qkv.origin
        return Stream(sample, qkv.count, None if origin is None else Origin("values", "", origin.linear))

    def attention(
        self, q: Stream, shape: AttentionShape, batch: ForwardBatch, kv: KVCache, layer: int
    ) -> Stream:
        """As `Ops.attention`; every sample is a sequence of its own."""

        def sample(index: int) -> Tensor:
            return _attention(q.at(index).to(self._products), shape).float()

        return Stream(sample, q.count, q.origin)

    def gated(self, gate_up: Stream, activation: Activation) -> Stream:
        """As `Ops.gated`."""
        return Stream(lambda index: _gated(gate_up.at(index), activation), gate_up.count, gate_up.origin)


def product_dtype(stored: str) -> torch.dtype:
    """bfloat16 for models that are stored so, where the CPU multiplies it (several times as fast); else float32.

    Such a model runs in bfloat16 in the end, and its roundings are a hundredth of the errors of 4-bit weights.
    """
    known: dict[str, Any] = getattr(
        torch.cpu, "get_capabilities", dict
    )()  # newer than the oldest torch that will do
    has_products = bool(known.get("amx_bf16") or known.get("avx512_bf16"))
    return torch.bfloat16 if stored == "bfloat16" and has_products else torch.float32


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotated(
    qkv: Tensor, shape: AttentionShape, rope: RopeTable, norms: tuple[Tensor, Tensor, float] | None
) -> Tensor:
    rows, half = qkv.shape[0], shape.head_dim // 2
    q, k, v = torch.split(qkv, [shape.q_size, shape.kv_size, shape.kv_size], dim=1)
    cos, sin = (table[:rows].unsqueeze(1) for table in (rope.cos, rope.sin))
    parts = []
    q_norm, k_norm, eps = (None, None, 0.0) if norms is None else norms
    for part, norm in ((q, q_norm), (k, k_norm)):
        heads = part.reshape(rows, -1, shape.head_dim)
        if norm is not None:
            heads = _rms_norm(heads, norm, eps)
        low, high = heads[..., :half], heads[..., half:]
        parts.append(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).flatten(1))
    return torch.cat((*parts, v), dim=1)


def _attention(qkv: Tensor, shape: AttentionShape) -> Tensor:
    rows = qkv.shape[0]
    q, k, v = (
        part.reshape(1, rows, -1, shape.head_dim).transpose(1, 2)
        for part in torch.split(qkv, [shape.q_size, shape.kv_size, shape.kv_size], dim=1)
    )
    group = shape.num_heads // shape.num_kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    mask = None
    if shape.window is not None and shape.window < rows:
        at = torch.arange(rows)
        distance = at.unsqueeze(1) - at
        mask = (distance >= 0) & (distance < shape.window)
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=shape.scale
    )
    return out.transpose(1, 2).reshape(rows, shape.q_size)


def _gated(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="none" if activation == "gelu" else "tanh") * up


def embedded(samples: Sequence[Tensor], rows: Callable[[list[int]], Tensor]) -> list[Tensor]:
    """What the first layer reads, [rows, hidden_size] of each sample.

    Args:
        samples: Token ids, [rows] int64.
        rows: Reads rows of the embedding; each is read once.
    """
    ids, places = torch.unique(torch.cat(list(samples)), return_inverse=True)
    table = rows(ids.tolist())
    return [table[part] for part in places.split([len(sample) for sample in samples])]
