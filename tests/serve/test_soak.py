"""The server under everything at once, for a while, and with a thousand streams open."""

from __future__ import annotations

import asyncio
import gc
import random
import resource
import time
from collections.abc import Iterator

import psutil
import pytest

from pagedcli.api.build import build_engine
from pagedcli.bench.latency import summarize
from pagedcli.bench.load import LoadRequest, Target, run_load
from pagedcli.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagedcli.engine.admission import QueueLimits
from tests.conftest import MakeModel
from tests.serve.soak import Job, Soak
from tests.serve.support import Served, served

MIB = 1 << 20
STREAMS = 1000
OUTPUTS = 100
"""Tokens of each."""


def config(model: str, *, pages: int, seqs: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=model),
        cache=CacheConfig(num_pages=pages),
        scheduler=SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=256),
        device=DeviceConfig(device="cpu", threads=1),
        seed=1,
    )


def make_jobs(server: Served, count: int) -> list[Job]:
    """Requests of all lengths, greedy and seeded, and their answers when nothing else runs."""
    rng = random.Random(5)
    jobs = []
    for number in range(count):
        body = {
            "prompt": [
                3 + (number * 7 + at * at) % 300 for at in range(rng.choice([1, 15, 16, 17, 40, 120]))
            ],
            "max_tokens": rng.choice([1, 5, 20, 60, 150]),
            "temperature": rng.choice([0.0, 0.9]),
            "seed": number,
            "ignore_eos": rng.random() < 0.5,
        }
        if number % 5 == 0:
            # A prefix that others share.
            body["prompt"] = [9] * 48 + body["prompt"][:30]
        alone = server.complete(**body)
        choice = alone["choices"][0]
        jobs.append(Job(body, choice["text"], choice["finish_reason"], alone["usage"]["completion_tokens"]))
    return jobs


@pytest.mark.timeout(0)
def test_soak(
    tiny_checkpoint: MakeModel, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """64 clients, all lengths, aborts, bad requests, preemptions: nothing goes wrong or is lost (P1-P4, A2, A9)."""
    seconds = float(request.config.getoption("--soak-seconds"))
    engine = build_engine(config(str(tiny_checkpoint("llama")), pages=40, seqs=48), limits=QueueLimits(1024))
    process = psutil.Process()
    sizes: list[tuple[float, int]] = []

    def measure(part: float) -> None:
        gc.collect()
        sizes.append((part, process.memory_info().rss))

    with served(engine) as server:
        # What the harness keeps of every request would look like a leak of the server.
        server.state.on_end = lambda record: None
        soak = Soak(server.address, make_jobs(server, 40), seconds, every=measure)
        asyncio.run(soak.run())
        server.assert_no_block_lost()
        stats = engine.client.stats()
        engine.client._call(engine.client._scheduler.check)
    assert not soak.faults
    assert stats.num_preemptions > 0
    assert stats.requests_aborted > 0
    assert soak.done["refused"] > 0
    assert soak.done["stream"] + soak.done["whole"] > seconds
    assert "internal_error" not in server.errors
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    settled = [size for part, size in sizes if 0.3 <= part <= 0.5]
    last = [size for part, size in sizes if part >= 0.8]
    growth = min(last) - max(settled)
    assert growth < 24 * MIB, f"grew by {growth / MIB:.1f} MiB: {[(round(p, 2), s // MIB) for p, s in sizes]}"


@pytest.fixture
def many_files() -> Iterator[None]:
    """Both ends of every connection are in this process."""
    wanted = 2 * STREAMS + 500
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"a process may open {hard} files here, {wanted} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_thousand_open_streams(tiny_checkpoint: MakeModel) -> None:
    engine = build_engine(
        config(str(tiny_checkpoint("llama")), pages=2000, seqs=256), limits=QueueLimits(max_requests=1024)
    )
    most_open, given_up = 0, time.monotonic() + 60

    def hold() -> None:
        """On the engine's thread: no stream goes on before the last one is open."""
        nonlocal most_open
        while most_open < STREAMS and time.monotonic() < given_up:
            most_open = max(most_open, len(server.state.open))
            time.sleep(0.01)

    with served(engine) as server:
        engine.client.on_turn(hold)
        requests = [
            LoadRequest(
                {
                    "prompt": [3 + (number + at) % 300 for at in range(8)],
                    "max_tokens": OUTPUTS,
                    "ignore_eos": True,
                    "temperature": 0,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            )
            for number in range(STREAMS)
        ]
        answers = asyncio.run(run_load(Target(*server.address), requests))
        server.assert_no_block_lost()
    report = summarize(answers)
    assert (report.failed, report.errors) == (0, {})
    assert report.output_tokens == OUTPUTS * STREAMS
    assert most_open == STREAMS
    by_prompt = {
        str(request.body["prompt"]): answer.text for request, answer in zip(requests, answers, strict=True)
    }
    for request, answer in zip(requests, answers, strict=True):
        assert answer.text == by_prompt[str(request.body["prompt"])]
