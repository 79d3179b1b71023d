"""The `Ops` protocol: all that a model may compute with. Imports nothing of a backend.

A model is plain Python over these functions, and the values that they return are opaque to it. That is what lets one
backend compute at once (torch) and another record the same calls into a native program. Hence the rules: no op reads a
value back to Python, sizes inside a call depend on the number of rows only, and whatever changes from step to step
comes from the `ForwardBatch`.

Every op gives each row the same bits whatever rows share its batch, however the prompt was cut into chunks and
whatever the block size (docs/architecture.md, "The same answer under any schedule"); on CUDA, cuBLAS does not promise
it for `linear` and `head`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pagedcli.ops.batch import ForwardBatch, KVCache
from pagedcli.ops.weights import (
    EmbeddingTable,
    FusedLinear,
    HostTensor,
    QuantizedPart,
    RopeTable,
    Shard,
    StoredPart,
    Vector,
)

Value = Any
"""An activation, [rows, features] of the run's dtype; opaque to models."""

Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What attention of one layer needs to know.

    Attributes:
        num_heads: Query heads; head h reads key-value head h // (num_heads / num_kv_heads).
        num_kv_heads: Divides num_heads.
        head_dim: Even.
        scale: Factor on the scores.
        window: A row at position p sees positions p - window + 1 to p; None: all up to p.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None

    @property
    def q_size(self) -> int:
        """Features of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of single heads of q and k before the rotation (Qwen3)."""

    q: Vector
    k: Vector
    eps: float


@dataclass(frozen=True, slots=True)
class OpReport:
    """Which implementation serves an op: `implementation` such as "torch", `detail` for people."""

    implementation: str
    detail: str


class Ops(Protocol):
    """Weights are made at load time by the `load_*` functions, the rest is called in every step."""

    @property
    def device(self) -> str:
        """Such as "cpu" or "cuda:0"."""

    @property
    def dtype(self) -> str:
        """Of weights, activations and KV: "float32", "bfloat16", "float16"; "float64" for reference runs."""

    def report(self) -> dict[str, OpReport]:
        """The implementation that serves each op, by the op's name."""

    # ---- weights

    def load_vector(self, tensor: HostTensor) -> Vector:
        """[size], such as a norm's weight."""

    def load_embedding(self, tensor: HostTensor) -> EmbeddingTable:
        """[vocab_size, hidden_size]."""

    def load_quantized_embedding(self, part: QuantizedPart) -> EmbeddingTable:
        """[vocab_size, hidden_size] that comes as codes; a tied head shares them."""

    def load_linear(
        self, weights: Sequence[HostTensor], biases: Sequence[HostTensor] | None, shard: Shard
    ) -> FusedLinear:
        """One fused linear; `weights` are [part, in_features] each, `biases` [part] each or None."""

    def load_quantized(
        self, parts: Sequence[StoredPart], biases: Sequence[HostTensor] | None, shard: Shard
    ) -> FusedLinear:
        """One fused linear of which at least one part comes as codes; parts may differ in every respect.

        Args:
            parts: [part, in_features] each.
            biases: [part] each, or None.
            shard: As in `FusedLinear`.
        """

    def tied_head(self, table: EmbeddingTable) -> FusedLinear:
        """A head that is the embedding itself, without a second copy."""

    def load_rope(self, cos: Any, sin: Any) -> RopeTable:
        """From numpy float32 arrays [max_positions, head_dim / 2]."""

    # ---- one step

    def embedding(self, table: EmbeddingTable, batch: ForwardBatch) -> Value:
        """[num_tokens, hidden_size]."""

    def rms_norm(self, x: Value, weight: Vector, eps: float) -> Value:
        """RMS norm x / sqrt(mean(x^2) + eps) * weight, in float32, rounded once."""

    def add_rms_norm(self, x: Value, residual: Value, weight: Vector, eps: float) -> tuple[Value, Value]:
        """(norm of the sum, the sum); both inputs may be overwritten."""

    def linear(self, x: Value, weight: FusedLinear) -> Value:
        """[rows, out_features]: x @ weight.T + bias, accumulated in float32 over K in one order."""

    def rope_kv_write(
        self,
        qkv: Value,
        shape: AttentionShape,
        rope: RopeTable,
        norms: HeadNorms | None,
        batch: ForwardBatch,
        kv: KVCache,
        layer: int,
    ) -> Value:
        """Norm (if any) and rotate q and k, write k and v to the cache; returns q, [num_tokens, q_size]."""

    def attention(
        self, q: Value, shape: AttentionShape, batch: ForwardBatch, kv: KVCache, layer: int
    ) -> Value:
        """Causal attention of every row over its own sequence's cached keys, [num_tokens, q_size]."""

    def gated(self, gate_up: Value, activation: Activation) -> Value:
        """activation(first half) * second half, [rows, features / 2]."""

    def add(self, x: Value, residual: Value) -> Value:
        """The sum; both inputs may be overwritten."""

    def logit_rows(self, x: Value, batch: ForwardBatch) -> Value:
        """The rows of `batch.logit_rows`, in that order."""

    def head(self, x: Value, weight: FusedLinear) -> Value:
        """Logits, [rows, vocab_size] float32."""
