"""Combinations of settings measured in turns, until they are known closely enough or a limit is reached.

May import `bench`, `api.resolve`, `config` and `workloads`. Rounds go over the settings forwards and backwards in turn,
so that a drift of the machine meets all of them; settings that are tight already are still run, or their rounds would
not be those of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagedcli.api.resolve import ResolvedConfig
from pagedcli.bench.environment import LoadMeter
from pagedcli.bench.run import Interrupted, Run, Watch
from pagedcli.bench.statistics import is_tight
from pagedcli.config import EngineConfig
from pagedcli.workloads.requests import WorkloadRequest

MIN_ROUNDS = 3
SECONDS = 60.0
"""For each setting: no round begins later."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One combination.

    Attributes:
        values: What was swept, by dotted key; empty if nothing was.
        config: The whole.
    """

    values: Mapping[str, object]
    config: EngineConfig

    def __str__(self) -> str:
        names = (f"{key.partition('.')[2].replace('_', ' ')} {value}" for key, value in self.values.items())
        return ", ".join(names)


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop.

    Attributes:
        rounds: So many; None: until tight.
        seconds: Begin no round later; None: as many rounds as `rounds` says.
    """

    rounds: int | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, rounds: int | None, seconds: float | None, num_settings: int) -> Limits:
        """As the flags say; without any of them a minute for each setting."""
        if rounds is None and seconds is None:
            seconds = SECONDS * num_settings
        return cls(rounds, seconds)


class RunsWorkloads(Protocol):
    """What is asked of a session."""

    def resolve(self, config: EngineConfig) -> ResolvedConfig:
        """See `session.Session.resolve`."""

    def run(
        self, config: EngineConfig, workload: Sequence[WorkloadRequest], *, watch: Watch | None = None
    ) -> Run:
        """See `session.Session.run`."""


@dataclass(slots=True)
class Results:
    """What was measured so far.

    Attributes:
        runs: Of each setting, by its place, a run for each round.
        why: Why no more rounds were run.
        is_interrupted: Whether it was by Ctrl-C.
    """

    runs: list[list[Run]]
    why: str = ""
    is_interrupted: bool = False

    def rates(self, place: int) -> list[float]:
        """Output tokens per second of a setting's rounds."""
        return [run.output_tokens_per_s for run in self.runs[place]]

    @property
    def is_tight(self) -> bool:
        """Whether the rates of all settings are known closely enough; one that served nothing has none."""
        rates = [self.rates(place) for place in range(len(self.runs))]
        return all(is_tight(of_one) for of_one in rates if any(of_one))

    @property
    def is_futile(self) -> bool:
        """Whether no setting has served a request: more rounds would be like these."""
        return bool(self.runs[0]) and not any(run.served for runs in self.runs for run in runs)


OnRun = Callable[[Setting, int], None]
"""Told before each run: the setting, and the round from 1."""
AfterRun = Callable[[Setting, int, Run], None]


@dataclass(slots=True)
class Sweep:
    """Settings to be measured on one workload.

    Attributes:
        session: Runs them.
        settings: At least one.
        workload: The same for all.
        limits: When to stop.
        load: Counts what others do meanwhile.
        clock: Seconds.
    """

    session: RunsWorkloads
    settings: Sequence[Setting]
    workload: Sequence[WorkloadRequest]
    limits: Limits
    load: LoadMeter = field(default_factory=lambda: LoadMeter(begin=False))
    clock: Callable[[], float] = time.perf_counter

    def run(
        self,
        *,
        watch: Watch | None = None,
        before: OnRun = lambda setting, number: None,
        after: AfterRun = lambda setting, number, run: None,
    ) -> Results:
        """Measure until a limit is reached; Ctrl-C ends it with what there is."""
        results = Results([[] for _ in self.settings])
        start, number = self.clock(), 0
        try:
            while not self._is_over(results, number, self.clock() - start):
                number += 1
                places = range(len(self.settings))
                for place in places if number % 2 else reversed(places):
                    before(self.settings[place], number)
                    results.runs[place].append(self._one(place, watch))
                    after(self.settings[place], number, results.runs[place][-1])
        except Interrupted as interrupted:
            self._keep(results, place, interrupted.run)
        except KeyboardInterrupt:
            self._keep(results, 0, None)
        return results

    def _one(self, place: int, watch: Watch | None) -> Run:
        self.load.begin()
        try:
            return self.session.run(self.settings[place].config, self.workload, watch=watch)
        finally:
            self.load.end()

    @staticmethod
    def _keep(results: Results, place: int, run: Run | None) -> None:
        """Part of a round counts only where there is no whole one."""
        results.is_interrupted, results.why = True, "interrupted"
        if run is not None and not results.runs[place]:
            results.runs[place].append(run)

    def _is_over(self, results: Results, number: int, seconds: float) -> bool:
        limits = self.limits
        if results.is_futile:
            results.why = "no request was served in the first round"
            return True
        if limits.rounds is not None:
            if number >= limits.rounds:
                results.why = f"{number} {'round' if number == 1 else 'rounds'}, as asked for"
                return True
        elif number >= MIN_ROUNDS and results.is_tight:
            results.why = f"tight after {number} rounds"
            return True
        if number and limits.seconds is not None and seconds >= limits.seconds:
            results.why = (
                f"{limits.seconds:g} s were over after {number} {'round' if number == 1 else 'rounds'}"
            )
            return True
        return False
