"""From the engine's thread to an event loop: whole steps, in order, nothing lost, what is left is aborted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from unittest import mock

from pagedcli.core.sampling import SamplingParams
from pagedcli.engine.client import EngineThread
from pagedcli.engine.handover import DeltaStream, Handover
from pagedcli.engine.outputs import Delta
from pagedcli.engine.prompt import RequestSpec
from tests.cpu.test_engine_client import GatedExecutor
from tests.fakes import FakeExecutor, fake_engine

PARAMS = SamplingParams(max_tokens=30)


@contextlib.contextmanager
def running(executor: FakeExecutor) -> Iterator[EngineThread]:
    engine = fake_engine(executor)
    try:
        yield engine
    finally:
        engine.close()


async def opened(engine: EngineThread, handover: Handover, prompt: str) -> DeltaStream:
    stream = DeltaStream(engine, handover)
    await stream.start(RequestSpec(prompt, params=PARAMS))
    return stream


async def whole(stream: DeltaStream) -> list[Delta]:
    return [delta async for deltas in stream for delta in deltas]


def test_streams_get_all_deltas_in_order_with_one_wake_up_a_turn() -> None:
    executor = FakeExecutor(max_num_seqs=8, threaded=True, step_seconds=0.002)

    async def run(engine: EngineThread) -> None:
        handover = Handover(engine)
        calls = 0
        original = handover.loop.call_soon_threadsafe

        def counted(callback: object, *args: object) -> object:
            nonlocal calls
            calls += getattr(callback, "__name__", "") == "_deliver"
            return original(callback, *args)  # type: ignore[arg-type]

        with mock.patch.object(handover.loop, "call_soon_threadsafe", counted):
            streams = [await opened(engine, handover, f"prompt {number}") for number in range(8)]
            answers = await asyncio.gather(*(whole(stream) for stream in streams))
        for deltas in answers:
            output = deltas[-1].output
            assert output is not None
            assert output.error is None
            assert "".join(delta.text for delta in deltas) == output.text
            assert len(deltas) == 30
            assert all(delta.output is None for delta in deltas[:-1])
        assert calls <= len(executor.plans) + 8 + 2
        assert await streams[0].next() == []

    with running(executor) as engine:
        asyncio.run(run(engine))


def test_a_stream_that_is_left_aborts_and_its_pages_are_free() -> None:
    executor = GatedExecutor(threaded=True)

    async def run(engine: EngineThread) -> None:
        handover = Handover(engine)
        async with await opened(engine, handover, "p" * 40) as stream:
            executor.gate.release(3)
            assert await stream.next()
            assert await stream.next(timeout_s=0.01) in ([], mock.ANY)
        executor.open()
        await asyncio.to_thread(engine.drain, 10)
        assert engine.snapshot().counts.used == 0
        assert engine.stats().requests_aborted == 1
        assert len(executor.plans) <= 7

    with running(executor) as engine:
        asyncio.run(run(engine))


def test_time_runs_out_without_harm() -> None:
    executor = GatedExecutor(threaded=True)

    async def run(engine: EngineThread) -> None:
        stream = await opened(engine, Handover(engine), "hello")
        assert await stream.next(timeout_s=0.02) == []
        assert not stream.is_over
        executor.open()
        assert len(await whole(stream)) == 30
        assert stream.is_over

    with running(executor) as engine:
        asyncio.run(run(engine))


def test_a_closed_loop_costs_its_own_requests_only() -> None:
    executor = GatedExecutor(threaded=True)

    async def leave(engine: EngineThread) -> None:
        await opened(engine, Handover(engine), "left alone")

    async def stay(engine: EngineThread) -> None:
        assert len(await whole(await opened(engine, Handover(engine), "served"))) == 30

    with running(executor) as engine:
        asyncio.run(leave(engine))
        executor.open()
        asyncio.run(stay(engine))
        assert engine.drain(10)
        assert engine.stats().requests_aborted == 1
