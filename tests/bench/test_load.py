"""The load client against a server with known delays, on a clock that both share: the figures are exact."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from typing import Any

import pytest

from pagedcli.bench.http_reading import Chunks
from pagedcli.bench.latency import Distribution, LoadReport, percentile, summarize
from pagedcli.bench.load import LoadRequest, Target, run_load
from pagedcli.workloads.arrivals import poisson, together
from tests.bench.fake_http import HEAD, USAGE, FakeServer, event, run


async def known_delays(fake: FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    """First token after 1/4 s, then gaps of 1/8, 1/8, 1/2 and 1/8 s, the end 1/16 s later."""
    await fake.send(writer, HEAD)
    at = fake.now + 0.25
    await fake.write(writer, event("a"), at)
    for gap in (0.125, 0.125, 0.5, 0.125):
        at += gap
        await fake.write(writer, event("b"), at)
    at += 0.0625
    last = b'data: {"choices": [], "usage": ' + json.dumps(USAGE).encode() + b"}\n\ndata: [DONE]\n\n"
    await fake.write(writer, last, at)
    await fake.send(writer, b"0\r\n\r\n")


def test_known_delays_give_exactly_the_known_figures() -> None:
    answers = run(known_delays, [LoadRequest({"stream": True})])
    report = summarize(answers)
    assert answers[0].text == "abbbb"
    assert (report.requests, report.failed, report.prompt_tokens, report.output_tokens) == (1, 0, 7, 5)
    assert report.ttft_s == Distribution(0.25, 0.25, 0.25, 0.25)
    assert report.tpot_s.mean == 0.875 / 4
    gaps = [0.125, 0.125, 0.125, 0.5]
    assert report.itl_s.mean == sum(gaps) / 4
    assert report.itl_s.p50 == 0.125
    assert report.itl_s.p90 == pytest.approx(0.125 + 0.7 * 0.375, abs=1e-12)
    assert report.itl_s.p99 == pytest.approx(0.125 + 0.97 * 0.375, abs=1e-12)
    assert report.e2e_s.p50 == 1.1875
    assert report.seconds == 1.1875
    assert report.output_tokens_per_s == 5 / 1.1875


async def by_request(fake: FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    """Fails in the way that it is asked to."""
    kind = body["kind"]
    if kind == "refused":
        await fake.send(writer, b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 9\r\n\r\nqueue full"[:-1])
    elif kind == "cut":
        await fake.send(writer, HEAD)
        await fake.write(writer, event("half"), fake.now + 0.125)
    elif kind == "event":
        await fake.send(writer, HEAD)
        await fake.write(writer, b'data: {"error": {"code": "x"}}\n\ndata: [DONE]\n\n', fake.now)
        await fake.send(writer, b"0\r\n\r\n")
    elif kind == "silent":
        pass
    else:
        await known_delays(fake, writer, body)


def test_failures_are_counted_apart() -> None:
    kinds = ["refused", "cut", "event", "silent"]
    for kind in kinds:
        report = summarize(run(by_request, [LoadRequest({"kind": kind})]))
        assert (report.requests, report.failed, report.output_tokens) == (1, 1, 0), kind
        assert len(report.errors) == 1
        assert math.isnan(report.ttft_s.p50)
    assert summarize(run(by_request, [LoadRequest({"kind": "good"})])).failed == 0


def test_a_request_that_is_too_slow_and_a_server_that_is_not_there_fail() -> None:
    async def never(fake: FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        await asyncio.sleep(0.2)

    answer = run(never, [LoadRequest({})], timeout_s=0.05)[0]
    assert answer.error == "not answered within 0.05 s"
    gone = asyncio.run(run_load(Target("127.0.0.1", 1), [LoadRequest({})]))[0]
    assert gone.error is not None
    assert gone.error.startswith("cannot connect")


def test_requests_are_sent_when_they_are_due_not_when_others_are_answered() -> None:
    arrivals: list[float] = []

    async def note(fake: FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        arrivals.append(fake.now)
        await fake.send(writer, HEAD)
        await fake.write(writer, event("a"), fake.now + 8.0)
        await fake.write(writer, b"data: [DONE]\n\n", fake.now)
        await fake.send(writer, b"0\r\n\r\n")

    answers = run(note, [LoadRequest({}, arrival_s) for arrival_s in (0.0, 1.0, 2.0)])
    assert [answer.error for answer in answers] == [None] * 3
    assert [answer.sent_s - 64.0 for answer in answers] == [0.0, 1.0, 2.0]
    assert arrivals[2] < 64.0 + 8.0


def test_chunks_are_put_together_wherever_they_are_cut() -> None:
    whole = b"5\r\nhello\r\n1;x=y\r\n \r\n10\r\n0123456789abcdef\r\n0\r\n\r\n"
    for size in range(1, len(whole)):
        chunks = Chunks()
        body = b"".join(chunks.feed(whole[start : start + size]) for start in range(0, len(whole), size))
        assert body == b"hello 0123456789abcdef", size
        assert chunks.is_over


def test_percentiles_are_those_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    values = sorted([3.0, 1.5, 9.25, 0.5, 4.0, 4.0, 7.75])
    for share in (0.0, 0.01, 0.5, 0.9, 0.99, 1.0):
        assert percentile(values, share) == pytest.approx(numpy.percentile(values, 100 * share))


def test_arrivals_have_the_rate_and_are_repeatable() -> None:
    times = poisson(4000, 8.0, seed=3)
    assert times == poisson(4000, 8.0, seed=3) != poisson(4000, 8.0, seed=4)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(500, rel=0.06)
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    assert gaps[len(gaps) // 2] == pytest.approx(math.log(2) / 8, rel=0.1)
    assert together(3) == [0.0, 0.0, 0.0]


def test_the_report_is_as_written_down() -> None:
    report = summarize(run(known_delays, [LoadRequest({})]))
    assert isinstance(report, LoadReport)
    shown = report.as_dict()
    assert {"requests", "failed", "throughput", "ttft_s", "tpot_s", "itl_s", "e2e_s"} <= shown.keys()
    assert set(shown["itl_s"]) == {"mean", "p50", "p90", "p99"}
    assert set(shown["throughput"]) == {"requests_per_s", "total_tokens_per_s", "output_tokens_per_s"}
