"""Medians with intervals, comparisons in pairs, and when enough was measured. Standard library only.

A machine's speed drifts and other load only ever slows it, so that means are of no use: what is told is the median.
Its interval is made of order statistics, which assume nothing about the distribution: between the k-th smallest and
the k-th largest of n values the median lies with the probability that n tosses of a coin give k to n - k heads. Fewer
than 6 values cannot give 95% in that way; then the interval is Student's t of the logarithms, which assumes that
these are normal, and is wide. `Interval.method` says which one it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

CONFIDENCE = 0.95
TIGHT = 0.02
"""Half of an interval over its middle, at most, for a figure that needs no more rounds."""
NO_DIFFERENCE = "no difference shown"
ORDER, STUDENT, SINGLE = "order statistics", "Student's t of logarithms", "one value"
# Two-sided 95%, by degrees of freedom: what 2 to 5 values need.
_STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and where it may lie.

    Attributes:
        low: Lower end.
        middle: The median of what was measured.
        high: Upper end.
        confidence: Probability that the true median is inside; 0 of one value, where nothing is known.
        method: How the ends were found.
    """

    low: float
    middle: float
    high: float
    confidence: float = CONFIDENCE
    method: str = ORDER

    @property
    def relative_half_width(self) -> float:
        """Half its width over its middle; infinite for one value."""
        if self.method == SINGLE or self.middle == 0:
            return math.inf
        return (self.high - self.low) / 2 / abs(self.middle)

    def holds(self, value: float) -> bool:
        """Whether a value is inside."""
        return self.low <= value <= self.high

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def coverage(num: int, rank: int) -> float:
    """Probability that a median lies between the `rank`-th smallest and the `rank`-th largest of `num` values."""
    outside = sum(math.comb(num, heads) for heads in range(rank))
    return 1.0 - 2.0 * outside / float(2**num)


def _rank(num: int, confidence: float) -> int | None:
    """The largest rank whose interval is sure enough; None: even the whole range is not."""
    sure = [rank for rank in range(1, num // 2 + 1) if coverage(num, rank) >= confidence]
    return max(sure, default=None)


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The median of what was measured, and where the true one lies.

    Args:
        values: At least one; positive ones if they are fewer than 6.
        confidence: Of order statistics, at least; fewer than 6 values have 95%.
    """
    ordered = sorted(values)
    middle = statistics.median(ordered)
    if len(ordered) == 1:
        return Interval(middle, middle, middle, 0.0, SINGLE)
    rank = _rank(len(ordered), confidence)
    if rank is not None:
        low, high = ordered[rank - 1], ordered[-rank]
        return Interval(low, middle, high, coverage(len(ordered), rank), ORDER)
    if len(ordered) - 1 not in _STUDENT or ordered[0] <= 0:  # all that can be said is where they all were
        return Interval(ordered[0], middle, ordered[-1], coverage(len(ordered), 1), ORDER)
    logarithms = [math.log(value) for value in ordered]
    half = _STUDENT[len(ordered) - 1] * statistics.stdev(logarithms) / math.sqrt(len(ordered))
    centre = statistics.fmean(logarithms)
    low, high = math.exp(centre - half), math.exp(centre + half)
    return Interval(min(low, middle), middle, max(high, middle), CONFIDENCE, STUDENT)


def paired_ratio(above: Sequence[float], below: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """How many times `below` the values of `above` are, the n-th with the n-th: what was run in the same round.

    Args:
        above: Positive values.
        below: As many positive values.
        confidence: See `median_interval`.
    """
    return median_interval([a / b for a, b in zip(above, below, strict=True)], confidence)


def verdict(ratio: Interval, *, more: str = "more", less: str = "less") -> str:
    """What a ratio shows, in words: nothing, where its interval holds 1 or where there is no interval."""
    if ratio.method == SINGLE or ratio.holds(1.0):
        return NO_DIFFERENCE
    factor = ratio.middle if ratio.middle > 1 else 1 / ratio.middle
    return f"{factor:.2f} times {more if ratio.middle > 1 else less}"


def is_tight(values: Sequence[float], within: float = TIGHT) -> bool:
    """Whether the median of these is known closely enough."""
    return len(values) > 1 and median_interval(values).relative_half_width <= within
