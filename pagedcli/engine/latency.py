"""Distributions of what requests met: times and sizes, counted on the engine thread as they happen.

Standard library, `core` and `engine.outputs` only. A histogram is a list of counts, so that recording costs a
bisection and an addition, whatever the number of requests; readers copy it. Bounds are vLLM's, so that dashboards
made for it read ours.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedcli.core.plan import StepPlan, TokenEvent
from pagedcli.core.sampling import SamplingParams
from pagedcli.engine.outputs import RequestOutput

LATENCY_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
BETWEEN_TOKENS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
MAX_NOTES = 256
"""Notes that are kept, two for a step: counting many at once costs a fraction of counting each."""
STEP_TOKENS = tuple(float(1 << power) for power in (0, *range(3, 15)))
SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


def token_bounds(longest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `longest`."""
    bounds: list[float] = []
    power = 1
    while power <= longest:
        bounds += [float(power * digit) for digit in (1, 2, 5) if power * digit <= longest]
        power *= 10
    return tuple(bounds)


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """A histogram at one moment.

    Attributes:
        bounds: Upper bounds, ascending; one more bucket has none.
        counts: Observations in each bucket alone, one more than bounds.
        total: Sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Histogram:
    """Counts observations by size; one thread records, any may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def value(self) -> HistogramValue:
        """As of now."""
        return HistogramValue(self._bounds, tuple(self._counts), self._total)


class LatencyBoard:
    """All histograms of an engine.

    Attributes:
        between_tokens: Seconds between two tokens of a sample.
        first_token: Seconds from arrival to the first token.
        whole: Seconds from arrival to the end.
        queue: Seconds from arrival to the first time it ran.
        inference: Seconds from then to the end.
        prefill: Seconds from then to the first token.
        decode: Seconds from the first token to the end.
        per_token: Seconds per output token after the first.
        prompt_tokens: Tokens of prompts.
        output_tokens: Tokens of outputs, over all samples.
        max_tokens: `max_tokens` of requests that have one.
        samples: `n` of requests.
        preemptions: Preemptions of requests.
        step_tokens: Positions computed in a step.
    """

    def __init__(self, max_model_len: int) -> None:
        tokens = token_bounds(max_model_len)
        self.between_tokens = Histogram(BETWEEN_TOKENS_S)
        self.first_token = Histogram(FIRST_TOKEN_S)
        self.whole = Histogram(LATENCY_S)
        self.queue = Histogram(LATENCY_S)
        self.inference = Histogram(LATENCY_S)
        self.prefill = Histogram(LATENCY_S)
        self.decode = Histogram(LATENCY_S)
        self.per_token = Histogram(BETWEEN_TOKENS_S)
        self.prompt_tokens = Histogram(tokens)
        self.output_tokens = Histogram(tokens)
        self.max_tokens = Histogram(tokens)
        self.samples = Histogram(SAMPLES)
        self.preemptions = Histogram(PREEMPTIONS)
        self.step_tokens = Histogram(STEP_TOKENS)
        self._lock = threading.Lock()
        self._steps: deque[StepPlan] = deque()  # noted, not counted yet; its append and popleft are atomic
        self._tokens: deque[tuple[list[int], float] | int] = (
            deque()
        )  # samples that got one, and when; or that ended
        self._gaps = TokenGaps(self.between_tokens.observe)
        self.step_issued: Callable[[StepPlan], None] = self._steps.append
        """A step was begun."""
        self.sample_ended: Callable[[int], None] = self._tokens.append
        """A sample gets no tokens any more."""
        self.samples_came: Callable[[tuple[list[int], float]], None] = self._tokens.append
        """A step was read: these samples got a token each; and when."""

    def tokens_came(self, events: Sequence[TokenEvent], now: float) -> None:
        """A step was read: samples got a token each, save for those that ended without one."""
        self._tokens.append(([event.request_id for event in events if event.token is not None], now))

    def settle_many(self) -> None:
        """Count what was noted, if it is enough to be worth it."""
        if len(self._tokens) + len(self._steps) > MAX_NOTES:
            with self._lock:
                self._settle()

    def _settle(self) -> None:
        """Count what was noted; the lock is held."""
        while self._steps:
            self.step_tokens.observe(self._steps.popleft().num_tokens)
        while self._tokens:
            note = self._tokens.popleft()
            if isinstance(note, int):
                self._gaps.forget(note)
            else:
                self._gaps.note(*note)

    def finished(self, params: SamplingParams, output: RequestOutput) -> None:
        """A request was served."""
        seconds = output.seconds
        first = seconds.total if seconds.first_token is None else seconds.first_token
        with self._lock:
            self.queue.observe(seconds.queued)
            self.whole.observe(seconds.total)
            self.inference.observe(seconds.total - seconds.queued)
            self.prefill.observe(first - seconds.queued)
            self.decode.observe(seconds.total - first)
            if seconds.first_token is not None:
                self.first_token.observe(first)
            longest = max((len(sample.token_ids) for sample in output.samples), default=0)
            if longest > 1:
                self.per_token.observe((seconds.total - first) / (longest - 1))
            self.prompt_tokens.observe(output.usage.prompt_tokens)
            self.output_tokens.observe(output.usage.completion_tokens)
            self.samples.observe(params.n)
            self.preemptions.observe(output.num_preemptions)
            if params.max_tokens is not None:
                self.max_tokens.observe(params.max_tokens)

    def values(self) -> dict[str, HistogramValue]:
        """All of them as of now, by attribute name."""
        with self._lock:
            self._settle()
            return {name: item.value() for name, item in vars(self).items() if isinstance(item, Histogram)}


class TokenGaps:
    """When each sample got its last token. Usually all that got one now got one in the last step: one gap for all.

    Args:
        came: Called with a gap in seconds and how many samples met it.
    """

    def __init__(self, came: Callable[[float, int], None]) -> None:
        self._came = came
        self._ended: set[int] = set()  # of those in `_last`
        self._last: list[int] = []
        self._last_time = 0.0
        self._earlier: dict[int, float] = {}

    def note(self, ids: list[int], now: float) -> None:
        """The samples `ids` got a token each."""
        if not ids:
            return
        if ids == self._last:
            self._came(now - self._last_time, len(ids))
        else:
            times = self._earlier
            times.update({item: self._last_time for item in self._last if item not in self._ended})
            self._ended.clear()
            for gap, count in Counter([now - times[item] for item in ids if item in times]).items():
                self._came(gap, count)
            self._last = ids
        self._last_time = now

    def forget(self, item: int) -> None:
        """A sample has ended: it gets no more tokens."""
        self._earlier.pop(item, None)
        self._ended.add(item)
