"""The reference that quality is measured with: one decoder layer at a time, whole windows, float32. May import torch.

Weights come from a checkpoint as every other reader gets them, quantized linears dequantized, so that what is judged is
what lies on the disk. Only one layer is in memory; a window is a batch of one sequence, attention sees it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedcli.checkpoint.base import Checkpoint
from pagedcli.models.layers import Decoder, DecoderLayer
from pagedcli.models.load import CheckpointWeights, TensorNotes
from pagedcli.models.registry import family_of
from pagedcli.models.rope import rope_tables
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.batch import ForwardBatch, KVCache
from pagedcli.ops.protocol import AttentionShape, HeadNorms
from pagedcli.ops.torch_ops import TorchOps
from pagedcli.ops.weights import EmbeddingTable, FusedLinear, RopeTable, Shard, Vector

Tap = Callable[[FusedLinear, Tensor, Tensor], None]
"""Told of every linear, its input and its output."""
State = tuple[Tensor, Tensor | None]
"""(branch, residual) between layers, [tokens, hidden_size] each."""


class WindowOps(TorchOps):
    """The ops over one window as a whole: no pages, and a look at the output of every linear."""

    def __init__(self) -> None:
        super().__init__("cpu", "float32")
        self.tap: Tap | None = None
        self._keys_values: tuple[Tensor, Tensor] | None = None

    def linear(self, x: Tensor, weight: FusedLinear) -> Tensor:
        """[rows, out_features]."""
        out = torch.nn.functional.linear(x, weight.weight, weight.bias)
        if self.tap is not None:
            self.tap(weight, x, out)
        return out

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
        """As in `TorchOps`; keys and values are kept for `attention`, which comes next."""
        cache = _WindowCache(qkv.shape[0], shape)
        q = super().rope_kv_write(qkv, shape, rope, norms, batch, cache, layer)
        self._keys_values = (cache.key(layer)[0], cache.value(layer)[0])
        return q

    def attention(
        self, q: Tensor, shape: AttentionShape, batch: ForwardBatch, kv: KVCache, layer: int
    ) -> Tensor:
        """Every row over the rows before it in the window."""
        assert self._keys_values is not None
        key, value = self._keys_values
        heads = q.view(-1, shape.num_heads, shape.head_dim).transpose(0, 1)
        groups = shape.num_heads // shape.num_kv_heads
        mixed = torch.nn.functional.scaled_dot_product_attention(
            heads[None],
            key.repeat_interleave(groups, 0)[None],
            value.repeat_interleave(groups, 0)[None],
            attn_mask=_visible(q.shape[0], shape.window),
            scale=shape.scale,
        )
        return mixed[0].transpose(0, 1).flatten(1)


def _visible(rows: int, window: int | None) -> Tensor:
    """[rows, rows] bool: which keys a row sees."""
    seen = torch.ones(rows, rows, dtype=torch.bool).tril()
    return seen if window is None else seen.triu(1 - window)


class _WindowCache:
    """A `KVCache` of one block that holds the window."""

    def __init__(self, rows: int, shape: AttentionShape) -> None:
        self.num_blocks, self.block_size = 1, rows
        self._pool = torch.zeros(2, 1, shape.num_kv_heads, rows, shape.head_dim)

    def key(self, layer: int) -> Tensor:
        """[1, num_kv_heads, rows, head_dim]."""
        return self._pool[0]

    def value(self, layer: int) -> Tensor:
        """As `key`."""
        return self._pool[1]


@dataclass(frozen=True, slots=True)
class _SomeWeights:
    """`Weights` that loads what `wanted` says and only notes the rest."""

    loaded: CheckpointWeights
    noted: TensorNotes
    wanted: Callable[[str], bool]

    def _source(self, name: str) -> CheckpointWeights | TensorNotes:
        return self.loaded if self.wanted(name) else self.noted

    def vector(self, name: str, size: int) -> Vector:
        """[size]."""
        return self._source(name).vector(name, size)

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> EmbeddingTable:
        """[vocab_size, hidden_size]."""
        return self._source(name).embedding(name, vocab_size, hidden_size)

    def linear(
        self, parts: Sequence[tuple[str, int]], in_features: int, *, bias: bool, shard: Shard
    ) -> FusedLinear:
        """The parts' tensors joined."""
        return self._source(parts[0][0]).linear(parts, in_features, bias=bias, shard=shard)

    def tied_head(self, table: EmbeddingTable) -> FusedLinear:
        """The embedding, loaded or not."""
        return self.loaded.ops.tied_head(table)


@dataclass(slots=True)
class StreamedModel:
    """A checkpoint whose layers are loaded one at a time.

    Attributes:
        checkpoint: Where the weights are.
        spec: Its architecture.
        ops: Shared by all layers; set `ops.tap` to see the outputs of linears.
    """

    checkpoint: Checkpoint
    spec: ModelSpec
    ops: WindowOps = field(default_factory=WindowOps)
    _rope: RopeTable | None = None
    _batches: dict[int, ForwardBatch] = field(default_factory=dict)

    @classmethod
    def open(cls, checkpoint: Checkpoint) -> StreamedModel:
        """From an open checkpoint."""
        config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
        return cls(checkpoint, ModelSpec.from_config(config, f"{checkpoint.path}: config"))

    def embed(self, windows: Sequence[np.ndarray[Any, Any]]) -> list[State]:
        """States before the first layer, one for each window of token ids."""
        decoder = self._wire(lambda name: "embed_tokens" in name)
        return [(self.ops.embedding(decoder.embedding, self._batch(ids)), None) for ids in windows]

    def layer(self, index: int) -> DecoderLayer:
        """One layer with its weights."""
        prefix = f"model.layers.{index}."
        return self._wire(lambda name: name.startswith(prefix)).layers[index]

    def run(self, layer: DecoderLayer, index: int, state: State) -> State:
        """The state after a layer; the given one is left as it is."""
        branch, residual = state
        batch = self._rows(branch.shape[0])
        no_cache: Any = None
        copied = None if residual is None else residual.clone()
        return layer(self.ops, branch.clone(), copied, self._rope_table(), batch, no_cache, index)

    def head(self) -> Head:
        """The last norm and the head; the embedding is loaded only where it is the head."""
        skipped = ("model.layers.",) if self.spec.tied_head else ("model.layers.", "model.embed_tokens.")
        decoder = self._wire(lambda name: not name.startswith(skipped))
        return Head(self.ops, decoder)

    def _wire(self, wanted: Callable[[str], bool]) -> Decoder:
        weights = _SomeWeights(
            CheckpointWeights(self.checkpoint, self.ops, as_codes=False), TensorNotes(), wanted
        )
        return family_of(self.spec.architecture).wire(weights, self.spec)

    def _rope_table(self) -> RopeTable:
        if self._rope is None:
            length = max(self._batches)
            self._rope = self.ops.load_rope(*rope_tables(self.spec.rope, self.spec.head_dim, length))
        return self._rope

    def _batch(self, ids: np.ndarray[Any, Any]) -> ForwardBatch:
        batch = self._rows(len(ids))
        batch.token_ids = torch.from_numpy(np.ascontiguousarray(ids, np.int64))
        return batch

    def _rows(self, count: int) -> ForwardBatch:
        """A batch of one sequence of `count` tokens from position 0; made once for each length."""
        if count not in self._batches:
            rows = torch.arange(count)
            self._batches[count] = ForwardBatch(
                token_ids=None,
                positions=rows,
                slot_mapping=rows,
                query_start=None,
                seq_lens=None,
                block_table=None,
                logit_rows=rows,
                query_lens=(count,),
                host_seq_lens=(count,),
            )
        return self._batches[count]


@dataclass(frozen=True, slots=True)
class Head:
    """From the last layer's state to logits."""

    ops: WindowOps
    decoder: Decoder

    def hidden(self, state: State) -> Tensor:
        """The rows that go into the head, [tokens, hidden_size]."""
        branch, residual = state
        assert residual is not None  # there is at least one layer
        return self.ops.add_rms_norm(branch.clone(), residual, self.decoder.norm, self.decoder.eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab_size] float32."""
        return self.ops.head(hidden, self.decoder.head)
