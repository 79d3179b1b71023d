"""Patterns of arrivals: their number, rate and shape."""

from __future__ import annotations

import itertools

import pytest

from pagedcli.errors import ConfigError
from pagedcli.workloads.arrivals import Arrivals, bursts, fixed_rate, ramp


def test_a_fixed_rate_and_bursts() -> None:
    assert fixed_rate(4, 2.0) == [0.0, 0.5, 1.0, 1.5]
    assert bursts(7, 4.0, size=3) == [0.0, 0.0, 0.0, 0.75, 0.75, 0.75, 1.5]


@pytest.mark.parametrize(("first", "last"), [(1.0, 9.0), (9.0, 1.0), (3.0, 3.0)])
def test_a_ramp_goes_evenly_from_one_rate_to_the_other(first: float, last: float) -> None:
    times = ramp(1000, first, last)
    assert times == sorted(times)
    total = 2 * 1000 / (first + last)
    assert times[-1] < total
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert 1 / gaps[0] == pytest.approx(first, rel=0.07)
    assert 1 / gaps[-1] == pytest.approx(last, rel=0.07)
    half = sum(moment < total / 2 for moment in times)
    assert half == pytest.approx((first + (first + last) / 2) / 2 * total / 2, abs=2)


@pytest.mark.parametrize("text", ["poisson", "fixed", "bursts", "bursts:3", "ramp:8"])
def test_patterns_are_read(text: str) -> None:
    arrivals = Arrivals.parse(text, rate=4.0, seed=1)
    times = arrivals.times(400)
    assert len(times) == 400
    assert times == sorted(times) == arrivals.times(400)
    if "ramp" not in text:
        assert times[-1] == pytest.approx(100, rel=0.15)
    assert arrivals.as_dict()["requests_per_s"] == 4.0


@pytest.mark.parametrize(
    "text", ["", "x", "poisson:2", "bursts:0", "bursts:x", "ramp", "ramp:0", "ramp:nan", "ramp:-1"]
)
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Arrivals.parse(text, rate=1.0)
    for rate in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="rate"):
            Arrivals.parse("poisson", rate=rate)


def test_a_rate_that_no_run_outlives_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rate 1e-300: give requests per second, 0\.0001 or more"):
        Arrivals.parse("poisson", rate=1e-300, seed=0)
