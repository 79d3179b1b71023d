"""Builds forward batches by hand, over a KV cache whose unwritten cells are NaN. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagedcli.models.load import Model
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.batch import ForwardBatch
from pagedcli.ops.torch_ops import TORCH_DTYPES
from tests.tables import chunked, scattered_tables

__all__ = ["Chunk", "PoisonedKV", "chunked", "make_batch", "run_steps", "scattered_tables"]


class PoisonedKV:
    """A `KVCache` in which reading a cell before it is written spoils the result."""

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: str, device: str = "cpu"
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (2, spec.num_layers, num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        self._cells = torch.full(shape, float("nan"), dtype=TORCH_DTYPES[dtype], device=device)

    def key(self, layer: int) -> torch.Tensor:
        return self._cells[0, layer]

    def value(self, layer: int) -> torch.Tensor:
        return self._cells[1, layer]


@dataclass
class Chunk:
    """Positions `start` to `start + n - 1` of a sequence whose tokens and table are known."""

    tokens: Sequence[int]
    table: Sequence[int]
    start: int
    n: int


def make_batch(chunks: Sequence[Chunk], block_size: int, device: str = "cpu") -> ForwardBatch:
    """A batch that asks for the logits of every row."""
    rows = [(chunk, at) for chunk in chunks for at in range(chunk.start, chunk.start + chunk.n)]
    query_lens = [chunk.n for chunk in chunks]
    seq_lens = [chunk.start + chunk.n for chunk in chunks]
    width = max(len(chunk.table) for chunk in chunks)
    starts = [sum(query_lens[:index]) for index in range(len(chunks) + 1)]

    def array(values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return ForwardBatch(
        token_ids=array([chunk.tokens[at] for chunk, at in rows]),
        positions=array([at for _, at in rows]),
        slot_mapping=array([c.table[at // block_size] * block_size + at % block_size for c, at in rows]),
        query_start=array(starts, torch.int32),
        seq_lens=array(seq_lens, torch.int32),
        block_table=array([[*c.table, *[0] * (width - len(c.table))] for c in chunks], torch.int32),
        logit_rows=array(range(len(rows))),
        query_lens=query_lens,
        host_seq_lens=seq_lens,
    )


def run_steps(
    model: Model,
    sequences: Sequence[Sequence[int]],
    steps: Sequence[Sequence[tuple[int, int]]],
    block_size: int = 16,
) -> list[torch.Tensor]:
    """Logits of every row of every sequence, [length, vocab] each.

    Args:
        model: On the CPU.
        sequences: Token ids.
        steps: Of each step, (index of the sequence, rows) of those that take part.
        block_size: Tokens in a block.
    """
    tables, num_blocks = scattered_tables([len(tokens) for tokens in sequences], block_size)
    kv = PoisonedKV(model.spec, num_blocks, block_size, model.ops.dtype)
    done = [0] * len(sequences)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in steps:
        chunks = [Chunk(sequences[index], tables[index], done[index], n) for index, n in step]
        with torch.inference_mode():
            result = model.forward(make_batch(chunks, block_size), kv)
        for (index, n), part in zip(step, result.split([n for _, n in step]), strict=True):
            logits[index].append(part)
            done[index] += n
    return [torch.cat(parts) for parts in logits]
