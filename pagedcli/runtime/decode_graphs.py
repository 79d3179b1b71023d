"""Decode steps of a worker as graphs, one for each of a few numbers of rows. May import torch.

A decode step computes one position of each sequence and samples a token. All that it needs of a row is where it is:

    inputs  | slots: 3 0 5 p | positions: 17 204 9 0 |      sent by the host; p stands for a row that fills up
                  |
    store, tables |  token, block, table of each row        fixed buffers that steps before this one wrote
                  v
    model -> logits -> greatest -> chosen | tokens | faults |, and the tokens into the store

Rows that fill up compute position 0 of a slot that is no request's: they read and write the scratch block alone. What
the greatest logit is not good enough for (temperature, penalties, log-probabilities) is taken from the logits after
the graph, by the same code as everywhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagedcli.core.plan import StepPlan
from pagedcli.ops.batch import ForwardBatch, KVCache
from pagedcli.runtime.batch_state import BatchState
from pagedcli.runtime.graphs import Captures
from pagedcli.runtime.sampler import greatest
from pagedcli.runtime.transfer import fill


class RunsSteps(Protocol):
    """The part of a model that a worker needs."""

    def forward(self, batch: ForwardBatch, kv: KVCache, /) -> Tensor:
        """Logits of the batch's logit rows, [num_logit_rows, vocab_size] float32."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a decode step gave.

    Attributes:
        logits: [rows, vocab_size] float32; the next step writes to the same memory.
        chosen: [2, rows] int64, greedy tokens and `Fault`s; memory of its own.
    """

    logits: Tensor
    chosen: Tensor


def is_decode(plan: StepPlan) -> bool:
    """Whether every entry computes one position and samples from it."""
    return all(entry.n == 1 and entry.samples and len(entry.logit_rows) == 1 for entry in plan.entries)


class DecodeGraphs:
    """Fixed buffers and the graphs over them.

    Args:
        model: Computes logits; its ops read nothing back and send nothing.
        kv: Its cache, with the scratch block of `state`.
        state: Tokens and tables of the slots.
        sizes: Numbers of rows, ascending.
    """

    def __init__(self, model: RunsSteps, kv: KVCache, state: BatchState, sizes: Sequence[int]) -> None:
        self._model, self._kv, self._state = model, kv, state
        self.sizes = tuple(sizes)
        most = self.sizes[-1]
        # A graph of fewer rows takes the front of each row of these.
        self._inputs = torch.zeros((2, most), dtype=torch.int64, device=state.device)
        self._chosen = torch.zeros((2, most), dtype=torch.int64, device=state.device)
        self._logits = torch.zeros((most, state.vocab_size), device=state.device)
        self._replays: dict[int, Callable[[], None]] = {}

    def capture(self, captures: Captures) -> None:
        """Record the steps of all sizes, the largest first."""
        self._send([], [], self.sizes[-1])
        sizes = self.sizes[::-1]
        replays = captures.capture([partial(self._compute, size) for size in sizes])
        self._replays = dict(zip(sizes, replays, strict=True))

    def takes(self, plan: StepPlan) -> bool:
        """Whether there is a graph for the plan."""
        return len(plan.entries) <= self.sizes[-1] and is_decode(plan)

    def run(self, plan: StepPlan) -> Decoded:
        """Carry out a plan that was taken over by the state and that `takes` is true of."""
        count = len(plan.entries)
        size = self.sizes[bisect_left(self.sizes, count)]
        self._send([entry.slot for entry in plan.entries], [entry.start for entry in plan.entries], size)
        self._replays[size]()
        chosen = self._chosen[:, :count].clone(memory_format=torch.contiguous_format)
        return Decoded(self._logits[:count], chosen)

    def _send(self, slots: list[int], positions: list[int], size: int) -> None:
        """One copy; it ends with the positions of the step."""
        most = self.sizes[-1]
        values = [
            *slots,
            *[self._state.no_slot] * (most - len(slots)),
            *positions,
            *[0] * (size - len(slots)),
        ]
        fill(self._inputs.view(-1)[: most + size], np.array(values, dtype=np.int64))

    def _compute(self, size: int) -> None:
        """What a graph does; all of it on the device."""
        slots, positions = self._inputs[0, :size], self._inputs[1, :size]
        store = self._state.store
        logits = self._model.forward(self._batch(slots, positions), self._kv)
        self._logits[:size].copy_(logits)
        tokens, faults = greatest(logits)
        self._chosen[0, :size].copy_(tokens)
        self._chosen[1, :size].copy_(faults)
        store[slots, positions + 1] = tokens.to(store.dtype)

    def _batch(self, slots: Tensor, positions: Tensor) -> ForwardBatch:
        size, block_size, tables = len(slots), self._state.block_size, self._state.tables.device
        blocks = tables[slots, positions // block_size].long()
        rows = torch.arange(size + 1, device=slots.device)
        return ForwardBatch(
            token_ids=self._state.store[slots, positions].long(),
            positions=positions,
            slot_mapping=blocks * block_size + positions % block_size,
            query_start=rows.int(),
            seq_lens=(positions + 1).int(),
            block_table=tables.index_select(0, slots),
            logit_rows=rows[:size],
            query_lens=(1,) * size,
            host_seq_lens=(),  # not known on the host: lengths grow from replay to replay
        )
