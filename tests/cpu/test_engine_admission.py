"""The queue's limits, and what is said to those that come beyond them."""

from __future__ import annotations

import threading

import pytest

from pagedcli.core.sampling import SamplingParams
from pagedcli.engine.admission import QueueLimits, WaitingRoom
from pagedcli.engine.client import EngineSettings
from pagedcli.engine.prompt import RequestSpec
from pagedcli.errors import RequestError
from tests.cpu.test_engine_client import GatedExecutor, last, running, submit

SHORT = SamplingParams(max_tokens=3)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_full_queue_refuses_and_serves_again_once_somebody_started() -> None:
    executor = GatedExecutor(threaded=True, max_num_seqs=1)
    with running(executor, limits=QueueLimits(max_requests=2)) as engine:
        first = submit(engine, RequestSpec("a", params=SHORT))[1]
        executor.gate.release()
        wait_for(lambda: len(executor.plans) > 0)
        wait_for(lambda: engine._waiting.num_requests == 0)  # planned first, then told to have started
        others = [submit(engine, RequestSpec("b", params=SHORT))[1] for _ in range(2)]
        assert engine.is_full
        with pytest.raises(RequestError) as caught:
            engine.add(RequestSpec("c", params=SHORT), lambda delta: None)
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        assert "2 requests wait, the queue takes 2" in str(caught.value)
        assert caught.value.retry_after_s is not None
        assert 1 <= caught.value.retry_after_s <= 60
        executor.open()
        for deltas in (first, *others):
            assert last(deltas).error is None
        assert not engine.is_full
        assert last(submit(engine, RequestSpec("d", params=SHORT))[1]).error is None
        assert engine.stats().requests_rejected == {"queue_full": 1}


def test_of_two_that_come_at_once_one_gets_the_last_place() -> None:
    executor = GatedExecutor(threaded=True, max_num_seqs=1)
    with running(executor, limits=QueueLimits(max_requests=5)) as engine:
        results: list[str] = []

        def add() -> None:
            try:
                engine.add(RequestSpec("x" * 9, params=SHORT), lambda delta: None)
                results.append("in")
            except RequestError as error:
                results.append(error.code)

        threads = [threading.Thread(target=add) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # One may have left the queue for the only place to run.
        assert results.count("in") in (5, 6)
        assert results.count("queue_full") == 24 - results.count("in")
        executor.open()
        assert engine.drain(30)
        assert not engine.is_full


def test_tokens_are_limited_but_one_request_is_never_too_much() -> None:
    room = WaitingRoom(QueueLimits(max_tokens=100), Clock())
    room.enter("big", 500)
    with pytest.raises(
        RequestError, match="500 prompt tokens wait, the queue takes 100 and this request has 1"
    ):
        room.enter("small", 1)
    room.start("big")
    room.enter("a", 60)
    room.enter("b", 40)
    with pytest.raises(RequestError):
        room.enter("c", 1)
    room.leave("a")
    room.enter("c", 60)
    assert (room.num_requests, room.num_tokens) == (2, 100)
    for name in ("b", "c", "c"):
        room.leave(name)
    assert (room.num_requests, room.num_tokens) == (0, 0)


def test_retry_after_follows_the_rate_at_which_requests_start() -> None:
    clock = Clock()
    room = WaitingRoom(QueueLimits(max_requests=1), clock)
    assert room.retry_after_s() == 1
    for number in range(10):
        room.enter(str(number), 1)
        clock.now += 4.0
        room.start(str(number))
        room.start(str(number))  # again after a preemption: not counted
    assert room.retry_after_s() == 4
    clock.now += 1e6
    assert room.retry_after_s() == 60


def test_an_engine_without_limits_takes_what_comes() -> None:
    assert EngineSettings().limits == QueueLimits(None, None)
    room = WaitingRoom(QueueLimits(), Clock())
    for number in range(5000):
        room.enter(str(number), 1000)
    assert not room.is_full


def wait_for(condition: object) -> None:
    event = threading.Event()
    for _ in range(12_000):
        if condition():  # type: ignore[operator]
            return
        event.wait(0.005)
    raise AssertionError("it did not happen")
