"""The CPU's worker: a recorded program, its KV pool and the slots of the kernels; turns a plan into a result. No torch.

A plan's entries go to the kernels as they are, and its tokens come back from the same call: the caches hold nothing of
the interpreter when a step ends, so that every Python operation between two steps counts. Python makes a request's
sampling at its admission and the values that are rare: log-probabilities and faults. `launch` computes and returns the
finished result. A worker is used by one thread at a time, and plans are launched in the order of submission (I10).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from time import perf_counter
from typing import Protocol

from paged_kernels.native import HAS_FAULTS, HAS_PROMPT, HAS_SCORES, KVPool, Runtime, Slots

from pagedcli.config_file import show_bytes
from pagedcli.core.plan import Admission, PlanEntry, StepPlan, StepResult, TokenLogprob
from pagedcli.core.sampling import MAX_LOGPROBS
from pagedcli.engine.executor import ExecutorInfo
from pagedcli.errors import ConfigError
from pagedcli.models.load import Model
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.native_ops import NativeOps
from pagedcli.runtime.faults import Fault
from pagedcli.runtime.native_rows import SlotSampling, make_slot_sampling


class RunsSteps(Protocol):
    """The part of a program that a worker needs."""

    def step(self, slots: Slots, entries: tuple[PlanEntry, ...]) -> tuple[tuple[int, ...], int]:
        """One step: the token of each entry, and the notes of `Program.step`."""


_admission: Callable[[PlanEntry], Admission | None] = itemgetter(PlanEntry._fields.index("admission"))
_make_result = partial(tuple.__new__, StepResult)
"""A `StepResult` of its items, at a third of the cost of calling the class."""


@dataclass(slots=True)
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
        program: Computes and samples.
        kv: The pool that the program writes and reads.
        runtime: Copies blocks.
        spec: Sizes of the model.
        dtype: Of the KV pool.
        max_num_seqs: Slots.
        max_model_len: Longest sequence in tokens.
        weight_bytes: Memory of the weights, for `info`.

    Attributes:
        info: Facts for the engine.
        num_steps: Plans carried out.
    """

    def __init__(
        self,
        program: RunsSteps,
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
        self._slots = Slots(
            max_num_seqs,
            max_model_len=max_model_len,
            block_size=kv.block_size,
            vocab_size=spec.vocab_size,
            max_top=min(MAX_LOGPROBS, spec.vocab_size),
        )
        self._samplings: dict[int, SlotSampling] = {}
        self._none: tuple[None, ...] = ()
        self._no_prompts: tuple[tuple[()], ...] = ()
        self.num_steps = 0
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

    @property
    def native_seconds(self) -> float:
        """Time inside the kernels since the start, all of it without the interpreter's lock."""
        return self._slots.seconds

    def run(self, plan: StepPlan) -> StepResult:
        """Carry a plan out; its result."""
        started = perf_counter()
        step, entries, copies, freed_slots = plan
        for slot in freed_slots:
            self._free(slot)
        if copies:
            self._kv.copy_blocks(self._runtime, copies)
        if any(map(_admission, entries)):
            for entry in entries:
                if entry.admission is not None:
                    self._admit(entry.slot, entry.admission)
        tokens, notes = self._program.step(self._slots, entries)
        self.num_steps += 1
        count = len(entries)
        if len(self._none) != count:
            self._none, self._no_prompts = (None,) * count, ((),) * count
        seconds = perf_counter() - started
        result = _make_result((step, tokens, self._none, self._no_prompts, seconds, ()))
        return self._annotate(result, notes) if notes else result

    def launch(self, plan: StepPlan) -> FinishedStep:
        """Carry a plan out, for executors that look for the result later."""
        return FinishedStep(self.run(plan))

    def _free(self, slot: int) -> None:
        # A slot freed before its admission was ever issued is unknown here.
        self._samplings.pop(slot, None)
        self._slots.free(slot)

    def _admit(self, slot: int, admission: Admission) -> None:
        sampling = make_slot_sampling(admission, self._vocab_size)
        self._slots.admit(slot, admission.tokens, admission.table, sampling.row, sampling.prompt_top)
        self._samplings[slot] = sampling  # it keeps what the row points to

    def _annotate(self, result: StepResult, notes: int) -> StepResult:
        """With log-probabilities and faults; an entry with a fault has nothing else."""
        count = len(result.tokens)
        chosen: list[TokenLogprob | None] = [None] * count
        prompts: list[list[TokenLogprob]] = [[] for _ in range(count)]
        if notes & HAS_SCORES:
            for entry, token, logprob, rank, top in self._slots.scores():
                chosen[entry] = TokenLogprob(token, logprob, rank, top)
        if notes & HAS_PROMPT:
            for entry, token, logprob, rank, top in self._slots.prompt_scores():
                prompts[entry].append(TokenLogprob(token, logprob, rank, top))
        errors: tuple[str | None, ...] = ()
        if notes & HAS_FAULTS:
            faults = self._slots.faults()
            errors = tuple(Fault(fault).message() if fault else None for fault in faults)
            chosen = [None if fault else item for item, fault in zip(chosen, faults, strict=True)]
            prompts = [[] if fault else items for items, fault in zip(prompts, faults, strict=True)]
        return StepResult(
            result.step, result.tokens, tuple(chosen), tuple(map(tuple, prompts)), result.seconds, errors
        )


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
