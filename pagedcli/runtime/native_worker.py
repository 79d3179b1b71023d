"""The CPU's worker: a recorded program, its KV pool and the batch state; turns a plan into a result. No torch.

`launch` computes and returns the finished result. A worker is used by one thread at a time, and plans are launched in
the order of submission (I10).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from paged_kernels.native import KVPool, Runtime, SampleOutput

from pagedcli.core.plan import NO_TOKEN, StepPlan, StepResult, TokenLogprob
from pagedcli.core.sampling import MAX_LOGPROBS
from pagedcli.engine.executor import ExecutorInfo
from pagedcli.errors import ConfigError
from pagedcli.models.load import Model
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.native_ops import NativeOps
from pagedcli.runtime.faults import Fault
from pagedcli.runtime.memory import show_bytes
from pagedcli.runtime.native_state import NativeState, PromptRows, StepSampling

Array = np.ndarray[Any, Any]

LOGPROB_ROWS = 256
"""Prompt tokens whose log-probabilities are computed at a time."""


class RunsRows(Protocol):
    """The part of a program that a worker needs."""

    def run(
        self,
        token_ids: Array,
        positions: Array,
        slot_mapping: Array,
        query_start: Array,
        seq_lens: Array,
        block_table: Array,
        logit_rows: Array,
    ) -> None:
        """One step."""

    def logits(self) -> Array:
        """[num_logit_rows, vocab_size] float32 of the last step."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A plan that was carried out."""

    result: StepResult

    def done(self) -> bool:
        """Always: `launch` computes."""
        return True

    def read(self) -> StepResult:
        """The result."""
        return self.result


class NativeWorker:
    """Runs plans on the CPU.

    Args:
        program: Computes logits.
        kv: The pool that the program writes and reads.
        runtime: Samples and copies blocks.
        spec: Sizes of the model.
        dtype: Of the KV pool.
        max_num_seqs: Slots.
        max_model_len: Longest sequence in tokens.
        weight_bytes: Memory of the weights, for `info`.

    Attributes:
        info: Facts for the engine.
        num_steps: Plans carried out.
        native_seconds: Time inside the kernels since the start, all of it without the interpreter's lock.
    """

    def __init__(
        self,
        program: RunsRows,
        kv: KVPool,
        runtime: Runtime,
        spec: ModelSpec,
        *,
        dtype: str,
        max_num_seqs: int,
        max_model_len: int,
        weight_bytes: int = 0,
    ) -> None:
        self._program, self._kv, self._runtime = program, kv, runtime
        self._vocab_size = spec.vocab_size
        self._state = NativeState(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=kv.block_size,
            vocab_size=spec.vocab_size,
        )
        self._max_top = min(MAX_LOGPROBS, spec.vocab_size)
        self._chosen = SampleOutput(max_num_seqs, self._max_top)
        self._prompt: SampleOutput | None = None
        self.num_steps = 0
        self.native_seconds = 0.0
        self.info = ExecutorInfo(
            device="cpu",
            dtype=dtype,
            threads=runtime.threads,
            block_size=kv.block_size,
            num_blocks=kv.num_blocks,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=spec.vocab_size,
            weight_bytes=weight_bytes,
            kv_bytes=kv.num_bytes,
        )

    def launch(self, plan: StepPlan) -> FinishedStep:
        """Carry a plan out."""
        started = time.perf_counter()
        self._kv.copy_blocks(self._runtime, plan.copies)
        rows, sampling = self._state.apply(plan)
        computing = time.perf_counter()
        self._program.run(
            rows.token_ids, rows.positions, rows.slot_mapping, rows.query_start,
            rows.seq_lens, rows.block_table, rows.logit_rows,
        )  # fmt: skip
        self.native_seconds += time.perf_counter() - computing
        self.num_steps += 1
        outcome = _Outcome(plan)
        if len(sampling.entries):
            self._sample(sampling, outcome)
        if sampling.prompt is not None:
            self._prompt_logprobs(sampling.prompt, outcome)
        return FinishedStep(outcome.result(time.perf_counter() - started))

    def run(self, plan: StepPlan) -> StepResult:
        """Carry a plan out; its result."""
        return self.launch(plan).read()

    def _sample(self, sampling: StepSampling, outcome: _Outcome) -> None:
        out, count = self._chosen, len(sampling.entries)
        sampling_since = time.perf_counter()
        self._runtime.sample(self._program.logits(), sampling.rows, out)
        self.native_seconds += time.perf_counter() - sampling_since
        tokens = out.tokens[:count]
        self._state.write_tokens(sampling, tokens)
        entries = sampling.entries.tolist()
        if count == len(outcome.tokens):
            outcome.tokens = tokens.tolist()
        else:
            for entry, token in zip(entries, tokens.tolist(), strict=True):
                outcome.tokens[entry] = token
        if sampling.wants_logprobs:
            items = read_logprobs(tokens, sampling.rows["num_top"], out)
            for entry, item in zip(entries, items, strict=True):
                outcome.chosen[entry] = item
        faults = out.faults[:count]
        if faults.any():
            for entry, fault in zip(entries, faults.tolist(), strict=True):
                if fault:
                    outcome.fail(entry, Fault(fault))

    def _prompt_logprobs(self, prompt: PromptRows, outcome: _Outcome) -> None:
        if self._prompt is None:
            self._prompt = SampleOutput(LOGPROB_ROWS, self._max_top)
        logits = self._program.logits()
        for first in range(0, len(prompt.entries), LOGPROB_ROWS):
            part = slice(first, first + LOGPROB_ROWS)
            tokens, num_top = prompt.tokens[part], prompt.num_top[part]
            self._runtime.logprobs(logits, prompt.logit_rows[part], tokens, num_top, self._prompt)
            items = read_logprobs(tokens, num_top, self._prompt)
            for entry, item in zip(prompt.entries[part].tolist(), items, strict=True):
                assert item is not None
                outcome.prompts.setdefault(entry, []).append(item)
                if math.isnan(item.logprob):
                    outcome.fail(entry, Fault.NOT_FINITE)


class _Outcome:
    """The result of a plan in the making; lists have one item for each entry."""

    def __init__(self, plan: StepPlan) -> None:
        count = len(plan.entries)
        self._plan = plan
        self.tokens = [NO_TOKEN] * count
        self.chosen: list[TokenLogprob | None] = [None] * count
        self.prompts: dict[int, list[TokenLogprob]] = {}
        self._faults: dict[int, Fault] = {}

    def fail(self, entry: int, fault: Fault) -> None:
        """An entry has no result but its fault; the last one told counts."""
        self._faults[entry] = fault

    def result(self, seconds: float) -> StepResult:
        """As plain values."""
        count = len(self.tokens)
        for entry in self._faults:
            self.tokens[entry], self.chosen[entry] = NO_TOKEN, None
            self.prompts.pop(entry, None)
        prompts: tuple[tuple[TokenLogprob, ...], ...] = ((),) * count
        if self.prompts:
            prompts = tuple(tuple(self.prompts.get(entry, ())) for entry in range(count))
        return StepResult(
            step=self._plan.step,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.chosen),
            prompt_logprobs=prompts,
            seconds=seconds,
            errors=self._errors(count) if self._faults else (),
        )

    def _errors(self, count: int) -> tuple[str | None, ...]:
        texts = {entry: fault.message() for entry, fault in self._faults.items()}
        return tuple(texts.get(entry) for entry in range(count))


def read_logprobs(tokens: Array, num_top: Array, out: SampleOutput) -> list[TokenLogprob | None]:
    """As plain values, one for each token; None where `num_top` is negative."""
    count = len(tokens)
    columns = (tokens, num_top, out.logprobs[:count], out.ranks[:count], out.top_ids[:count], out.top[:count])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        None
        if top < 0
        else TokenLogprob(token, value, rank, tuple(zip(ids[:top], values[:top], strict=True)))
        for token, top, value, rank, ids, values in rows
    ]


def make_native_worker(
    model: Model,
    ops: NativeOps,
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
) -> NativeWorker:
    """Allocate the KV pool and record the model.

    Raises:
        ConfigError: There is no memory for the pool.
    """
    spec = model.spec
    kv = _make_pool(spec, num_blocks, block_size, ops.dtype)
    return NativeWorker(
        ops.record(model.forward, kv),
        kv,
        ops.runtime,
        spec,
        dtype=ops.dtype,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        weight_bytes=ops.weight_bytes,
    )


def _make_pool(spec: ModelSpec, num_blocks: int, block_size: int, dtype: str) -> KVPool:
    try:
        return KVPool(spec.num_layers, num_blocks, spec.num_kv_heads, block_size, spec.head_dim, dtype)
    except (MemoryError, ValueError) as error:  # the kernels' own error is a ValueError
        item_bytes = 4 if dtype == "float32" else 2
        num_bytes = spec.kv_elements_per_token() * block_size * num_blocks * item_bytes
        raise ConfigError(
            f"{num_blocks} pages take {show_bytes(num_bytes)} for KV, which this machine does not have: "
            "lower --num-pages or --kv-memory"
        ) from error
