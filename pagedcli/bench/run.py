"""What one run of a workload in this process came to, as a value: requests, steps, moments. Standard library only.

Times are seconds since the run began, on one clock. A token's time is when the step that made it had ended.
Requests that failed are in no distribution.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pagedcli.core.stats import Counters
from pagedcli.engine.outputs import EngineStats, GapSeconds


@dataclass(frozen=True, slots=True)
class RequestRun:
    """One request.

    Attributes:
        id: As in the workload.
        arrival_s: When it was to arrive; the wait for a sender that is late counts as waiting.
        prompt_tokens: Of its prompt.
        cached_tokens: Of them, served from the pool.
        token_times: When each output token was known.
        token_ids: The output.
        end_s: When it was answered; None: the run was interrupted before.
        preemptions: How often it lost its pages.
        error: Why it failed; None: it did not.
    """

    id: str
    arrival_s: float
    prompt_tokens: int
    cached_tokens: int = 0
    token_times: tuple[float, ...] = ()
    token_ids: tuple[int, ...] = ()
    end_s: float | None = None
    preemptions: int = 0
    error: str | None = None

    @property
    def is_served(self) -> bool:
        """Whether it has its whole answer."""
        return self.error is None and self.end_s is not None and bool(self.token_times)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.token_times[0] - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None if there is none."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)

    @property
    def itl_s(self) -> list[float]:
        """Times between two tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]

    @property
    def e2e_s(self) -> float:
        """From arrival to the answer."""
        assert self.end_s is not None
        return self.end_s - self.arrival_s


class Sample(NamedTuple):
    """Gauges after one turn of the engine; tokens are token slots of pages, except those stored."""

    t: float
    running: int
    waiting: int
    stored_tokens: int
    allocated_tokens: int
    free_tokens: int
    cached_tokens: int
    shared_tokens: int
    hole_tokens: int
    preemptions: int


class StepRecord(NamedTuple):
    """What one step computed.

    Attributes:
        t: When its result was known.
        seconds: That the executor was busy with it.
        num_seqs: Requests in it.
        num_tokens: Positions computed.
        num_logits: Rows of logits.
        num_pairs: (position, earlier position or itself) pairs of attention.
        num_kv: Positions whose keys and values were read.
        num_blocks: Ids of pages sent down with the plan.
    """

    t: float
    seconds: float
    num_seqs: int
    num_tokens: int
    num_logits: int
    num_pairs: int
    num_kv: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of the run by what they were spent on; parts of others are said to be.

    Attributes:
        executor: Steps, the handing over of the plan included.
        kernels: Of that, inside the kernels; None where it is not measured (torch).
        block_tables: Of the scheduler's time: taking pages, and giving them back.
        gaps: All that the executor waited, by cause.
    """

    executor: float
    kernels: float | None
    block_tables: float
    gaps: GapSeconds


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Attributes:
        seconds: From its begin to the last answer.
        requests: In the workload's order.
        samples: In order of time.
        steps: In order of time.
        counters: Of the scheduler.
        times: Where the time went.
        page_size: Tokens in a page.
        num_pages: Of the pool.
        late_s: Latest that a request was handed over after its arrival.
        is_interrupted: Whether it was ended early.
    """

    seconds: float
    requests: tuple[RequestRun, ...]
    samples: tuple[Sample, ...]
    steps: tuple[StepRecord, ...]
    counters: Counters
    times: StepTimes
    page_size: int
    num_pages: int
    late_s: float = 0.0
    is_interrupted: bool = False

    @property
    def served(self) -> tuple[RequestRun, ...]:
        """Requests with a whole answer."""
        return tuple(request for request in self.requests if request.is_served)

    @property
    def failed(self) -> tuple[RequestRun, ...]:
        """Requests with an error."""
        return tuple(request for request in self.requests if request.error is not None)

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """Output token ids of the served requests, by id."""
        return {request.id: request.token_ids for request in self.served}

    @property
    def requests_per_s(self) -> float:
        """Served requests over the whole run."""
        return self._per_second(len(self.served))

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens of served requests over the whole run."""
        return self._per_second(sum(len(request.token_times) for request in self.served))

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and output tokens of served requests over the whole run."""
        return self._per_second(
            sum(request.prompt_tokens + len(request.token_times) for request in self.served)
        )

    def _per_second(self, count: int) -> float:
        return count / self.seconds if self.seconds > 0 else 0.0

    @property
    def peak_running(self) -> int:
        """Most requests that ran at once; gauges do not show those that end with the step that began them."""
        seen = max((sample.running for sample in self.samples), default=0)
        return max(seen, max((step.num_seqs for step in self.steps), default=0))

    @property
    def holds_kv(self) -> bool:
        """Whether any request held pages between two steps: else there is no use of them to tell."""
        return any(sample.allocated_tokens for sample in self.samples)

    @property
    def prefix_hit_rate(self) -> float:
        """Prompt tokens served from the pool over prompt tokens looked up."""
        queried = self.counters.prefix_query_tokens
        return self.counters.prefix_hit_tokens / queried if queried else 0.0

    @property
    def executor_busy(self) -> float:
        """Part of the time that the executor was computing."""
        gaps = self.times.gaps
        spent = self.times.executor + gaps.scheduler + gaps.tokenizer + gaps.no_work + gaps.http
        return self.times.executor / spent if spent > 0 else 0.0

    def kv_use(self) -> float:
        """Tokens stored over token slots allocated to running requests, both over time."""
        return self._over_time(lambda s: s.stored_tokens, lambda s: s.allocated_tokens)

    def external_fragmentation(self) -> float:
        """Part of the free token slots that the largest single request could not get, over time."""
        return self._over_time(lambda s: s.free_tokens - s.hole_tokens, lambda s: s.free_tokens)

    def pool_use(self) -> float:
        """Part of the pool that running requests held, over time."""
        return self._over_time(lambda s: s.allocated_tokens, lambda s: self.num_pages * self.page_size)

    def _over_time(self, part: Callable[[Sample], int], whole: Callable[[Sample], int]) -> float:
        """Sum of `part` over sum of `whole`, each sample for as long as it stood."""
        parts = wholes = 0.0
        for sample, seconds in self._lasting():
            parts += seconds * part(sample)
            wholes += seconds * whole(sample)
        return parts / wholes if wholes else 0.0

    def _lasting(self) -> Iterator[tuple[Sample, float]]:
        for sample, after in itertools.pairwise(self.samples):
            yield sample, after.t - sample.t


class Interrupted(KeyboardInterrupt):
    """A run was interrupted; what it came to until then is kept."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run


class WatchedEngine(Protocol):
    """What somebody who watches may ask the engine."""

    def stats(self) -> EngineStats:
        """Counters now."""


class Watch(Protocol):
    """Told of a run while it lasts, on the thread that runs it."""

    def started(self, engine: WatchedEngine, workload: Sequence[object]) -> None:
        """The engine runs; requests come next."""

    def answered(self, request: RequestRun) -> None:
        """A request was served or has failed."""

    def ended(self) -> None:
        """The engine is about to be closed."""
