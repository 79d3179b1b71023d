"""Intervals of medians: against enumeration, against simulation, and what they conclude."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from pagedcli.bench.statistics import (
    NO_DIFFERENCE,
    ORDER,
    SINGLE,
    STUDENT,
    coverage,
    is_tight,
    median_interval,
    paired_ratio,
    verdict,
)


@pytest.mark.parametrize("num", range(2, 13))
def test_the_coverage_is_that_of_all_ways_in_which_values_can_lie(num: int) -> None:
    for rank in range(1, num // 2 + 1):
        inside = 0
        for below in itertools.product((False, True), repeat=num):
            # The median is between the rank-th smallest and the rank-th largest if as many lie on each side of it.
            inside += rank <= sum(below) <= num - rank
        assert coverage(num, rank) == pytest.approx(inside / 2**num)


@pytest.mark.parametrize("num", [6, 9, 15, 40])
def test_order_statistics_hold_the_median_as_often_as_they_say(num: int) -> None:
    draw, held, trials, said = random.Random(num), 0, 4000, 0.0
    for _ in range(trials):
        # Far from normal: mostly fast, sometimes much slower.
        interval = median_interval([draw.expovariate(1.0) ** 2 for _ in range(num)])
        assert interval.method == ORDER
        held += interval.holds(math.log(2) ** 2)
        said = interval.confidence
    assert said >= 0.95
    assert held / trials == pytest.approx(said, abs=4 * math.sqrt(0.05 * 0.95 / trials))


@pytest.mark.parametrize("num", [2, 3, 5])
def test_few_values_hold_the_median_in_95_of_100_if_they_are_log_normal(num: int) -> None:
    draw, held, trials = random.Random(num), 0, 4000
    for _ in range(trials):
        interval = median_interval([7.0 * math.exp(draw.gauss(0, 0.05)) for _ in range(num)])
        assert interval.method == STUDENT
        held += interval.holds(7.0)
    assert held / trials == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("seed", range(50))
def test_the_middle_is_the_median_and_lies_inside(seed: int) -> None:
    draw = random.Random(seed)
    values = [draw.lognormvariate(0, draw.choice([0.001, 0.1, 2.0])) for _ in range(draw.randint(1, 30))]
    interval = median_interval(values)
    assert interval.middle == statistics.median(values)
    assert interval.low <= interval.middle <= interval.high
    draw.shuffle(values)
    assert median_interval(values) == interval


def test_one_value_says_nothing_about_the_median() -> None:
    interval = median_interval([3.0])
    assert (interval.low, interval.high, interval.confidence, interval.method) == (3.0, 3.0, 0.0, SINGLE)
    assert interval.relative_half_width == math.inf
    assert not is_tight([3.0])
    assert verdict(paired_ratio([3.0], [1.0])) == NO_DIFFERENCE


def test_a_drift_of_the_machine_cancels_in_pairs() -> None:
    draw = random.Random(0)
    speed = [1.0 - 0.05 * index for index in range(8)]  # the machine becomes slower all the time
    slow = [100 * s * draw.uniform(0.995, 1.005) for s in speed]
    fast = [103 * s * draw.uniform(0.995, 1.005) for s in speed]
    ratio = paired_ratio(fast, slow)
    assert 1.0 < ratio.low <= 1.03 <= ratio.high < 1.05
    assert verdict(ratio, more="faster") == "1.03 times faster"
    assert verdict(paired_ratio(slow, fast), more="faster", less="slower") == "1.03 times slower"


def test_no_difference_is_shown_between_two_runs_of_the_same() -> None:
    wrong = 0
    for seed in range(400):
        draw = random.Random(seed)
        one, other = ([draw.lognormvariate(5, 0.03) for _ in range(7)] for _ in range(2))
        wrong += verdict(paired_ratio(one, other)) != NO_DIFFERENCE
    assert wrong / 400 < 0.05


def test_it_is_tight_when_the_interval_is_narrow_and_not_when_values_merely_agree_once() -> None:
    assert is_tight([100.0, 100.1, 99.9, 100.0, 100.05, 99.95])
    assert not is_tight([100.0, 110.0, 90.0, 104.0, 97.0, 95.0])
    assert not is_tight([100.0, 101.0])  # two values know little
