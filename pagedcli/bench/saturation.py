"""The search for the saturation point: the largest rate at which a server still keeps up. Standard library only.

From a first rate it doubles (or halves) until one rate was kept and one was not, then tries their geometric mean until
the two are within a tolerance. Chance and a machine's other load may turn a single trial, so the two ends stand in the
result, with every trial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MAX_TRIALS = 16
KEEPS_UP = 0.9
"""Share of the arrival rate that must be answered, where there are no latency targets."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What one rate came to.

    Attributes:
        rate: Requests a second that arrived.
        is_kept: Whether the server kept up.
        share: What that was judged by: good requests of all, or answered over arrived.
        figures: Of the run, for the file.
    """

    rate: float
    is_kept: bool
    share: float
    figures: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Saturation:
    """Where a server saturates.

    Attributes:
        rate: Largest rate that was kept; None: not even the smallest tried.
        above: Smallest rate above it that was not kept; None: even the largest tried was.
        tolerance: The search ends when `above` is within it.
        trials: In the order in which they ran.
    """

    rate: float | None
    above: float | None
    tolerance: float
    trials: tuple[Trial, ...]

    @classmethod
    def of(cls, trials: Sequence[Trial], tolerance: float) -> Saturation:
        """What trials show."""
        kept = [trial.rate for trial in trials if trial.is_kept]
        missed = [trial.rate for trial in trials if not trial.is_kept]
        return cls(max(kept, default=None), min(missed, default=None), tolerance, tuple(trials))

    @property
    def is_found(self) -> bool:
        """Whether both ends are known, and within the tolerance."""
        return (
            self.rate is not None
            and self.above is not None
            and self.above <= self.rate * (1 + self.tolerance) * (1 + 1e-9)
        )

    def as_dict(self) -> dict[str, Any]:
        """As in a benchmark's file."""
        return {
            "rate": self.rate,
            "above": self.above,
            "tolerance": self.tolerance,
            "is_found": self.is_found,
            "trials": [
                {"rate": t.rate, "is_kept": t.is_kept, "share": t.share, **t.figures} for t in self.trials
            ],
        }


def find_saturation(
    measure: Callable[[float], Trial],
    first_rate: float,
    *,
    tolerance: float,
    least_rate: float = 0.0,
    max_trials: int = MAX_TRIALS,
) -> Saturation:
    """Search by doubling and bisection.

    Args:
        measure: Runs one rate.
        first_rate: Tried first.
        tolerance: Relative distance of the two ends at which the search ends.
        least_rate: None below it is tried: there requests meet no other, and less load changes nothing.
        max_trials: At most.
    """
    trials: list[Trial] = []
    rate = first_rate
    while len(trials) < max_trials:
        trials.append(measure(rate))
        known = Saturation.of(trials, tolerance)
        if known.is_found:
            break
        rate = _next(known.rate, known.above)
        if rate < least_rate:
            break
    return Saturation.of(trials, tolerance)


def _next(low: float | None, high: float | None) -> float:
    if low is None:
        assert high is not None
        return high / 2
    return 2 * low if high is None else math.sqrt(low * high)


def kept_share(arrival_span_s: float, run_s: float, unloaded_s: float) -> float:
    """Rate of answers over the rate of arrivals, up to 1; the latency of an idle server is no backlog.

    Args:
        arrival_span_s: From the first arrival to the last.
        run_s: From the first arrival to the last answer.
        unloaded_s: Latency of a request that has the server to itself.
    """
    return min(1.0, (arrival_span_s + unloaded_s) / run_s) if run_s > 0 else 1.0
