"""What the native worker remembers between steps: tokens, block tables and sampling of every slot. Numpy, no torch.

The same job as `batch_state`, laid out for few Python operations a step, since each runs with caches that the weights
have just swept: everything of a slot is a row of an array, and a step gathers the rows of its slots at once. A decode
step of the same slots as the step before only counts its arrays up (`_Decodes`). Python loops over entries only where
something is new (admissions, blocks) or rare (prompt log-probabilities).

    token store [max_num_seqs, max_model_len + 1] int32     tables [max_num_seqs, max_blocks] int32
    slot 0 | prompt ... sampled ... |                       slot 0 | 7 3 9 . |

Plans are applied in the order of submission (I10); an entry computes only positions whose tokens are in the store and
whose blocks are in the slot's table (I3), which is asserted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from paged_kernels.native import SAMPLE_ROW

from pagedcli.core.plan import Admission, PlanEntry, StepPlan
from pagedcli.runtime.native_rows import NO_LOGPROBS, SlotSampling, make_slot_sampling

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, as `Program.run` takes them; see `ForwardBatch`."""

    token_ids: Array
    positions: Array
    slot_mapping: Array
    query_start: Array
    seq_lens: Array
    block_table: Array
    logit_rows: Array


@dataclass(frozen=True, slots=True)
class StepSampling:
    """What to take from the logits of a step.

    Attributes:
        entries: [num_samples] int64, plan entry of each token to sample.
        slots: [num_samples] int64.
        positions: [num_samples] int64, index of the sampled token in its sequence.
        rows: [num_samples] of SAMPLE_ROW.
        wants_logprobs: Whether any sampled token's log-probability is asked for.
        prompt: Prompt tokens whose log-probabilities are asked for, or None.
    """

    entries: Array
    slots: Array
    positions: Array
    rows: Array
    wants_logprobs: bool
    prompt: PromptRows | None


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Prompt tokens under rows of the logits, each [count] int64; `entries` are plan entries."""

    entries: Array
    logit_rows: Array
    tokens: Array
    num_top: Array


class NativeState:
    """Applies plans to the slots and lays out their rows.

    Args:
        max_num_seqs: Slots.
        max_model_len: Longest sequence in tokens.
        block_size: Tokens in a block.
        vocab_size: Rows of the head.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        # Zeros take memory only where they are written. One more than the longest sequence: the token after the last
        # position may be sampled, never computed.
        self.store: Array = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self._tables: Array = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self._num_known: Array = np.zeros(max_num_seqs, np.int64)
        self._num_blocks: Array = np.zeros(max_num_seqs, np.int64)
        self._sample_rows: Array = np.zeros(max_num_seqs, SAMPLE_ROW)
        self._samplings: dict[int, SlotSampling] = {}
        self._counter: Array = np.arange(max_num_seqs + 1)
        self._decodes: _Decodes | None = None

    def apply(self, plan: StepPlan) -> tuple[StepRows, StepSampling]:
        """Take over what the plan changes and return the step's rows, which are valid until the next call.

        Copies are the KV pool's business.
        """
        columns = tuple(zip(*plan.entries, strict=True))
        if self._decodes is not None:
            if not plan.freed_slots and self._goes_on(self._decodes, columns):
                return self._decodes.rows, self._decodes.sampling
            self._num_known[self._decodes.sampling.slots] = self._decodes.rows.seq_lens + np.int64(1)
            self._decodes = None
        for slot in plan.freed_slots:
            self._free(slot)
        _, slots, _, starts, lens, samples, logit_rows, new_blocks, admissions = columns
        if any(admissions):
            for slot, admission in zip(slots, admissions, strict=True):
                if admission is not None:
                    self._admit(slot, admission)
        if any(new_blocks):
            for slot, blocks in zip(slots, new_blocks, strict=True):
                if blocks:
                    self._append(slot, blocks)
        step = _Entries(np.array(slots), np.array(starts), np.array(lens), np.array(samples))
        self._check(plan.entries, step)
        query_start = self._query_start(step)
        sampled = np.flatnonzero(step.samples)
        if sum(map(len, logit_rows)) == len(sampled):
            wanted = query_start[1:][sampled] - 1
            at, prompt = self._counter[: len(sampled)], None
        else:
            wanted, at, prompt = self._prompt_rows(plan.entries, query_start)
        rows = self._lay_out(step, query_start, wanted)
        sampling = self._sampling(step, sampled, at, prompt)
        if step.only_single and prompt is None and len(sampled) == len(slots):
            self._decodes = _Decodes(columns, rows, sampling, self.store.shape[1], self.block_size)
        return rows, sampling

    def _goes_on(self, decodes: _Decodes, columns: tuple[Any, ...]) -> bool:
        """Count the arrays up if this step decodes the next token of the very same slots."""
        _, _, _, starts, _, _, _, new_blocks, admissions = columns
        if not decodes.same(columns) or any(admissions):
            return False
        has_new_blocks = any(new_blocks)
        if has_new_blocks:
            for slot, blocks in zip(columns[1], new_blocks, strict=True):
                if blocks:
                    self._append(slot, blocks)
        decodes.count_up()
        rows, slots = decodes.rows, decodes.sampling.slots
        wrong = rows.positions != np.array(starts)
        if has_new_blocks or decodes.at_block_end():
            wrong |= rows.seq_lens > self._num_blocks[slots] * self.block_size
            self._place(decodes)
        assert not wrong.any(), (
            f"slot {columns[1][int(wrong.argmax())]}: not its next position, or beyond its table"
        )
        rows.token_ids[:] = self.store.reshape(-1)[decodes.cells]
        return True

    def _place(self, decodes: _Decodes) -> None:
        """Where keys go, and the tables, once a row has come to another block."""
        rows, slots = decodes.rows, decodes.sampling.slots
        blocks, decodes.offsets[:] = np.divmod(rows.positions, self.block_size)
        rows.slot_mapping[:] = self._tables[slots, blocks] * np.int64(self.block_size) + decodes.offsets
        width = int(blocks.max()) + 1
        decodes.replace_table(np.take(self._tables[:, :width], slots, axis=0))

    def write_tokens(self, sampling: StepSampling, tokens: Array) -> None:
        """Put sampled tokens, [num_samples] int64, where the following steps find them."""
        if self._decodes is not None:
            self.store.reshape(-1)[self._decodes.cells + 1] = tokens
        else:
            self.store[sampling.slots, sampling.positions] = tokens

    def _free(self, slot: int) -> None:
        # A slot freed before its admission was ever issued is unknown here.
        self._samplings.pop(slot, None)
        self._num_known[slot] = self._num_blocks[slot] = 0

    def _admit(self, slot: int, admission: Admission) -> None:
        count = len(admission.tokens)
        tokens = self.store[slot]
        tokens[:count] = admission.tokens
        # The kernels trust the ids that they look up; negative ones are large here.
        assert tokens[:count].view(np.uint32).max() < self.vocab_size, (
            f"slot {slot}: ids beyond the vocabulary"
        )
        self._tables[slot, : len(admission.table)] = admission.table
        self._num_known[slot] = count
        self._num_blocks[slot] = len(admission.table)
        self._samplings[slot] = sampling = make_slot_sampling(admission, self.vocab_size, tokens)
        self._sample_rows[slot] = sampling.row[0]

    def _append(self, slot: int, blocks: tuple[int, ...]) -> None:
        first = int(self._num_blocks[slot])
        self._tables[slot, first : first + len(blocks)] = blocks
        self._num_blocks[slot] = first + len(blocks)

    def _check(self, entries: tuple[PlanEntry, ...], step: _Entries) -> None:
        computed, known = step.ends, self._num_known[step.slots]
        beyond = computed > self._num_blocks[step.slots] * self.block_size
        wrong = (step.lens < 1) | beyond | (computed > known) | (step.samples & (computed != known))
        if not wrong.any():
            return
        at = int(wrong.argmax())
        name = f"request {entries[at].request_id}"
        assert step.lens[at] >= 1, f"{name}: an empty entry"
        assert not beyond[at], f"{name}: beyond its table"
        assert computed[at] <= known[at], f"{name}: a position without a token"
        raise AssertionError(f"{name}: samples too early")

    def _query_start(self, step: _Entries) -> Array:
        """[num_entries + 1] int64."""
        if step.only_single:
            return self._counter[: len(step.slots) + 1]
        return np.concatenate((_ZERO, np.cumsum(step.lens)))

    def _lay_out(self, step: _Entries, query_start: Array, logit_rows: Array) -> StepRows:
        if step.only_single:
            slots, positions = step.slots, step.starts
        else:
            sequence = np.repeat(np.arange(len(step.slots)), step.lens)
            slots = step.slots[sequence]
            positions = np.arange(int(query_start[-1])) + (step.starts - query_start[:-1])[sequence]
        blocks, offsets = np.divmod(positions, self.block_size)
        cells = self._tables[slots, blocks] * np.int64(self.block_size) + offsets
        width = -(-int(step.ends.max()) // self.block_size)
        return StepRows(
            token_ids=self.store[slots, positions].astype(np.int64),
            positions=positions,
            slot_mapping=cells,
            query_start=query_start.astype(np.int32),
            seq_lens=step.ends.astype(np.int32),
            block_table=np.take(self._tables[:, :width], step.slots, axis=0),
            logit_rows=logit_rows,
        )

    def _sampling(
        self, step: _Entries, sampled: Array, logit_rows: Array, prompt: PromptRows | None
    ) -> StepSampling:
        slots, positions = step.slots[sampled], step.ends[sampled]
        rows = self._sample_rows[slots]
        rows["logit_row"] = logit_rows
        rows["position"] = positions
        self._num_known[slots] += 1
        wants_logprobs = bool((rows["num_top"] != NO_LOGPROBS).any())
        return StepSampling(sampled, slots, positions, rows, wants_logprobs, prompt)

    def _prompt_rows(
        self, entries: tuple[PlanEntry, ...], query_start: Array
    ) -> tuple[Array, Array, PromptRows | None]:
        """The step's logit rows, which of them are sampled from, and those that predict prompt tokens."""
        wanted: list[int] = []
        sampled: list[int] = []
        prompt: list[tuple[int, int, int, int]] = []
        for index, (entry, first) in enumerate(zip(entries, query_start.tolist(), strict=False)):
            sampling = self._samplings[entry.slot]
            for offset in entry.logit_rows:
                position = entry.start + offset + 1
                if position < sampling.num_prompt:
                    token = int(self.store[entry.slot, position])
                    top = min(sampling.prompt_logprobs or 0, self.vocab_size)
                    prompt.append((index, len(wanted), token, top))
                elif entry.samples and offset == entry.n - 1:
                    sampled.append(len(wanted))
                wanted.append(first + offset)
        columns = np.array(prompt, np.int64).reshape(-1, 4).T.copy()
        rows = PromptRows(*columns) if prompt else None
        return np.array(wanted, np.int64), np.array(sampled, np.int64), rows


_ZERO = np.zeros(1, np.int64)


class _Entries:
    """The columns of a plan's entries, each [num_entries]."""

    def __init__(self, slots: Array, starts: Array, lens: Array, samples: Array) -> None:
        self.slots, self.starts, self.lens, self.samples = slots, starts, lens, samples
        self.ends = starts + lens
        self.only_single = int(lens.max()) == 1


class _Decodes:
    """A step in which every entry decodes one token and samples the next, kept to be counted up.

    Attributes:
        rows: Arrays of its own, changed in place (the table is replaced).
        sampling: The same.
        cells: [num_entries] int64, where the rows' tokens lie in the flat token store.
        offsets: [num_entries] int64, the rows' places in their blocks.
    """

    def __init__(
        self,
        columns: tuple[Any, ...],
        rows: StepRows,
        sampling: StepSampling,
        store_width: int,
        block_size: int,
    ) -> None:
        _, self._slots, _, _, self._lens, self._samples, self._logit_rows, _, _ = columns
        self._block_size = block_size
        self.rows = rows
        self.sampling = sampling
        self.cells: Array = sampling.slots * store_width + rows.positions
        self.offsets: Array = rows.positions % block_size
        # Writing through a view of a column is one operation.
        self._counted = (
            *(rows.positions, rows.slot_mapping, rows.seq_lens, self.cells, self.offsets),
            *(sampling.positions, sampling.rows["position"]),
        )

    def same(self, columns: tuple[Any, ...]) -> bool:
        """Whether the entries are those of this step, one token later."""
        _, slots, _, _, lens, samples, logit_rows, _, _ = columns
        return bool(
            slots == self._slots
            and lens == self._lens
            and samples == self._samples
            and logit_rows == self._logit_rows
        )

    def count_up(self) -> None:
        """One token later; `slot_mapping` is right only within the block."""
        for array in self._counted:
            array += 1

    def at_block_end(self) -> bool:
        """Whether some row has come to another block."""
        return bool(self.offsets.max() >= self._block_size)

    def replace_table(self, table: Array) -> None:
        """Other blocks for the same rows."""
        self.rows = replace(self.rows, block_table=table)
