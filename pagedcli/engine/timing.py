"""How busy the executor is, and why it is not: measured round the executor, not inside the scheduler.

May import `core`, `engine.core` and `engine.outputs`. An executor's time is a row of busy spans with gaps between
them; what the engine thread did during a gap is its cause:

    engine   |schedule|.wait.|apply|detokenize|schedule|..................|schedule|
    executor          |=== step ===|                    |=== step ===|
    gap                            |scheduler,tokenizer,scheduler|   |no_work, scheduler|
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

from pagedcli.core.plan import NO_TOKEN, PlanEntry, StepPlan
from pagedcli.engine.core import StepDone
from pagedcli.engine.outputs import GapSeconds

Cause = Literal["scheduler", "tokenizer", "http", "no_work"]
WINDOW_S = 5.0
"""Length of the sliding window over which rates are taken, in seconds."""
MAX_NOTES = 128
"""Notes that are kept, one for a step and two more where text was made: to add up many at once costs a fraction."""
MAX_SEGMENTS = 65536
"""Marks kept while no step runs; older ones would count as scheduler time."""

_Mark = tuple[float, Cause]
"""When, and what the engine thread turned to."""
_Caller = tuple[float, Cause, int]
"""When, and whether one caller more (1) or less (-1) does what `Cause` says."""


class StepSample(NamedTuple):
    """One step as the displays see it. A named tuple, since every step makes one.

    Attributes:
        start: Clock when the executor began it.
        end: Clock when the executor had done it.
        prompt_tokens: Positions of prompts (and of recomputed sequences) computed.
        generated_tokens: Tokens sampled.
        num_seqs: Entries of the plan.
    """

    start: float
    end: float
    prompt_tokens: int
    generated_tokens: int
    num_seqs: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second and busy part over the last `WINDOW_S` seconds."""

    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    executor_busy: float


class Timing:
    """Clock marks of the engine thread and spans of the executor. Every method may be called on any thread.

    The engine thread only notes what happened when; the sums are made when somebody asks, and by `settle_many`, so that
    notes do not pile up.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._notes: deque[_Mark | _Caller | StepDone] = deque()  # its append and popleft are atomic
        self.step_done: Callable[[StepDone], None] = self._notes.append
        """A plan's result was read: it kept the executor busy for so many seconds after it could start."""
        self._lock = threading.Lock()
        self._cause: Cause = "no_work"
        self._cause_since = clock()
        self._segments: deque[tuple[float, float, Cause]] = deque(maxlen=MAX_SEGMENTS)
        self._num_callers: dict[Cause, int] = {"tokenizer": 0, "http": 0}
        self._idle = True
        self._first: float | None = None
        self._last_end = 0.0
        self._busy_s = 0.0
        self._gaps: dict[Cause, float] = _no_seconds()
        self._samples: deque[StepSample] = deque()

    def mark(self, cause: Cause, now: float | None = None) -> None:
        """The engine thread turns to `cause` (waiting for callers that still tokenize is text work)."""
        self._notes.append((self._clock() if now is None else now, cause))

    def delivered(self, since: float) -> float:
        """What came of a step was made text and delivered, from `since` on; returns the time now."""
        now = self._clock()
        self._notes.extend(((since, "tokenizer"), (now, "scheduler")))
        return now

    @contextmanager
    def _caller(self, cause: Cause) -> Iterator[None]:
        self._notes.append((self._clock(), cause, 1))
        try:
            yield
        finally:
            self._notes.append((self._clock(), cause, -1))

    def tokenizing(self) -> AbstractContextManager[None]:
        """Round the tokenization of a prompt on a caller's thread."""
        return self._caller("tokenizer")

    def receiving(self) -> AbstractContextManager[None]:
        """Round what a server does with a request before it hands it over."""
        return self._caller("http")

    def settle_many(self) -> None:
        """Add up what was noted, if it is enough to be worth it."""
        if len(self._notes) > MAX_NOTES:
            with self._lock:
                self._settle()

    def _settle(self) -> None:
        """Take in all notes; the lock is held."""
        notes = self._notes
        while notes:
            note = notes.popleft()
            if len(note) == 5:
                self._take_step(*note)
            elif len(note) == 2:
                self._idle = note[1] == "no_work"
                self._switch(self._idle_cause() if self._idle else note[1], note[0])
            else:
                self._take_caller(*note)

    def _take_caller(self, now: float, cause: Cause, change: int) -> None:
        self._num_callers[cause] += change
        if self._first is None:
            self._first = self._last_end = now
        if self._idle:
            self._switch(self._idle_cause(), now)

    def _idle_cause(self) -> Cause:
        """What the engine waits for while it has nothing to do."""
        if self._num_callers["tokenizer"]:
            return "tokenizer"
        return "http" if self._num_callers["http"] else "no_work"

    def _switch(self, cause: Cause, now: float) -> None:
        if now > self._cause_since:
            self._segments.append((self._cause_since, now, self._cause))
        self._cause, self._cause_since = cause, now

    def _take_step(
        self, submitted: float, now: float, seconds: float, tokens: tuple[int, ...], plan: StepPlan
    ) -> None:
        if self._first is None:
            self._first = self._last_end = submitted
        start = max(submitted, self._last_end)
        end = min(max(start, start + seconds), max(now, start))
        self._close_gap(start)
        self._busy_s += end - start
        self._last_end = end
        generated = len(tokens) - tokens.count(NO_TOKEN)
        self._samples.append(StepSample(start, end, _prompt_tokens(plan), generated, len(plan.entries)))
        while self._samples and self._samples[0].end < now - WINDOW_S:
            self._samples.popleft()

    def _close_gap(self, until: float) -> None:
        """Add the gap from the last busy span to `until` to its causes and forget what lies before `until`."""
        if self._cause_since <= self._last_end and not self._segments:
            self._gaps[self._cause] += until - self._last_end  # nothing else was done in it: the usual step
            return
        for cause, seconds in self._causes(self._last_end, until).items():
            self._gaps[cause] += seconds
        while self._segments and self._segments[0][1] <= until:
            self._segments.popleft()

    def _causes(self, start: float, end: float) -> dict[Cause, float]:
        """How [start, end] divides by cause; what no segment covers was spent waking up: scheduler."""
        seconds = _no_seconds()
        current = (self._cause_since, max(end, self._cause_since), self._cause)
        for segment_start, segment_end, cause in (*self._segments, current):
            seconds[cause] += max(0.0, min(segment_end, end) - max(segment_start, start))
        seconds["scheduler"] += max(0.0, end - start - sum(seconds.values()))
        return seconds

    def gaps(self, *, idle: bool) -> GapSeconds:
        """Gaps so far; with `idle` (nothing is in flight) the one that is open now counts too."""
        with self._lock:
            self._settle()
            total = dict(self._gaps)
            if idle and self._first is not None:
                for cause, seconds in self._causes(self._last_end, self._clock()).items():
                    total[cause] += seconds
            return GapSeconds(total["scheduler"], total["tokenizer"], total["no_work"], total["http"])

    @property
    def busy_seconds(self) -> float:
        """Seconds that the executor was computing."""
        with self._lock:
            self._settle()
            return self._busy_s

    def rates(self) -> Rates:
        """Rates over the window that ends now; a step that began before it counts in part."""
        with self._lock:
            self._settle()
            now = self._clock()
            if self._first is None:
                return Rates(0.0, 0.0, 0.0)
            since = max(self._first, now - WINDOW_S)
            length = max(now - since, 1e-9)
            prompt = generated = busy = 0.0
            for sample in self._samples:
                part = _part_since(sample, since)
                prompt += part * sample.prompt_tokens
                generated += part * sample.generated_tokens
                busy += part * (sample.end - sample.start)
            return Rates(prompt / length, generated / length, min(1.0, busy / length))

    def samples(self) -> tuple[StepSample, ...]:
        """The steps of the window, oldest first."""
        with self._lock:
            self._settle()
            return tuple(self._samples)


_samples: Callable[[PlanEntry], bool] = attrgetter("samples")
_admission = attrgetter("admission")


def _prompt_tokens(plan: StepPlan) -> int:
    """Positions that are no decodes."""
    entries, computed = plan.entries, plan.num_tokens
    if computed == len(entries) and not any(map(_admission, entries)):
        return computed - sum(
            map(_samples, entries)
        )  # the usual step, without a Python operation for each entry
    return computed - sum([e.n == 1 and e.samples and e.admission is None for e in entries])


def _no_seconds() -> dict[Cause, float]:
    return {"scheduler": 0.0, "tokenizer": 0.0, "http": 0.0, "no_work": 0.0}


def _part_since(sample: StepSample, since: float) -> float:
    if sample.start >= since:
        return 1.0
    if sample.end <= since:
        return 0.0
    return (sample.end - since) / (sample.end - sample.start)
