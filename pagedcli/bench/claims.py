"""What a claim is, what it is judged by, and how: text, test, verdict. The claims themselves are in `claims_list`.

Standard library and `bench` only; nothing here measures. `compare` hands over what the arms of its
experiments came to, in rounds: the first round of an arm belongs to the first round of every other arm of its
experiment, so that ratios are paired.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pagedcli.bench.report.numbers import ratio
from pagedcli.bench.statistics import Interval, paired_ratio

NOTICEABLE = 1.25
"""A claimed factor above it is refuted by an interval that holds 1 and ends below the factor; a smaller one never."""

WIDEST = 100.0
"""An interval that ends above it says nothing."""

Figures = Mapping[str, float]
"""What one run came to, by name; see `compare_figures.figures_of`."""


class Verdict(StrEnum):
    """What became of a claim."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    NO_DIFFERENCE = "no difference shown"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict and the figures that it follows from, as a sentence and as numbers."""

    verdict: Verdict
    measured: str
    figures: Mapping[str, float]


class NotMeasured(Exception):
    """A claim cannot be judged; the text says why, and what to give."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """What the experiments came to.

    Attributes:
        rounds: Figures by "experiment/arm", one mapping a round.
        facts: Figures that are no run's, such as perplexities.
        missing: Why an experiment, an arm or a fact is not there, by the beginning of its name.
    """

    rounds: Mapping[str, Sequence[Figures]]
    facts: Mapping[str, float]
    missing: Mapping[str, str]

    def values(self, arm: str, figure: str) -> list[float]:
        """A figure of an arm, in rounds."""
        if not self.rounds.get(arm):
            raise NotMeasured(self._why(arm))
        if not all(figure in figures for figures in self.rounds[arm]):
            raise NotMeasured(f"{arm} has no {figure.removesuffix('_s')}: no such request was answered in it")
        return [figures[figure] for figures in self.rounds[arm]]

    def middle(self, arm: str, figure: str) -> float:
        """The median over the rounds."""
        return statistics.median(self.values(arm, figure))

    def over(self, arm: str, base: str, figure: str) -> Interval:
        """How many times a figure of `base` that of `arm` is, paired by rounds."""
        above, below = self.values(arm, figure), self.values(base, figure)
        if len(above) < 2:
            raise NotMeasured("one round, which is all there is, shows no difference: --repeats 2 at least")
        return paired_ratio(above, below)

    def fact(self, name: str) -> float:
        """A figure that is no run's."""
        if name not in self.facts:
            raise NotMeasured(self._why(name))
        return self.facts[name]

    def _why(self, name: str) -> str:
        for begin, text in self.missing.items():
            if name.startswith(begin):
                return text
        return f"{name} was not run"


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim.

    Attributes:
        id: Stable, for programs.
        text: As it is made.
        test: How it is tested here, with the thresholds.
        judge: From measurements to a finding; raises `NotMeasured`.
    """

    id: str
    text: str
    test: str
    judge: Callable[[Measurements], Finding]

    def check(self, measured: Measurements) -> Finding:
        """The finding; a claim whose measurements are not there is not measured."""
        try:
            return self.judge(measured)
        except NotMeasured as reason:
            return Finding(Verdict.NOT_MEASURED, str(reason), {})


def as_dict(claim: Claim, finding: Finding) -> dict[str, Any]:
    """As in the file of `paged bench compare`."""
    return {
        "id": claim.id,
        "text": claim.text,
        "test": claim.test,
        "measured": finding.measured,
        "verdict": finding.verdict.value,
        "figures": dict(finding.figures),
    }


def found(is_true: bool, measured: str, **figures: float) -> Finding:
    """Confirmed or refuted, with the sentence and the figures."""
    return Finding(Verdict.CONFIRMED if is_true else Verdict.REFUTED, measured, figures)


def factor_verdict(factor: Interval, least: float) -> Verdict:
    """Whether something is at least `least` times as much (of 1 or more), by an interval of the factor."""
    if factor.holds(1.0):
        is_far_below = least > NOTICEABLE and factor.high < least
        return Verdict.REFUTED if is_far_below else Verdict.NO_DIFFERENCE
    return Verdict.CONFIRMED if factor.middle >= least else Verdict.REFUTED


def factor_finding(factor: Interval, least: float, sentence: str) -> Finding:
    """A finding about a factor; `sentence` has a place for it."""
    high = ratio(factor.high) if factor.high < WIDEST else f"over {WIDEST:g}x"
    text = sentence.format(f"{ratio(factor.middle)} [{ratio(factor.low)} to {high}]")
    figures = {"factor": factor.middle, "low": factor.low, "high": factor.high}
    return Finding(factor_verdict(factor, least), text, figures)
