"""The layers that families are wired from: plain Python over the `Ops` protocol, weights behind handles.

Nothing here computes: values are opaque and go from op to op. Layers take the weights from a `Weights` source, which
loads them from a checkpoint or, for `expected_tensors`, only notes their names and shapes, so that a family says once
what it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pagedcli.models.spec import ModelSpec
from pagedcli.ops.batch import ForwardBatch, KVCache
from pagedcli.ops.protocol import Activation, AttentionShape, HeadNorms, Ops, Value
from pagedcli.ops.weights import EmbeddingTable, FusedLinear, RopeTable, Shard, Vector


class Weights(Protocol):
    """Where layers get their weights; names are the checkpoint's, shapes what the config asks for."""

    def vector(self, name: str, size: int) -> Vector:
        """[size], such as a norm's."""

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> EmbeddingTable:
        """[vocab_size, hidden_size]."""

    def linear(
        self, parts: Sequence[tuple[str, int]], in_features: int, *, bias: bool, shard: Shard
    ) -> FusedLinear:
        """Parts are (name without ".weight", output features)."""

    def tied_head(self, table: EmbeddingTable) -> FusedLinear:
        """The embedding used as the head."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Fused q, k, v; rotation and cache write; paged attention; output projection."""

    qkv: FusedLinear
    output: FusedLinear
    norms: HeadNorms | None
    shape: AttentionShape

    def __call__(
        self, ops: Ops, x: Value, rope: RopeTable, batch: ForwardBatch, kv: KVCache, layer: int
    ) -> Value:
        """[num_tokens, hidden_size] to the same."""
        qkv = ops.linear(x, self.qkv)
        q = ops.rope_kv_write(qkv, self.shape, rope, self.norms, batch, kv, layer)
        return ops.linear(ops.attention(q, self.shape, batch, kv, layer), self.output)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x)), gate and up fused."""

    gate_up: FusedLinear
    down: FusedLinear
    activation: Activation

    def __call__(self, ops: Ops, x: Value) -> Value:
        """[num_tokens, hidden_size] to the same."""
        return ops.linear(ops.gated(ops.linear(x, self.gate_up), self.activation), self.down)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Norm, attention, norm, MLP. The residual stream is passed beside the branch that is still to be added to it."""

    input_norm: Vector
    attention: Attention
    mlp_norm: Vector
    mlp: GatedMlp
    eps: float

    def __call__(
        self,
        ops: Ops,
        branch: Value,
        residual: Value | None,
        rope: RopeTable,
        batch: ForwardBatch,
        kv: KVCache,
        layer: int,
    ) -> tuple[Value, Value]:
        """(branch, residual) to the next layer's; the first layer gets the embeddings and no residual."""
        if residual is None:
            normed, residual = ops.rms_norm(branch, self.input_norm, self.eps), branch
        else:
            normed, residual = ops.add_rms_norm(branch, residual, self.input_norm, self.eps)
        branch = self.attention(ops, normed, rope, batch, kv, layer)
        normed, residual = ops.add_rms_norm(branch, residual, self.mlp_norm, self.eps)
        return self.mlp(ops, normed), residual


@dataclass(frozen=True, slots=True)
class Decoder:
    """Embedding, layers, last norm and head: all families share it."""

    embedding: EmbeddingTable
    layers: tuple[DecoderLayer, ...]
    norm: Vector
    head: FusedLinear
    eps: float

    def __call__(self, ops: Ops, rope: RopeTable, batch: ForwardBatch, kv: KVCache) -> Value:
        """Logits of `batch.logit_rows`, [num_logit_rows, vocab_size] float32."""
        branch, residual = ops.embedding(self.embedding, batch), None
        for index, layer in enumerate(self.layers):
            branch, residual = layer(ops, branch, residual, rope, batch, kv, index)
        # The last norm and the head see the asked rows only.
        branch, residual = ops.logit_rows(branch, batch), ops.logit_rows(residual, batch)
        normed, _ = ops.add_rms_norm(branch, residual, self.norm, self.eps)
        return ops.head(normed, self.head)


def attention(weights: Weights, spec: ModelSpec, prefix: str, layer: int) -> Attention:
    """Attention under Hugging Face's names, biases and head norms as the spec says."""
    sizes = (("q_proj", spec.q_size), ("k_proj", spec.kv_size), ("v_proj", spec.kv_size))
    norms = None
    if spec.head_norms:
        norms = HeadNorms(
            weights.vector(f"{prefix}.q_norm.weight", spec.head_dim),
            weights.vector(f"{prefix}.k_norm.weight", spec.head_dim),
            spec.norm_eps,
        )
    return Attention(
        qkv=weights.linear(
            [(f"{prefix}.{name}", size) for name, size in sizes],
            spec.hidden_size,
            bias=spec.qkv_bias,
            shard="column",
        ),
        output=weights.linear(
            [(f"{prefix}.o_proj", spec.hidden_size)], spec.q_size, bias=spec.output_bias, shard="row"
        ),
        norms=norms,
        shape=AttentionShape(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim**-0.5, spec.windows[layer]
        ),
    )


def gated_mlp(weights: Weights, spec: ModelSpec, prefix: str) -> GatedMlp:
    """The MLP under Hugging Face's names."""
    inner = spec.intermediate_size
    return GatedMlp(
        gate_up=weights.linear(
            [(f"{prefix}.gate_proj", inner), (f"{prefix}.up_proj", inner)],
            spec.hidden_size,
            bias=spec.mlp_bias,
            shard="column",
        ),
        down=weights.linear(
            [(f"{prefix}.down_proj", spec.hidden_size)], inner, bias=spec.mlp_bias, shard="row"
        ),
        activation=spec.activation,
    )


def decoder_layer(weights: Weights, spec: ModelSpec, index: int) -> DecoderLayer:
    """A layer with a norm before each of its two halves."""
    prefix = f"model.layers.{index}"
    return DecoderLayer(
        input_norm=weights.vector(f"{prefix}.input_layernorm.weight", spec.hidden_size),
        attention=attention(weights, spec, f"{prefix}.self_attn", index),
        mlp_norm=weights.vector(f"{prefix}.post_attention_layernorm.weight", spec.hidden_size),
        mlp=gated_mlp(weights, spec, f"{prefix}.mlp"),
        eps=spec.norm_eps,
    )


def decoder(weights: Weights, spec: ModelSpec) -> Decoder:
    """The whole model from `decoder_layer`s."""
    embedding = weights.embedding("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    layers = tuple(decoder_layer(weights, spec, index) for index in range(spec.num_layers))
    norm = weights.vector("model.norm.weight", spec.hidden_size)
    if spec.tied_head:
        head = weights.tied_head(embedding)
    else:
        head = weights.linear([("lm_head", spec.vocab_size)], spec.hidden_size, bias=False, shard="column")
    return Decoder(embedding, layers, norm, head, spec.norm_eps)
