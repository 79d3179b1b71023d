"""Loading: a checkpoint checked against its config, its weights handed to the ops, a model to run.

Imports nothing of a backend. Every tensor that the config asks for must be there with the right shape, and none may be
left over, before the first weight is loaded: a wrong file is told at once, by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pagedcli.errors import CheckpointError
from pagedcli.models.layers import Decoder
from pagedcli.models.registry import family_of
from pagedcli.models.rope import rope_tables
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.batch import ForwardBatch, KVCache
from pagedcli.ops.protocol import Ops, Value
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
)

# Buffers and copies that checkpoints carry and models compute or share: no fault if present.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".self_attn.masked_bias", ".self_attn.bias")
TIED_HEAD = "lm_head.weight"


class Checkpoint(Protocol):
    """What loading needs of `pagedcli.checkpoint.Checkpoint`."""

    @property
    def path(self) -> Path:
        """Folder or file, for errors."""

    @property
    def config(self) -> dict[str, Any]:
        """In the terms of a Hugging Face config.json."""

    def names(self) -> Collection[str]:
        """Of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor, without reading it."""

    def tensor(self, name: str) -> HostTensor:
        """One tensor, dequantized if it is stored as codes."""

    def quantized(self, linear: str) -> QuantizedPart | None:
        """A linear as codes, by its name without ".weight"; None if it is not stored so."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model ready to run: `forward` computes one step."""

    spec: ModelSpec
    ops: Ops
    decoder: Decoder
    rope: RopeTable
    max_model_len: int

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Value:
        """Logits of the batch's `logit_rows`: [num_logit_rows, vocab_size] float32."""
        return self.decoder(self.ops, self.rope, batch, kv)


def load_model(checkpoint: Checkpoint, ops: Ops, max_model_len: int, *, as_codes: bool = True) -> Model:
    """Load a model.

    Args:
        checkpoint: Open checkpoint.
        ops: Backend; its dtype is the weights' after loading.
        max_model_len: Longest sequence in tokens; positions have tables up to here.
        as_codes: Give quantized linears to the ops as they are stored; else they are dequantized first.

    Raises:
        CheckpointError: The config cannot be served, or tensors are missing, left over or of another shape.
    """
    spec = ModelSpec.from_config(checkpoint.config, f"{checkpoint.path}: config")
    check_tensors(checkpoint, spec)
    decoder = family_of(spec.architecture).wire(CheckpointWeights(checkpoint, ops, as_codes), spec)
    cos, sin = rope_tables(spec.rope, spec.head_dim, max_model_len)
    return Model(spec, ops, decoder, ops.load_rope(cos, sin), max_model_len)


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this spec has, by its Hugging Face name, with its shape."""
    notes = TensorNotes()
    family_of(spec.architecture).wire(notes, spec)
    return notes.shapes


def check_tensors(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Compare a checkpoint's tensors with the config's.

    Raises:
        CheckpointError: Names the file, the first tensor at fault and how many more there are.
    """
    expected = expected_tensors(spec)
    present = set(checkpoint.names())
    missing = [name for name in expected if name not in present]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {missing[0]} is missing{_more(missing)}: {_expected(expected, missing[0])}"
        )
    extra = sorted(name for name in present - set(expected) if not _may_be_ignored(name, spec))
    extra = [name for name in extra if not _is_zero_bias(checkpoint, name, expected)]
    if extra:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {extra[0]}{_more(extra)} is not part of {spec.architecture} as its config "
            "describes it: config and weights belong to different models"
        )
    for name, shape in expected.items():
        _check_shape(checkpoint, name, shape)


def _check_shape(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    found = tuple(checkpoint.shape(name))
    if found != shape:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name} has shape {list(found)}, its config asks for {list(shape)}"
        )


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _expected(expected: Mapping[str, tuple[int, ...]], name: str) -> str:
    return f"its config asks for shape {list(expected[name])}"


def _may_be_ignored(name: str, spec: ModelSpec) -> bool:
    return name.endswith(IGNORED_SUFFIXES) or (spec.tied_head and name == TIED_HEAD)


def _is_zero_bias(checkpoint: Checkpoint, name: str, expected: Mapping[str, Any]) -> bool:
    """AutoGPTQ writes a bias of zeros beside every quantized linear of a model that has none: it changes nothing."""
    linear = name.removesuffix(".bias")
    return linear != name and f"{linear}.weight" in expected and not checkpoint.tensor(name).data.any()


@dataclass(frozen=True, slots=True)
class CheckpointWeights:
    """`Weights` that come from a checkpoint through the ops."""

    checkpoint: Checkpoint
    ops: Ops
    as_codes: bool

    def vector(self, name: str, size: int) -> Vector:
        """[size]."""
        return self.ops.load_vector(self.checkpoint.tensor(name))

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> EmbeddingTable:
        """[vocab_size, hidden_size]."""
        part = self.checkpoint.quantized(name.removesuffix(".weight")) if self.as_codes else None
        if part is not None:
            return self.ops.load_quantized_embedding(part)
        return self.ops.load_embedding(self.checkpoint.tensor(name))

    def linear(
        self, parts: Sequence[tuple[str, int]], in_features: int, *, bias: bool, shard: Shard
    ) -> FusedLinear:
        """The parts' tensors joined."""
        biases = [self.checkpoint.tensor(f"{name}.bias") for name, _ in parts] if bias else None
        if self.as_codes:
            stored = [self._part(name) for name, _ in parts]
            if any(map(is_quantized, stored)):
                return self.ops.load_quantized(stored, biases, shard)
        weights = [self.checkpoint.tensor(f"{name}.weight") for name, _ in parts]
        return self.ops.load_linear(weights, biases, shard)

    def _part(self, name: str) -> StoredPart:
        return self.checkpoint.quantized(name) or self.checkpoint.tensor(f"{name}.weight")

    def tied_head(self, table: EmbeddingTable) -> FusedLinear:
        """Shares the embedding's memory."""
        return self.ops.tied_head(table)


@dataclass(frozen=True, slots=True)
class TensorNotes:
    """`Weights` that only note what is asked for; handles hold no data."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def vector(self, name: str, size: int) -> Vector:
        """Noted as [size]."""
        self.shapes[name] = (size,)
        return Vector(name, size, None)

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> EmbeddingTable:
        """Noted as [vocab_size, hidden_size]."""
        self.shapes[name] = (vocab_size, hidden_size)
        return EmbeddingTable(name, vocab_size, hidden_size, None)

    def linear(
        self, parts: Sequence[tuple[str, int]], in_features: int, *, bias: bool, shard: Shard
    ) -> FusedLinear:
        """Noted part by part."""
        for name, size in parts:
            self.shapes[f"{name}.weight"] = (size, in_features)
            if bias:
                self.shapes[f"{name}.bias"] = (size,)
        names = tuple(LinearPart(name, size) for name, size in parts)
        return FusedLinear(names, in_features, shard, "dense", None, None)

    def tied_head(self, table: EmbeddingTable) -> FusedLinear:
        """Reads nothing."""
        parts = (LinearPart("lm_head", table.vocab_size),)
        return FusedLinear(parts, table.hidden_size, "column", "dense", None, None)
