"""The metric test: servers with known delays must give exactly the known latencies, rates and goodput."""

from __future__ import annotations

import asyncio
import math
import statistics
from typing import Any

import pytest

from pagedcli.bench.goodput import Targets
from pagedcli.bench.http_drive import NOT_SENT, LoadState
from pagedcli.bench.http_prompts import PromptForm, words
from pagedcli.bench.http_report import LoadRun
from pagedcli.bench.latency import summarize
from pagedcli.errors import ConfigError
from pagedcli.workloads.requests import WorkloadRequest, chats
from tests.bench.fake_http import START, FakeServer, in_turn, run_workload, steady

numpy = pytest.importorskip("numpy")


def requests(outputs: list[int], *, every_s: float = 0.0) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(f"r{index}", (1, 2, 3), output, output, index * every_s)
        for index, output in enumerate(outputs)
    ]


def figures(state: LoadState, targets: str | None = None) -> dict[str, Any]:
    wanted = Targets.parse(targets) if targets else None
    return LoadRun(state, {}, {}, {}, 0.0, 1.0, targets=wanted).as_dict()


def test_open_loop_gives_exactly_the_known_figures() -> None:
    """Ten requests, one every half second, that overlap; each has its own delays."""
    delays = [((index + 1) / 16, (index % 4 + 1) / 32) for index in range(10)]
    outputs = [3 + index for index in range(10)]
    state, fake = run_workload(in_turn([steady(*delay) for delay in delays]), requests(outputs, every_s=0.5))
    assert fake.arrivals == [index * 0.5 for index in range(10)]
    shown = figures(state, "ttft:250ms,tpot:100ms")
    ttft = [first for first, _ in delays]
    tpot = [gap for _, gap in delays]
    itl = [gap for (_, gap), num in zip(delays, outputs, strict=True) for _ in range(num - 1)]
    e2e = [first + gap * (num - 1) for (first, gap), num in zip(delays, outputs, strict=True)]
    for name, values in (("ttft_s", ttft), ("tpot_s", tpot), ("itl_s", itl), ("e2e_s", e2e)):
        assert shown[name]["mean"] == math.fsum(values) / len(values), name
        assert shown[name]["p50"] == statistics.median(values), name
        for share in (90, 99):
            assert shown[name][f"p{share}"] == pytest.approx(numpy.percentile(values, share), rel=1e-15), name
    ends = [index * 0.5 + end for index, end in enumerate(e2e)]
    assert (shown["requests"], shown["failed"], shown["seconds"]) == (10, 0, max(ends))
    assert shown["throughput"]["output_tokens_per_s"] == sum(outputs) / max(ends)
    assert shown["throughput"]["total_tokens_per_s"] == (sum(outputs) + 30) / max(ends)
    good = [first <= 0.25 and gap <= 0.1 for first, gap in delays]
    assert shown["goodput"]["good"] == sum(good) == 3
    assert shown["goodput"]["share"] == 0.3
    assert shown["goodput"]["requests_per_s"] == 3 / max(ends)
    assert shown["goodput"]["targets"] == {"ttft_s": 0.25, "tpot_s": 0.1}
    assert max(count for _, count in state.in_flight) > 1


def test_a_closed_loop_keeps_so_many_and_no_more() -> None:
    state, fake = run_workload(steady(0.25, 0.125), requests([3] * 6), concurrency=2)
    assert fake.arrivals == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    assert max(count for _, count in state.in_flight) == 2
    shown = figures(state)
    assert shown["e2e_s"]["p99"] == 0.5
    assert shown["seconds"] == 1.5
    assert shown["throughput"]["requests_per_s"] == 6 / 1.5


def test_latencies_count_from_when_a_request_was_due_not_from_when_it_was_sent() -> None:
    """The client is held up for a second before the second request: that is no gift to the server."""

    async def held_up(fake: FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        fake.now += 1.0  # the whole world stands still, the client with it
        await steady(0.25, 0.125)(fake, writer, body)

    state, _ = run_workload(in_turn([held_up, steady(0.25, 0.125)]), requests([2, 2], every_s=0.5))
    late = state.answers[-1] if state.answers[-1].id == "r1" else state.answers[0]
    assert (late.start_s - START, late.sent_s - START, late.late_s) == (0.5, 1.0, 0.5)
    assert late.ttft_s == 0.75
    shown = figures(state)
    assert shown["client"]["late_requests"] == 1
    assert shown["client"]["late_s"]["max"] == 0.5
    assert "sent 1 of the requests more than 10 ms late" in shown["notes"][0]


@pytest.mark.parametrize("form", [PromptForm.CHAT, PromptForm.TEXT])
def test_each_turn_of_a_chat_carries_the_answers_before_it(form: PromptForm) -> None:
    workload = chats(4, seed=1, vocab_size=500, turns=2, prompt_tokens=(3, 5), output_tokens=(2, 2))
    state, fake = run_workload(steady(0.25, 0.25), workload, form=form)
    assert [answer.error for answer in state.answers] == [None] * 4
    assert fake.arrivals == [0.0, 0.0, 0.5, 0.5]
    first, second = (
        words(workload[0].prompt_token_ids),
        words(workload[1].prompt_token_ids[-workload[1].new_tokens :]),
    )
    sent = fake.bodies[2] if first in str(fake.bodies[2]) else fake.bodies[3]
    if form is PromptForm.CHAT:
        assert sent["messages"] == [
            {"role": "user", "content": first},
            {"role": "assistant", "content": "t0 t1 "},
            {"role": "user", "content": second},
        ]
    else:
        assert sent["prompt"] == f"{first}t0 t1  {second}"


def test_turns_after_a_failure_are_not_sent_and_count_as_failed() -> None:
    async def refuse(fake: FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        await fake.send(writer, b"HTTP/1.1 500 Oops\r\nContent-Length: 2\r\n\r\nno")

    workload = chats(3, seed=1, vocab_size=500, turns=3, prompt_tokens=(3, 5), output_tokens=(2, 2))
    state, fake = run_workload(refuse, workload, form=PromptForm.TEXT)
    assert len(fake.bodies) == 1
    shown = figures(state, "ttft:1s")
    assert (shown["requests"], shown["failed"], shown["unfinished"]) == (3, 3, 0)
    assert shown["errors"] == {"500: no": 1, NOT_SENT: 2}
    assert (shown["goodput"]["share"], shown["ttft_s"]["p50"]) == (0.0, None)


def test_thinking_time_is_kept() -> None:
    first = WorkloadRequest("a", (1,), 2, 2)
    then = WorkloadRequest("b", (1, 2), 2, 2, follows="a", new_tokens=1, think_s=0.75)
    _, fake = run_workload(steady(0.25, 0.25), [first, then], form=PromptForm.TEXT)
    assert fake.arrivals == [0.0, 0.5 + 0.75]


def test_failures_change_no_distribution() -> None:
    async def cut(fake: FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        await fake.sleep(8.0)

    good, _ = run_workload(steady(0.25, 0.125), requests([3, 3]))
    mixed, _ = run_workload(in_turn([steady(0.25, 0.125), cut, steady(0.25, 0.125)]), requests([3, 3, 3]))
    alone, beside = figures(good), figures(mixed)
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert alone[name] == beside[name]
    assert (beside["requests"], beside["failed"]) == (3, 1)


def test_targets_are_read_or_refused_by_name() -> None:
    assert Targets.parse("ttft:500ms, tpot:50ms,itl:2s,e2e:10").wanted() == {
        "ttft_s": 0.5,
        "tpot_s": 0.05,
        "itl_s": 2.0,
        "e2e_s": 10.0,
    }
    for text in (
        "",
        "ttft",
        "ttft:",
        "ttft:0ms",
        "ttft:-1s",
        "x:1s",
        "ttft:1s,ttft:2s",
        "e2e:inf",
        "tpot:1h",
    ):
        with pytest.raises(ConfigError, match="--goodput"):
            Targets.parse(text)


def test_a_run_without_an_answer_has_no_figures_and_no_nan() -> None:
    shown = figures(LoadState(3), "ttft:1s")
    assert (shown["requests"], shown["unfinished"], shown["ttft_s"]["mean"]) == (0, 3, None)
    assert shown["throughput"]["requests_per_s"] == 0
    assert summarize([]).seconds == 0
