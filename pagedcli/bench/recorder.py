"""An executor that forces output lengths and notes what each step did; and a clock round the building of block tables.

May import `core` and `engine`. A request ends at its workload's length as if the model had ended there: the last token
is replaced by one that is no token of the vocabulary and that the request names as its stop token. The sampler never
makes it, so that nothing else of a request changes; `tokens` keeps what was really sampled.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from pagedcli.bench.run import StepRecord
from pagedcli.core.kv_manager import KVManager
from pagedcli.core.plan import NO_TOKEN, StepPlan, StepResult
from pagedcli.engine.executor import Executor, ExecutorInfo, StepHandle

BUILDING = ("admit", "fork", "grow", "publish", "release")
"""What a KV manager does to build block tables and to give them back."""


class RequestTokens:
    """Tokens of one request, as they come.

    Attributes:
        ids: As they were sampled.
        times: Clock when each was known.
    """

    __slots__ = ("first", "ids", "last", "times")

    def __init__(self, num_prompt: int, num_output: int) -> None:
        self.first = num_prompt
        self.last = num_prompt + num_output - 1
        self.ids: list[int] = []
        self.times: list[float] = []


class Recorder:
    """Wraps an executor; used by the engine's thread alone, save for `expect`.

    Args:
        executor: Computes.
        clock: Seconds.
        stop_token: Ends a request; no token of the vocabulary.
        leftover_slots: Slots that an earlier scheduler may have left occupied in the worker.

    Attributes:
        steps: What was done.
        stop_token: As given.
    """

    def __init__(
        self,
        executor: Executor,
        clock: Callable[[], float],
        stop_token: int,
        leftover_slots: tuple[int, ...] = (),
    ) -> None:
        self.steps: list[StepRecord] = []
        self._executor, self._clock, self.stop_token = executor, clock, stop_token
        self._leftover = leftover_slots
        self._tokens: list[RequestTokens] = []

    @property
    def info(self) -> ExecutorInfo:
        """Facts about the executor underneath; its vocabulary has the stop token, too."""
        info = self._executor.info
        return dataclasses.replace(info, vocab_size=max(info.vocab_size, self.stop_token + 1))

    def expect(self, num_prompt: int, num_output: int) -> RequestTokens:
        """The next request that is added to the engine; its tokens will be here."""
        self._tokens.append(RequestTokens(num_prompt, num_output))
        return self._tokens[-1]

    def forget_last(self) -> None:
        """The last expected request was refused."""
        self._tokens.pop()

    def submit(self, plan: StepPlan) -> StepHandle:
        """Queue the plan."""
        if self._leftover:
            plan = StepPlan(plan.step, plan.entries, plan.copies, (*self._leftover, *plan.freed_slots))
            self._leftover = ()
        return _Handle(self._executor.submit(plan), plan, self)

    def close(self) -> None:
        """Close the executor underneath."""
        self._executor.close()

    def take(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Note a step that has ended; its result with last tokens replaced."""
        now = self._clock()
        self.steps.append(_record(plan, result, now))
        changed: list[int] | None = None
        for index, (entry, token) in enumerate(zip(plan.entries, result.tokens, strict=True)):
            if token == NO_TOKEN:
                continue
            request, position = self._tokens[entry.request_id], entry.start + entry.n
            # After a preemption no token is sampled again; one that comes after the last is late and is dropped.
            if position <= request.last:
                request.ids.append(token)
                request.times.append(now)
            if position >= request.last:
                changed = changed or list(result.tokens)
                changed[index] = self.stop_token
        if changed is None:
            return result
        return StepResult(
            result.step,
            tuple(changed),
            result.logprobs,
            result.prompt_logprobs,
            result.seconds,
            result.errors,
        )


def _record(plan: StepPlan, result: StepResult, now: float) -> StepRecord:
    entries = plan.entries
    pairs = sum([entry.n * entry.start + entry.n * (entry.n + 1) // 2 for entry in entries])
    return StepRecord(
        now,
        result.seconds,
        len(entries),
        sum([entry.n for entry in entries]),
        sum([len(entry.logit_rows) for entry in entries]),
        pairs,
        sum([entry.start + entry.n for entry in entries]),
        sum(
            [
                len(entry.new_blocks) if entry.admission is None else len(entry.admission.table)
                for entry in entries
            ]
        ),
    )


class _Handle:
    __slots__ = ("_handle", "_plan", "_recorder")

    def __init__(self, handle: StepHandle, plan: StepPlan, recorder: Recorder) -> None:
        self._handle, self._plan, self._recorder = handle, plan, recorder

    def done(self) -> bool:
        return self._handle.done()

    def result(self) -> StepResult:
        return self._recorder.take(self._plan, self._handle.result())


class TableClock:
    """Adds up the time that a KV manager takes to build block tables and to take them back.

    Attributes:
        seconds: So far.
    """

    def __init__(self, kv: KVManager, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock = clock
        for name in BUILDING:
            setattr(kv, name, self._timed(getattr(kv, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        clock = self._clock

        def timed(*arguments: Any) -> Any:
            began = clock()
            try:
                return method(*arguments)
            finally:
                self.seconds += clock() - began

        return timed
