"""Run a workload through the engine loop, in this process, and measure it step by step.

May import `core`, `engine` and `workloads`. The loop is the engine's own (`EngineCore`); only what is watched is
particular: requests end at the workload's output length, as if the model had ended there, and gauges are taken in
every step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedcli.core.plan import TokenEvent
from pagedcli.core.request import FinishReason, Request
from pagedcli.core.sampling import SamplingParams
from pagedcli.core.scheduler import Scheduler
from pagedcli.engine.core import EngineCore
from pagedcli.engine.executor import Executor
from pagedcli.workloads.requests import WorkloadRequest


@dataclass(frozen=True, slots=True)
class StepSample:
    """Gauges after one step.

    Attributes:
        running: Requests that hold a slot.
        stored_tokens: Tokens whose KV they hold.
        allocated_tokens: Token slots allocated to them.
        free_tokens: Token slots that nobody holds or was promised.
        hole_tokens: Token slots that the largest single request could get.
    """

    running: int
    stored_tokens: int
    allocated_tokens: int
    free_tokens: int
    hole_tokens: int


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """What one run of a workload came to.

    Attributes:
        seconds: From the first request to the last token.
        outputs: Output token ids by request id.
        samples: One per step.
        first_token_s: Time to the first token of each request, in the workload's order.
        num_prompt_tokens: Prompt tokens of the workload.
        num_output_tokens: Output tokens of the workload.
        num_steps: Forward passes.
        computed_tokens: Positions computed, repeated work included.
        preemptions: Requests that lost their blocks.
    """

    seconds: float
    outputs: dict[str, tuple[int, ...]]
    samples: tuple[StepSample, ...]
    first_token_s: tuple[float, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int
    computed_tokens: int
    preemptions: int

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.num_output_tokens / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and output tokens per second."""
        return (self.num_prompt_tokens + self.num_output_tokens) / self.seconds

    @property
    def peak_running(self) -> int:
        """Most requests that ran at once."""
        return max(sample.running for sample in self.samples)

    def busiest_half(self) -> list[StepSample]:
        """The half of the steps in which most tokens were stored."""
        ordered = sorted(self.samples, key=lambda sample: sample.stored_tokens, reverse=True)
        return ordered[: (len(ordered) + 1) // 2]

    def kv_use(self) -> float:
        """Tokens stored over token slots allocated, over the busiest half of the run."""
        return statistics.fmean(s.stored_tokens / s.allocated_tokens for s in self.busiest_half())

    def external_fragmentation(self) -> float:
        """Part of the free token slots outside the largest hole, over the busiest half of the run."""
        return statistics.fmean(
            1.0 - s.hole_tokens / s.free_tokens if s.free_tokens else 0.0 for s in self.busiest_half()
        )


class _Watcher:
    """Collects the tokens of every request and ends it at the workload's length."""

    def __init__(self, scheduler: Scheduler, workload: Sequence[WorkloadRequest]) -> None:
        self.tokens: list[list[int]] = [[] for _ in workload]
        self.first_token: list[float] = [0.0] * len(workload)
        self._scheduler = scheduler
        self._workload = workload

    def take(self, event: TokenEvent, now: float) -> None:
        """One event of the scheduler; a token past the end is the one that was already on its way."""
        tokens, want = self.tokens[event.request_id], self._workload[event.request_id].output_tokens
        if event.error is not None:
            raise RuntimeError(f"request {self._workload[event.request_id].id} failed: {event.error}")
        if event.token is None or len(tokens) == want:
            return
        if not tokens:
            self.first_token[event.request_id] = now
        tokens.append(event.token)
        if len(tokens) == want:
            self._scheduler.finish(event.request_id, FinishReason.STOP)


def _request(index: int, item: WorkloadRequest) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=item.max_tokens, ignore_eos=True)
    return Request(index, list(item.prompt_token_ids), len(item.prompt_token_ids), params)


def _sample(scheduler: Scheduler) -> StepSample:
    stats = scheduler.stats
    size = scheduler.kv.block_size
    return StepSample(
        running=stats.running,
        stored_tokens=stats.stored_tokens,
        allocated_tokens=stats.allocated_tokens,
        free_tokens=(stats.blocks.free + stats.blocks.cached - stats.blocks.reserved) * size,
        hole_tokens=scheduler.kv.largest_hole() * size,
    )


def run_offline(
    scheduler: Scheduler,
    executor: Executor,
    workload: Sequence[WorkloadRequest],
    *,
    depth: int,
    clock: Callable[[], float] = time.perf_counter,
) -> OfflineRun:
    """Answer a workload whose requests all arrive at once.

    Args:
        scheduler: New, and not used for anything else.
        executor: Of the scheduler's pool size and slots.
        workload: Requests; those that can never fit raise `RequestError`.
        depth: Steps in flight.
        clock: Seconds.
    """
    engine = EngineCore(scheduler, executor, depth, clock)
    watcher = _Watcher(scheduler, workload)
    samples: list[StepSample] = []
    start = clock()
    for index, item in enumerate(workload):
        scheduler.add(_request(index, item), start)
    while engine.has_work:
        for event in engine.step():
            watcher.take(event, clock())
        sample = _sample(scheduler)
        if sample.allocated_tokens:
            samples.append(sample)
    counters = scheduler.stats.counters
    return OfflineRun(
        seconds=clock() - start,
        outputs={item.id: tuple(tokens) for item, tokens in zip(workload, watcher.tokens, strict=True)},
        samples=tuple(samples),
        first_token_s=tuple(moment - start for moment in watcher.first_token),
        num_prompt_tokens=sum(len(item.prompt_token_ids) for item in workload),
        num_output_tokens=sum(item.output_tokens for item in workload),
        num_steps=counters.steps,
        computed_tokens=counters.computed_tokens,
        preemptions=counters.preemptions,
    )
