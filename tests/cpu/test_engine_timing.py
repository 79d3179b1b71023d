"""Busy spans and gaps by cause, on a clock that the test moves."""

from __future__ import annotations

import dataclasses

import pytest

from pagedcli.core.plan import PlanEntry, StepPlan
from pagedcli.engine.outputs import GapSeconds
from pagedcli.engine.timing import WINDOW_S, Timing


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plan(*lengths: int) -> StepPlan:
    entries = tuple(
        PlanEntry(i, i, 0, 0, n, samples=True, logit_rows=(n - 1,)) for i, n in enumerate(lengths)
    )
    return StepPlan(step=1, entries=entries)


def result(seconds: float, tokens: tuple[int, ...] = (5,)) -> tuple[float, tuple[int, ...]]:
    return seconds, tokens


def near(gaps: GapSeconds) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in dataclasses.astuple(gaps))


def test_gaps_are_divided_by_what_the_engine_thread_did() -> None:
    clock = Clock()
    timing = Timing(clock)
    clock.now = 110.0  # nobody has asked for anything yet: not a gap
    with timing.tokenizing():
        clock.now = 111.0
    timing.mark("scheduler")
    clock.now = 111.5
    submitted = clock.now
    clock.now = 113.5
    timing.step_done((submitted, clock.now, *result(2.0), plan(4)))
    assert near(timing.gaps(idle=False)) == (0.5, 1.0, 0.0, 0.0)
    assert timing.busy_seconds == pytest.approx(2.0)
    timing.mark("tokenizer")
    clock.now = 113.75
    timing.mark("no_work")
    clock.now = 116.0
    timing.mark("scheduler")
    clock.now = 116.25
    timing.step_done((116.25, clock.now, *result(0.0), plan(1)))
    assert near(timing.gaps(idle=False)) == (0.75, 1.25, 2.25, 0.0)
    timing.mark("no_work")
    clock.now = 117.25
    assert near(timing.gaps(idle=False)) == (0.75, 1.25, 2.25, 0.0)
    assert near(timing.gaps(idle=True)) == (0.75, 1.25, 3.25, 0.0)


def test_steps_in_flight_leave_no_gap() -> None:
    """At depth 2 the next plan is there before the device is done with the last one."""
    clock = Clock()
    timing = Timing(clock)
    timing.mark("scheduler")
    for number in range(5):
        submitted = 100.0 + number - (0.5 if number else 0.0)
        clock.now = 101.0 + number
        timing.step_done((submitted, clock.now, *result(1.0), plan(1)))
    assert timing.busy_seconds == pytest.approx(5.0)
    assert near(timing.gaps(idle=True)) == (0.0, 0.0, 0.0, 0.0)
    assert timing.rates().executor_busy == pytest.approx(1.0)


def test_rates_slide_and_fall_when_nothing_happens() -> None:
    clock = Clock()
    timing = Timing(clock)
    for number in range(10):
        clock.now = 101.0 + number
        timing.step_done((100.0 + number, clock.now, *result(0.5, (5, 6, 7)), plan(1, 1, 30)))
    rates = timing.rates()
    # Of each step's three entries two are decodes; the last five steps lie in the window of 5 s.
    assert rates.generated_tokens_per_s == pytest.approx(3.0)
    assert rates.prompt_tokens_per_s == pytest.approx(30.0)
    assert rates.executor_busy == pytest.approx(0.5)
    assert len(timing.samples()) == 5
    clock.now += WINDOW_S / 2
    assert timing.rates().generated_tokens_per_s < 2.0
    clock.now += WINDOW_S
    assert timing.rates().generated_tokens_per_s == 0.0


def test_a_step_that_began_before_the_window_counts_in_part() -> None:
    clock = Clock()
    timing = Timing(clock)
    clock.now = 110.0
    timing.step_done((100.0, clock.now, *result(10.0, (5,) * 20), plan(*(1,) * 20)))
    assert timing.rates().generated_tokens_per_s == pytest.approx(2.0)
    assert timing.rates().executor_busy == pytest.approx(1.0)


def test_waiting_for_callers_that_tokenize_is_text_work() -> None:
    clock = Clock()
    timing = Timing(clock)
    timing.step_done((100.0, clock.now, *result(0.0), plan(1)))
    timing.mark("no_work")
    clock.now = 101.0
    with timing.tokenizing():
        clock.now = 103.0
        with timing.tokenizing():
            clock.now = 104.0
        clock.now = 105.0
    clock.now = 106.0
    assert near(timing.gaps(idle=True)) == (0.0, 4.0, 2.0, 0.0)
    with timing.tokenizing():
        timing.mark("scheduler")  # the engine works: what callers do meanwhile is no cause of anything
        clock.now = 107.0
    assert near(timing.gaps(idle=True)) == (1.0, 4.0, 2.0, 0.0)


def test_waiting_for_a_server_that_reads_a_request_is_its_own_cause() -> None:
    clock = Clock()
    timing = Timing(clock)
    timing.mark("no_work")
    with timing.receiving():
        clock.now = 101.0
        with timing.tokenizing():
            clock.now = 103.0
        clock.now = 103.5
    clock.now = 107.5
    gaps = timing.gaps(idle=True)
    assert (gaps.scheduler, gaps.tokenizer, gaps.http, gaps.no_work) == pytest.approx((0.0, 2.0, 1.5, 4.0))
