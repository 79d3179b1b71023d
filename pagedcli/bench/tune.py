"""Searches the settings that suit a workload on this machine, by measuring. Standard library and `bench.statistics`.

One setting after the other is varied from the best that is known (threads, batch, prefill chunk, page size), again
until nothing changes. The values of a setting run in turns beside the best one; after every two rounds the worse half
is dropped, and the last one left takes the place of the best only if the interval of its ratio, over rounds of its
own, lies above 1: what is not shown is not taken. At the end the result and the defaults run in turns once more, in
runs that the search did not choose by.

What a run is worth is one positive number, more is better; see `Aim`.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pagedcli.bench.statistics import Interval, is_tight, median_interval, paired_ratio
from pagedcli.config import EngineConfig
from pagedcli.errors import ConfigError

AIMS = ("throughput", "latency", "balanced")
SETTINGS = {
    "threads": "device",
    "max_num_seqs": "scheduler",
    "max_num_batched_tokens": "scheduler",
    "page_size": "cache",
}
"""What is searched, in this order, and the section of each."""
HALVING_ROUNDS, FINAL_ROUNDS, MOST_FINAL_ROUNDS, MOST_PASSES = 2, 6, 20, 3
DECIDING_ROUNDS, SURE = (8, 12), 0.99
"""A rival wins all of 8 rounds or all but one of 12, so sure is it then: many are tried, 95% would be too little."""
FINAL_SHARE = 0.35
"""Of the time, for the comparison at the end; while there is nothing to compare only what its fewest rounds take."""
PENALTY = 4
"""Power of the part by which a limit is missed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One value of each setting that is searched."""

    threads: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int

    def config(self, base: EngineConfig) -> EngineConfig:
        """The other settings as they are in `base`."""
        changes: dict[str, dict[str, int]] = {}
        for name, section in SETTINGS.items():
            changes.setdefault(section, {})[name] = getattr(self, name)
        parts = {
            section: dataclasses.replace(getattr(base, section), **values)
            for section, values in changes.items()
        }
        return dataclasses.replace(base, **parts)

    def differing(self, other: Candidate) -> dict[str, int]:
        """Settings that are not those of `other`."""
        return {name: getattr(self, name) for name in SETTINGS if getattr(self, name) != getattr(other, name)}

    def __str__(self) -> str:
        return ", ".join(f"{name} {getattr(self, name)}" for name in SETTINGS)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run came to.

    Attributes:
        tokens_per_s: Output tokens a second.
        ttft_s: Time to the first token, 90th percentile.
        itl_s: Time between two tokens, 90th percentile.
        e2e_s: Whole answers, median.
    """

    tokens_per_s: float
    ttft_s: float
    itl_s: float
    e2e_s: float


@dataclass(frozen=True, slots=True)
class Aim:
    """What is wanted.

    Attributes:
        name: "throughput": output tokens a second; "latency": short answers, so the median of whole answers;
            "balanced": the geometric mean of both.
        max_ttft_s: Limit of the 90th percentile of the time to the first token; missed by a part x, a run is worth
            x ** 4 of what it were.
        max_itl_s: The same of the time between two tokens.
    """

    name: str = "throughput"
    max_ttft_s: float | None = None
    max_itl_s: float | None = None

    def worth(self, figures: Figures) -> float:
        """Positive; more is better."""
        worth = {
            "throughput": figures.tokens_per_s,
            "latency": 1 / figures.e2e_s,
            "balanced": math.sqrt(figures.tokens_per_s / figures.e2e_s),
        }[self.name]
        for limit, value in ((self.max_ttft_s, figures.ttft_s), (self.max_itl_s, figures.itl_s)):
            if limit is not None and value > limit:
                worth *= (limit / value) ** PENALTY
        return worth

    def meets(self, figures: Figures) -> bool:
        """Whether both limits are kept."""
        return not (
            (self.max_ttft_s is not None and figures.ttft_s > self.max_ttft_s)
            or (self.max_itl_s is not None and figures.itl_s > self.max_itl_s)
        )

    def __str__(self) -> str:
        limits = [
            f"{name} at most {limit * 1e3:g} ms"
            for name, limit in (("TTFT p90", self.max_ttft_s), ("ITL p90", self.max_itl_s))
            if limit is not None
        ]
        return ", ".join([self.name, *limits])


@dataclass(slots=True)
class Trial:
    """A candidate and its runs.

    Attributes:
        candidate: Its settings.
        figures: Of each run.
        problem: Why it cannot run, if so.
    """

    candidate: Candidate
    figures: list[Figures] = field(default_factory=list)
    problem: str | None = None

    def median(self) -> Figures:
        """Of its runs, each figure by itself."""
        return Figures(
            *(
                statistics.median(getattr(run, name.name) for run in self.figures)
                for name in dataclasses.fields(Figures)
            )
        )


@dataclass(slots=True)
class Tuned:
    """What the search came to.

    Attributes:
        default: Settings that it began with.
        best: Settings to use: `default` where no difference was shown.
        found: The best that the search found.
        trials: Everything that was run, in the order of its first run.
        final: Worth of `found` over that of `default` in the comparison at the end; None: there was none.
        comparison: Figures of `default` and `found`, round by round.
        is_interrupted: Whether it was ended early.
        is_cut: Whether time was over before the search was.
        untried: Settings of which a value was never run, for want of time or because of an interrupt.
    """

    default: Candidate
    best: Candidate
    found: Candidate
    trials: list[Trial]
    final: Interval | None = None
    comparison: tuple[list[Figures], list[Figures]] = field(default_factory=lambda: ([], []))
    is_interrupted: bool = False
    is_cut: bool = False
    untried: tuple[str, ...] = ()

    @property
    def is_better(self) -> bool:
        """Whether the interval of the final ratio lies above 1."""
        return self.final is not None and self.final.low > 1.0


class _OutOfTimeError(Exception):
    """The search must end."""


class Tuner:
    """The search.

    Args:
        measure: Runs a candidate; a ConfigError takes it out of the search.
        aim: What is wanted.
        space: Values by setting; a setting that is not there stays as it is.
        default: Where to begin.
        seconds: For all of it.
        clock: Seconds.
        on_run: Told before each run: what for, the candidate, the part of the time that is over.
    """

    def __init__(
        self,
        measure: Callable[[Candidate], Figures],
        aim: Aim,
        space: Mapping[str, Sequence[int]],
        default: Candidate,
        *,
        seconds: float,
        clock: Callable[[], float],
        on_run: Callable[[str, Candidate, float], None] = lambda why, candidate, part: None,
    ) -> None:
        self._measure, self._aim, self._space, self._default = measure, aim, space, default
        self._seconds, self._clock, self._on_run = seconds, clock, on_run
        self._start = clock()
        self._trials: dict[Candidate, Trial] = {}
        self._longest = 0.0

    def run(self) -> Tuned:
        """Search, then compare. An interrupt (Ctrl-C) ends it with what is known."""
        result = Tuned(self._default, self._default, self._default, [])
        try:
            self._search(result)
            self._compare(result)
        except KeyboardInterrupt:
            result.is_interrupted = True
            if len(result.comparison[0]) < FINAL_ROUNDS:
                result.final = None  # what so few rounds seem to show is chance
        result.trials = list(self._trials.values())
        result.untried = tuple(name for name in SETTINGS if self._is_untried(name))
        if result.is_better or (result.is_interrupted and result.final is None):
            result.best = result.found  # every step to it was shown, at least
        return result

    # ---- the search

    def _search(self, result: Tuned) -> None:
        try:
            for _ in range(MOST_PASSES):
                before = result.found
                for name in SETTINGS:
                    if name in self._space:
                        result.found = self._vary(name, result.found)
                if result.found == before:
                    return
        except _OutOfTimeError:
            result.is_cut = True

    def _is_untried(self, name: str) -> bool:
        tried = {getattr(candidate, name) for candidate in self._trials}
        return not tried.issuperset(self._space.get(name, ()))

    def _is_late(self, best: Candidate) -> bool:
        """Whether one more run would take time that the comparison at the end needs."""
        kept = FINAL_SHARE * self._seconds
        if best == self._default:
            kept = min(kept, 2 * FINAL_ROUNDS * self._longest)
        return self._clock() + self._longest > self._start + self._seconds - kept

    def _vary(self, name: str, best: Candidate) -> Candidate:
        """The best, or one that differs in this setting and is shown to be better."""
        others = [value for value in self._space[name] if value != getattr(best, name)]
        rivals = [dataclasses.replace(best, **{name: value}) for value in others]
        worth: dict[Candidate, list[float]] = {candidate: [] for candidate in (best, *rivals)}
        why = f"varying {name}"
        while len(rivals) > 1:
            for _ in range(HALVING_ROUNDS):
                self._round(why, [best, *rivals], worth)
            rivals = [rival for rival in rivals if self._trials[rival].problem is None]
            ratios = {rival: paired_ratio(worth[rival], worth[best][: len(worth[rival])]) for rival in rivals}
            rivals = sorted(rivals, key=lambda rival: -ratios[rival].middle)[: max(1, len(rivals) // 2)]
        return rivals[0] if rivals and self._is_better(why, rivals[0], best) else best

    def _is_better(self, why: str, rival: Candidate, best: Candidate) -> bool:
        """By rounds of the two alone: those that chose the rival among others would flatter it."""
        worth: dict[Candidate, list[float]] = {best: [], rival: []}
        for number in range(1, DECIDING_ROUNDS[-1] + 1):
            self._round(why, [best, rival], worth)
            if self._trials[rival].problem is not None:
                return False
            ratios = [after / before for after, before in zip(worth[rival], worth[best], strict=True)]
            if sum(ratio <= 1 for ratio in ratios) > 1:
                return False  # no more rounds could make it sure
            if number in DECIDING_ROUNDS and median_interval(ratios, SURE).low > 1.0:
                return True
        return False

    def _round(self, why: str, candidates: Sequence[Candidate], worth: dict[Candidate, list[float]]) -> None:
        """Each once, the best first, or backwards in turns; a round that cannot be finished counts for nobody."""
        number = len(worth[candidates[0]])
        found: dict[Candidate, float] = {}
        for candidate in candidates if number % 2 == 0 else reversed(candidates):
            if self._is_late(candidates[0]):
                raise _OutOfTimeError
            figures = self._run(why, candidate)
            if figures is not None:
                found[candidate] = self._aim.worth(figures)
        for candidate, value in found.items():
            worth[candidate].append(value)

    def _run(self, why: str, candidate: Candidate) -> Figures | None:
        """None: it cannot run."""
        trial = self._trials.setdefault(candidate, Trial(candidate))
        if trial.problem is not None:
            return None
        self._on_run(why, candidate, min(1.0, (self._clock() - self._start) / self._seconds))
        begun = self._clock()
        try:
            figures = self._measure(candidate)
        except ConfigError as error:
            if candidate == self._default:
                raise
            trial.problem = str(error)
            return None
        self._longest = max(self._longest, self._clock() - begun)
        trial.figures.append(figures)
        return figures

    # ---- the comparison at the end

    def _compare(self, result: Tuned) -> None:
        """What was found beside the defaults, in turns, until it is clear or time is up."""
        if result.found == self._default:
            return
        ratios: list[float] = []
        end = self._start + self._seconds
        while len(ratios) < MOST_FINAL_ROUNDS:
            enough = len(ratios) >= FINAL_ROUNDS and is_tight(ratios)
            if enough or (len(ratios) >= 2 and self._clock() + 2 * self._longest > end):
                break
            pair = (self._default, result.found)
            turned = pair if len(ratios) % 2 == 0 else pair[::-1]
            found = {candidate: self._run("comparing with the defaults", candidate) for candidate in turned}
            before, after = (found[candidate] for candidate in pair)
            assert before is not None, "the defaults run"
            assert after is not None, "what was found has run before"
            result.comparison[0].append(before)
            result.comparison[1].append(after)
            ratios.append(self._aim.worth(after) / self._aim.worth(before))
            result.final = median_interval(ratios)


def default_space(default: Candidate, *, cores: int, requests: int) -> dict[str, list[int]]:
    """Values that are worth a try.

    Args:
        default: Its values are always among them.
        cores: Physical cores within the quota.
        requests: Of the workload: more cannot run at once.
    """
    threads = {2**power for power in range(cores.bit_length()) if 2**power <= cores} | {cores}
    seqs = {value for value in (4, 8, 16, 32, 64, 128) if value < requests}
    space: dict[str, set[int]] = {
        "threads": threads,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": {128, 256, 512, 1024, 4096},
        "page_size": {8, 32, 64, 128},
    }
    return {name: sorted(values | {getattr(default, name)}) for name, values in space.items()}
