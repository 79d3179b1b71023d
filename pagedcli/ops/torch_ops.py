"""`TorchOps`: the ops computed at once by torch, on the CPU or on CUDA. Imports torch and `paged_kernels`.

Right before fast, and the reference for other backends. On the CPU linears and attention run in the batch-invariant
forms of `paged_kernels`; on CUDA linears are one cuBLAS call each, whose bits may depend on the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from paged_kernels import reference, torch_attention
from paged_kernels.torch_linear import ROW_TILE, tiled_linear
from torch import Tensor

from pagedcli.errors import ConfigError
from pagedcli.ops.batch import ForwardBatch, KVCache
from pagedcli.ops.protocol import Activation, AttentionShape, HeadNorms, OpReport
from pagedcli.ops.weights import (
    EmbeddingTable,
    FusedLinear,
    HostTensor,
    LinearPart,
    QuantizedPart,
    RopeTable,
    Shard,
    StoredPart,
    Vector,
    is_quantized,
    part_name,
)

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def cuda_version() -> tuple[str, str | None]:
    """Torch's version, and that of CUDA which it was built for; None: without."""
    return torch.__version__, torch.version.cuda


def cuda_is_available() -> bool:
    """Whether torch was built for CUDA and finds a device."""
    return torch.cuda.is_available()


class TorchOps:
    """Implements `Ops`; a value is a tensor [rows, features] on the device.

    Args:
        device: "cpu", "cuda", "cuda:1" and the like.
        dtype: A key of `TORCH_DTYPES`.
        notes: What a user should know of the choice of these ops.

    Attributes:
        notes: As given, and what came up since.
        weight_bytes: Memory of all weights loaded so far.

    Raises:
        ConfigError: There is no such dtype.
    """

    def __init__(self, device: str, dtype: str, *, notes: tuple[str, ...] = ()) -> None:
        self.notes = notes
        self.weight_bytes = 0
        if dtype not in TORCH_DTYPES:
            raise ConfigError(f"model.dtype is {dtype!r}: choose one of {', '.join(TORCH_DTYPES)}")
        self._device = torch.device(device)
        self._dtype_name = dtype
        self._dtype = TORCH_DTYPES[dtype]

    def load_notes(self) -> tuple[str, ...]:
        """What a user should know once a model is loaded."""
        return self.notes

    def why_eager(self) -> str | None:
        """Why decode steps cannot be CUDA graphs; None: they can."""
        return "torch's attention is laid out by the host in every step"

    @property
    def device(self) -> str:
        """Such as "cpu" or "cuda:0"."""
        return str(self._device)

    @property
    def dtype(self) -> str:
        """Of weights, activations and KV."""
        return self._dtype_name

    def report(self) -> dict[str, OpReport]:
        """The implementation that serves each op, by the op's name."""
        on_cpu = self._device.type == "cpu"
        plain = OpReport("torch", f"torch {torch.__version__} on {self._device}")
        linear = OpReport(
            "torch",
            f"{plain.detail}, {f'tiles of {ROW_TILE} rows' if on_cpu else 'cuBLAS, bits may depend on rows'}",
        )
        attention = OpReport("torch", f"{plain.detail}, splits of {torch_attention.SPLIT} tokens")
        report = dict.fromkeys(
            ("embedding", "rms_norm", "add_rms_norm", "rope_kv_write", "gated", "add", "logit_rows"), plain
        )
        return report | {"linear": linear, "head": linear, "attention": attention}

    # ---- weights

    def load_vector(self, tensor: HostTensor) -> Vector:
        """[size], such as a norm's weight."""
        return Vector(tensor.name, tensor.shape[0], self._load(tensor))

    def load_embedding(self, tensor: HostTensor) -> EmbeddingTable:
        """[vocab_size, hidden_size]."""
        return EmbeddingTable(tensor.name, tensor.shape[0], tensor.shape[1], self._load(tensor))

    def load_quantized_embedding(self, part: QuantizedPart) -> EmbeddingTable:
        """As `load_embedding`, dequantized."""
        table = self._empty(*part.shape)
        table.copy_(torch.from_numpy(part.dequantize()))
        return EmbeddingTable(f"{part.name}.weight", part.shape[0], part.shape[1], table)

    def load_linear(
        self, weights: Sequence[HostTensor], biases: Sequence[HostTensor] | None, shard: Shard
    ) -> FusedLinear:
        """One fused linear; `weights` are [part, in_features] each, `biases` [part] each or None."""
        parts = tuple(LinearPart(part.name.removesuffix(".weight"), part.shape[0]) for part in weights)
        bias = None if biases is None else self._load_joined(biases)
        return FusedLinear(parts, weights[0].shape[1], shard, "dense", self._load_joined(weights), bias)

    def load_quantized(
        self, parts: Sequence[StoredPart], biases: Sequence[HostTensor] | None, shard: Shard
    ) -> FusedLinear:
        """Dequantized to the run's dtype, part by part: the reference, and what CUDA computes with."""
        in_features, sizes = parts[0].shape[1], [part.shape[0] for part in parts]
        weight = self._empty(sum(sizes), in_features)
        for rows, part in zip(torch.split(weight, sizes), parts, strict=True):
            rows.copy_(_part_values(part))
        bias = None if biases is None else self._load_joined(biases)
        return self._fused(parts, in_features, shard, weight, bias)

    def _fused(
        self, parts: Sequence[StoredPart], in_features: int, shard: Shard, weight: Any, bias: Any = None
    ) -> FusedLinear:
        names = tuple(LinearPart(part_name(part), part.shape[0]) for part in parts)
        return FusedLinear(names, in_features, shard, "quantized", weight, bias)

    def tied_head(self, table: EmbeddingTable) -> FusedLinear:
        """A head that is the embedding itself, without a second copy."""
        parts = (LinearPart("lm_head", table.vocab_size),)
        return FusedLinear(parts, table.hidden_size, "column", "dense", table.data, None)

    def load_rope(self, cos: Any, sin: Any) -> RopeTable:
        """From numpy float32 arrays [max_positions, head_dim / 2]."""
        cos, sin = torch.from_numpy(cos).to(self._device), torch.from_numpy(sin).to(self._device)
        return RopeTable(cos.shape[0], 2 * cos.shape[1], cos, sin)

    # ---- one step

    def embedding(self, table: EmbeddingTable, batch: ForwardBatch) -> Tensor:
        """[num_tokens, hidden_size]."""
        return reference.embedding(table.data, batch.token_ids)

    def rms_norm(self, x: Tensor, weight: Vector, eps: float) -> Tensor:
        """Computed in float32, rounded once."""
        return reference.rms_norm(x, weight.data, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Vector, eps: float) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum)."""
        return reference.add_rms_norm(x, residual, weight.data, eps)

    def linear(self, x: Tensor, weight: FusedLinear) -> Tensor:
        """[rows, out_features]."""
        if self._device.type == "cpu":
            return tiled_linear(x, weight.weight, weight.bias)
        return torch.nn.functional.linear(x, weight.weight, weight.bias)

    def rope_kv_write(
        self,
        qkv: Tensor,
        shape: AttentionShape,
        rope: RopeTable,
        norms: HeadNorms | None,
        batch: ForwardBatch,
        kv: KVCache,
        layer: int,
    ) -> Tensor:
        """Norm (if any) and rotate q and k, write k and v to the cache; returns q, [num_tokens, q_size]."""
        q, k, v = torch.split(qkv, [shape.q_size, shape.kv_size, shape.kv_size], dim=1)
        cos, sin = self._angles(rope, batch)
        q_norm, k_norm = (norms.q, norms.k) if norms is not None else (None, None)
        eps = norms.eps if norms is not None else 0.0
        q = _rotate_heads(q, shape.head_dim, cos, sin, q_norm, eps)
        k = _rotate_heads(k, shape.head_dim, cos, sin, k_norm, eps)
        rows = self._cache_rows(batch, shape, kv.block_size)
        for cache, new in ((kv.key(layer), k), (kv.value(layer), v)):
            cache.view(-1, shape.head_dim).index_copy_(0, rows, new.reshape(-1, shape.head_dim))
        return q.flatten(1)

    def attention(
        self, q: Tensor, shape: AttentionShape, batch: ForwardBatch, kv: KVCache, layer: int
    ) -> Tensor:
        """Causal attention of every row over its own sequence's cached keys, [num_tokens, q_size]."""
        key = f"attention:{shape}"
        if key not in batch.scratch:
            heads = torch_attention.Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim)
            batch.scratch[key] = torch_attention.plan_attention(
                heads, batch.block_table, kv.block_size, batch.query_lens, batch.host_seq_lens, shape.window
            )
        rows = q.view(-1, shape.num_heads, shape.head_dim)
        return torch_attention.paged_attention(
            rows, kv.key(layer), kv.value(layer), batch.scratch[key], shape.scale
        ).flatten(1)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(first half) * second half, [rows, features / 2]."""
        return reference.gated(gate_up, activation)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The sum."""
        return x + residual

    def logit_rows(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """The rows of `batch.logit_rows`, in that order."""
        return reference.select_rows(x, batch.logit_rows)

    def head(self, x: Tensor, weight: FusedLinear) -> Tensor:
        """Logits, [rows, vocab_size] float32; below float32 they have been rounded to the run's dtype."""
        logits = self.linear(x, weight)
        return logits if logits.dtype == torch.float64 else logits.float()

    # ---- helpers

    def _load(self, tensor: HostTensor) -> Tensor:
        loaded = self._empty(*tensor.shape)
        loaded.copy_(_view(tensor))
        tensor.release()
        return loaded

    def _empty(self, *shape: int) -> Tensor:
        """For a weight; it is counted."""
        self.weight_bytes += self._dtype.itemsize * math.prod(shape)
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _load_joined(self, tensors: Sequence[HostTensor]) -> Tensor:
        """Tensors one below the other, converted part by part so that no second whole copy exists."""
        total = sum(tensor.shape[0] for tensor in tensors)
        joined = self._empty(total, *tensors[0].shape[1:])
        for part, tensor in zip(
            torch.split(joined, [tensor.shape[0] for tensor in tensors]), tensors, strict=True
        ):
            part.copy_(_view(tensor))
            tensor.release()
        return joined

    def _angles(self, rope: RopeTable, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        if "angles" not in batch.scratch:
            batch.scratch["angles"] = (
                rope.cos.index_select(0, batch.positions),
                rope.sin.index_select(0, batch.positions),
            )
        angles: tuple[Tensor, Tensor] = batch.scratch["angles"]
        return angles

    def _cache_rows(self, batch: ForwardBatch, shape: AttentionShape, block_size: int) -> Tensor:
        """[num_tokens * num_kv_heads]: where a token's heads lie in the cache seen as [rows, head_dim]."""
        if "cache_rows" not in batch.scratch:
            slots = batch.slot_mapping.unsqueeze(1)
            heads = torch.arange(shape.num_kv_heads, device=self._device)
            blocks = slots // block_size * shape.num_kv_heads + heads
            batch.scratch["cache_rows"] = (blocks * block_size + slots % block_size).flatten()
        rows: Tensor = batch.scratch["cache_rows"]
        return rows


def _rotate_heads(
    x: Tensor, head_dim: int, cos: Tensor, sin: Tensor, norm: Vector | None, eps: float
) -> Tensor:
    """[num_tokens, heads, head_dim]; norm and rotation both in the wide dtype, rounded once."""
    heads = x.reshape(x.shape[0], -1, head_dim)
    if norm is None:
        return reference.rotate(heads, cos, sin)
    wide = reference.rms_norm(heads.to(reference.compute_dtype(x.dtype)), norm.data, eps)
    return reference.rotate(wide, cos, sin).to(x.dtype)


def _part_values(part: StoredPart) -> Tensor:
    return torch.from_numpy(part.dequantize()) if is_quantized(part) else _view(cast("HostTensor", part))


def _view(tensor: HostTensor) -> Tensor:
    """The stored tensor without a copy; torch wants writable memory, so a read-only map is copied first."""
    data = tensor.data  # may be computed on the way
    if not data.flags.writeable:
        data = np.array(data)
    return torch.from_numpy(data).view(STORED_DTYPES[tensor.dtype]).view(tensor.shape)
