"""The numbers that displays, metrics and summaries read, put together from scheduler, loop and clock.

May import `core` and the engine's other modules. The engine thread publishes the scheduler's counters as a value:
whenever a request is answered or anything was asked of the thread, and else every `PUBLISH_S`, since it costs as much
as planning a step. Readers on other threads combine it with the present moment, so that rates fall when nothing
happens.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from pagedcli.core.sampling import SamplingParams
from pagedcli.core.stats import SchedulerStats
from pagedcli.engine.latency import LatencyBoard
from pagedcli.engine.outputs import EngineStats, RequestOutput
from pagedcli.engine.timing import Timing
from pagedcli.errors import RequestError

PUBLISH_S = 0.25
"""How old published counters may be while requests run, in seconds."""


class StatsBoard:
    """Where the engine thread writes and everybody reads.

    Args:
        stats: The scheduler's counters at the moment.
        timing: Spans of the executor.
        clock: Monotonic seconds.
        max_model_len: Tokens of the longest sequence.

    Attributes:
        latency: Distributions of times and sizes.
        num_published: How often the counters were published.
        next_due: Clock from which on displays would show how long ago the counters were published.
    """

    def __init__(
        self,
        stats: Callable[[], SchedulerStats],
        timing: Timing,
        clock: Callable[[], float],
        max_model_len: int,
    ) -> None:
        self.latency = LatencyBoard(max_model_len)
        self._stats = stats
        self._timing = timing
        self._clock = clock
        self._started = clock()
        self._published = stats()
        self.num_published = 0
        self.next_due = self._started
        self._lock = threading.Lock()
        self._finished: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._num_aborted = 0

    def publish(self) -> None:
        """Take the scheduler's counters (engine thread only)."""
        self._published = self._stats()
        self.num_published += 1
        self.next_due = self._clock() + PUBLISH_S

    def settle_many(self) -> None:
        """Count what was noted of steps and tokens, if it is enough to be worth it (engine thread only)."""
        self._timing.settle_many()
        self.latency.settle_many()

    def finished(self, params: SamplingParams, output: RequestOutput) -> None:
        """A request was answered."""
        with self._lock:
            self._finished[str(output.finish_reason)] += 1
        self.latency.finished(params, output)

    def refused(self, error: RequestError) -> None:
        """A request was refused."""
        with self._lock:
            self._rejected[error.code] += 1

    def aborted(self) -> None:
        """A request was aborted by its caller."""
        with self._lock:
            self._num_aborted += 1

    def read(self, num_unfinished: int) -> EngineStats:
        """Everything as of now."""
        scheduler = self._published
        counters, blocks = scheduler.counters, scheduler.blocks
        rates, busy = self._timing.rates(), self._timing.busy_seconds
        gaps = self._timing.gaps(idle=num_unfinished == 0)
        spent = busy + gaps.scheduler + gaps.tokenizer + gaps.no_work + gaps.http
        with self._lock:
            finished, rejected, num_aborted = dict(self._finished), dict(self._rejected), self._num_aborted
        return EngineStats(
            uptime_s=self._clock() - self._started,
            num_running=scheduler.running,
            num_waiting=scheduler.waiting,
            num_unfinished=num_unfinished,
            num_steps=counters.steps,
            prompt_tokens=counters.prefix_query_tokens,
            cached_tokens=counters.prefix_hit_tokens,
            generated_tokens=counters.generated_tokens,
            computed_tokens=counters.computed_tokens,
            recomputed_tokens=counters.recomputed_tokens,
            num_preemptions=counters.preemptions,
            requests_finished=finished,
            requests_aborted=num_aborted,
            requests_rejected=rejected,
            prompt_tokens_per_s=rates.prompt_tokens_per_s,
            generated_tokens_per_s=rates.generated_tokens_per_s,
            kv_use=scheduler.kv_use,
            pool_use=scheduler.pool_use,
            blocks_free=blocks.free,
            blocks_cached=blocks.cached,
            blocks_used=blocks.used,
            blocks_shared=blocks.shared,
            executor_busy=rates.executor_busy,
            executor_busy_total=busy / spent if spent else 0.0,
            executor_seconds=busy,
            gap_seconds=gaps,
            scheduler=scheduler,
        )
