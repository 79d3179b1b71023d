"""The display of a benchmark: what it says on a terminal of 80 columns, and in a log."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from pagedcli.cli.bench_live import (
    BenchLive,
    BenchView,
    Latencies,
    milliseconds,
    plain_bench_line,
    render_bench,
)
from pagedcli.cli.console import Messages
from pagedcli.cli.display import CACHED, FREE, SHARED, USED
from tests.bench.scripted import request, run_scripted
from tests.fakes import fake_engine


@pytest.fixture
def view() -> BenchView:
    engine = fake_engine()
    stats = engine.stats()
    engine.close()
    latencies = Latencies()
    for item in run_scripted([request("a", 10, 3), request("b", 20, 5)]).requests:
        latencies.add(item)
    blocks = bytes([USED] * 30 + [SHARED] * 10 + [CACHED] * 20 + [FREE] * 40)
    return BenchView(
        "m · bfloat16 · cpu", "round 2, setting 1 of 4: page size 8, threads 2", 32, 8, 1, 0.25, 3.0, 9.0,
        "all rounds: ETA 1:20", latencies.text(), stats, blocks, "needs 3 pages, 1 is free",
    )  # fmt: skip


def _lines(view: BenchView, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(render_bench(view, width))
    return file.getvalue().splitlines()


def test_progress_percentiles_and_the_map_are_shown(view: BenchView) -> None:
    shown = "\n".join(_lines(view, 120))
    for part in (
        "round 2, setting 1 of 4: page size 8, threads 2", "25%", "8/32 requests", "1 failed", "ETA 0:09",
        "all rounds: ETA 1:20", "TTFT p50 130 ms, p99 130 ms", "TPOT p50 102 ms", "ITL p50 102 ms",
        "█" * 30, "in use 30", "shared 10", "cached 20", "free 40",
    ):  # fmt: skip
        assert part in shown, part


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(view: BenchView, width: int) -> None:
    assert max(map(len, _lines(view, width))) <= width


def test_a_log_has_the_same_in_a_line(view: BenchView) -> None:
    line = plain_bench_line(view)
    assert "\n" not in line
    for part in ("round 2", "8/32 requests", "1 failed", "TTFT p50 130 ms", "ETA 0:09"):
        assert part in line


def test_times_are_written_in_the_unit_that_reads_best() -> None:
    assert [milliseconds(value) for value in (0.00123, 0.0456, 0.5, 2.345)] == [
        "1.2 ms",
        "46 ms",
        "500 ms",
        "2.35 s",
    ]


@dataclass
class _Terminal:
    is_terminal: bool = False
    width: int = 100
    said: list[str] = field(default_factory=list)

    def print(self, text: str, **style: Any) -> None:
        self.said.append(text)


def test_without_a_terminal_a_run_gives_lines_and_none_when_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedcli.cli.bench_live.PLAIN_SECONDS", 0.02)
    for quiet in (False, True):
        console = _Terminal()
        messages = Messages(console, quiet=quiet)  # type: ignore[arg-type]
        engine = fake_engine()
        with BenchLive("m", messages) as live:
            live.set_phase("round 1")
            live.started(engine, [request("a", 10, 3)])
            live.answered(run_scripted([request("a", 10, 3)]).requests[0])
            _wait_for(lambda console=console, quiet=quiet: quiet or bool(console.said))  # type: ignore[misc]
            live.ended()
        engine.close()
        assert bool(console.said) is not quiet
        if not quiet:
            assert console.said[0].startswith("round 1: 1/1 requests")


def _wait_for(condition: Any) -> None:
    import time

    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_answers_after_the_end_of_a_run_are_not_counted() -> None:
    live = BenchLive("m", Messages(SimpleNamespace(is_terminal=False)))  # type: ignore[arg-type]
    live.answered(run_scripted([request("a", 10, 3)]).requests[0])
    assert live._view() is None
