"""The search for the saturation point: on rules, on chance, and on a server of known capacity in exact time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pagedcli.bench.latency import run_seconds
from pagedcli.bench.saturation import KEEPS_UP, Trial, find_saturation, kept_share
from pagedcli.workloads.arrivals import fixed_rate
from pagedcli.workloads.requests import WorkloadRequest
from tests.bench.fake_http import HEAD, FakeServer, Serve, event, last_event, run_workload


def judge(keeps: Callable[[float], bool]) -> Callable[[float], Trial]:
    return lambda rate: Trial(rate, keeps(rate), 1.0 if keeps(rate) else 0.0, {})


@pytest.mark.parametrize("capacity", [0.013, 1.0, 7.3, 900.0])
@pytest.mark.parametrize("first", [0.1, 8.0, 100.0])
def test_the_largest_rate_is_found_from_any_start(capacity: float, first: float) -> None:
    found = find_saturation(judge(lambda rate: rate <= capacity), first, tolerance=0.1, max_trials=40)
    assert found.is_found
    assert found.rate is not None
    assert found.above is not None
    assert found.rate <= capacity < found.above <= found.rate * 1.1 * (1 + 1e-9)


def test_a_search_that_ends_early_says_what_it_knows() -> None:
    never = find_saturation(judge(lambda rate: False), 8.0, tolerance=0.1, max_trials=4)
    assert (never.rate, never.above, never.is_found, len(never.trials)) == (None, 1.0, False, 4)
    sparse = find_saturation(judge(lambda rate: False), 8.0, tolerance=0.1, least_rate=3.0)
    assert (sparse.above, len(sparse.trials)) == (4.0, 2)
    always = find_saturation(judge(lambda rate: True), 1.0, tolerance=0.1, max_trials=4)
    assert (always.rate, always.above, always.is_found) == (8.0, None, False)
    assert always.as_dict()["trials"][0] == {"rate": 1.0, "is_kept": True, "share": 1.0}


def serial_server(seconds: float) -> Serve:
    """One request after the other: it has a capacity of 1/seconds, exactly."""
    free_at = 0.0

    async def serve(fake: FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        nonlocal free_at
        free_at = max(free_at, fake.now) + seconds
        at = free_at
        await fake.send(writer, HEAD)
        await fake.write(writer, event("a", finish_reason="length"), at)
        end = last_event({"prompt_tokens": 1, "completion_tokens": 1})
        await fake.send(writer, b"%x\r\n%s\r\n0\r\n\r\n" % (len(end), end))

    return serve


def test_a_server_that_serves_eight_a_second_saturates_there() -> None:
    def measure(rate: float) -> Trial:
        times = fixed_rate(24, rate)
        requests = [WorkloadRequest(f"r{i}", (1,), 1, 1, moment) for i, moment in enumerate(times)]
        state, _ = run_workload(serial_server(1 / 8), requests)
        share = kept_share(times[-1], run_seconds(state.answers), 1 / 8)
        return Trial(rate, share >= KEEPS_UP, share, {})

    found = find_saturation(measure, 1.0, tolerance=0.05)
    assert found.is_found
    assert found.rate is not None
    assert found.trials[0].share == 1.0
    assert 8.0 <= found.rate <= 8.0 / KEEPS_UP * 1.1


def test_the_share_that_is_kept_up() -> None:
    assert kept_share(10.0, 10.5, 0.5) == 1.0
    assert kept_share(10.0, 21.0, 0.5) == 0.5
    assert kept_share(0.0, 0.0, 0.0) == 1.0
