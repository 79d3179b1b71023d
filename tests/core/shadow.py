"""An executor without a model that remembers from which exact token chain every KV cell was computed.

Standard library and the core only; used by the workloads of `test_shadow`, by the mutants and by the state machine.
A sampled token is a hash of the whole chain before it (and of seed and sample index), so a single wrong cell, copy or
token anywhere changes the output, and reading a cell that does not hold what it should raises `ShadowError` at once.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pagedcli.core.plan import NO_TOKEN, PlanEntry, StepPlan, StepResult, TokenLogprob
from pagedcli.engine.executor import ExecutorInfo


class ShadowError(Exception):
    """The plan would have made a real device compute nonsense."""


def require(ok: bool, *facts: object) -> None:
    if not ok:
        raise ShadowError(*facts)


def chain(before: int, token: int) -> int:
    """Identity of a token sequence, extended by one token."""
    return hash((before, token))


def sample(tokens: Sequence[int], seed: int, sample_index: int, vocab: int) -> int:
    """The model: the next token of a sequence."""
    return zlib.crc32(repr((tuple(tokens), seed, sample_index)).encode()) % vocab


@dataclass
class Slot:
    tokens: list[int]
    table: list[int]
    chains: list[int]
    num_prompt: int
    seed: int
    sample_index: int
    num_top: int | None


@dataclass
class Handle:
    executor: ShadowExecutor
    plan: StepPlan

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.executor.run(self.plan)


class ShadowExecutor:
    """Runs plans in order of submission, lazily: as late as the engine loop allows."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, vocab: int = 50) -> None:
        self.info = ExecutorInfo(
            "shadow", "float32", 0, block_size, num_blocks, max_num_seqs, 1 << 30, vocab, 0, 0
        )
        self.block_size = block_size
        self.vocab = vocab
        self.queue: deque[StepPlan] = deque()
        self.slots: dict[int, Slot] = {}
        self.cells: list[int | None] = [None] * (num_blocks * block_size)
        self.last_step = 0

    def submit(self, plan: StepPlan) -> Handle:
        self.queue.append(plan)
        return Handle(self, plan)

    def close(self) -> None:
        require(not self.queue, "closed with plans in flight")

    def run(self, plan: StepPlan) -> StepResult:
        require(self.queue.popleft() is plan, "I10: result out of order", plan.step)
        require(plan.step == self.last_step + 1, "step", plan.step)
        self.last_step = plan.step
        for slot in plan.freed_slots:
            require(slot in self.slots, "freed a slot that holds nothing", plan.step, slot)
            del self.slots[slot]
        self._copy(plan.copies)
        require(
            len({entry.slot for entry in plan.entries}) == len(plan.entries), "two entries in a slot", plan
        )
        for entry in plan.entries:
            self._write(plan.step, entry)
        outcomes = [self._read(plan.step, entry) for entry in plan.entries]
        return StepResult(
            step=plan.step,
            tokens=tuple(token for token, _, _ in outcomes),
            logprobs=tuple(logprob for _, logprob, _ in outcomes),
            prompt_logprobs=tuple(rows for _, _, rows in outcomes),
            seconds=0.0,
        )

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        size = self.block_size
        held = [self.cells[source * size : (source + 1) * size] for source, _ in copies]
        for (_, target), cells in zip(copies, held, strict=True):
            self.cells[target * size : (target + 1) * size] = cells

    def _write(self, step: int, entry: PlanEntry) -> None:
        admission = entry.admission
        if admission is not None:
            require(entry.slot not in self.slots, "admitted to a slot that was not freed", step, entry)
            require(not entry.new_blocks, "an admission carries its whole table", entry)
            self.slots[entry.slot] = Slot(
                [], list(admission.table), [], admission.num_prompt, admission.seed, admission.sample_index,
                admission.params.prompt_logprobs,
            )  # fmt: skip
            for token in admission.tokens:
                self._push(self.slots[entry.slot], token)
        require(entry.slot in self.slots, "entry for an empty slot", step, entry)
        slot = self.slots[entry.slot]
        slot.table.extend(entry.new_blocks)
        stop = entry.start + entry.n
        require(entry.n >= 1, "I3: nothing to compute", step, entry)
        require(stop <= len(slot.tokens), "token not known to the device", step, entry)
        require(stop <= len(slot.table) * self.block_size, "I3: beyond the table", step, entry)
        require(len(set(slot.table)) == len(slot.table), "a block twice in a table", step, entry)
        for position in range(entry.start, stop):
            self.cells[self._cell(slot, position)] = slot.chains[position]

    def _read(self, step: int, entry: PlanEntry) -> tuple[int, TokenLogprob | None, tuple[TokenLogprob, ...]]:
        slot = self.slots[entry.slot]
        stop = entry.start + entry.n
        for position in range(stop):
            stored = self.cells[self._cell(slot, position)]
            require(stored == slot.chains[position], "stale KV", step, entry, position)
        rows = [row for row in entry.logit_rows if entry.start + row + 1 < slot.num_prompt]
        prompt = tuple(self._logprob(slot, entry.start + row + 1) for row in rows)
        require(entry.samples == (len(rows) < len(entry.logit_rows)), "logit rows", step, entry)
        if not entry.samples:
            return NO_TOKEN, None, prompt
        require(stop == len(slot.tokens), "sampled before the last known token", step, entry)
        require(entry.logit_rows[-1] == entry.n - 1, "no logits to sample from", step, entry)
        self._push(slot, sample(slot.tokens, slot.seed, slot.sample_index, self.vocab))
        return slot.tokens[-1], self._logprob(slot, stop), prompt

    def _push(self, slot: Slot, token: int) -> None:
        slot.chains.append(chain(slot.chains[-1] if slot.chains else 0, token))
        slot.tokens.append(token)

    def _logprob(self, slot: Slot, position: int) -> TokenLogprob:
        """Names the position and the chain, so that a row at a wrong place shows."""
        return TokenLogprob(slot.tokens[position], -float(position), 1, ((slot.chains[position], 0.0),))

    def _cell(self, slot: Slot, position: int) -> int:
        return slot.table[position // self.block_size] * self.block_size + position % self.block_size
