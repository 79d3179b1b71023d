"""The live display of a server: what it says, that it fits, and that it comes and goes with the server."""

from __future__ import annotations

import io
import time
from dataclasses import replace

import pytest
from rich.console import Console

from pagedcli.cli.console import Messages
from pagedcli.cli.display import SHARED, USED, ServedView, render_served
from pagedcli.cli.serve_live import ServeMonitor
from pagedcli.core.sampling import SamplingParams
from pagedcli.engine.outputs import GapSeconds
from pagedcli.engine.prompt import RequestSpec
from tests.fakes import FakeExecutor, fake_engine


@pytest.mark.parametrize("width", [60, 120])
def test_it_says_what_is_going_on_and_fits(width: int) -> None:
    engine = fake_engine()
    stats = replace(
        engine.stats(),
        num_running=7,
        num_waiting=21,
        uptime_s=61.0,
        requests_finished={"stop": 30, "length": 4},
        requests_aborted=2,
        requests_rejected={"queue_full": 5},
        executor_busy=0.93,
        gap_seconds=GapSeconds(scheduler=3.0, http=1.0),
    )
    engine.close()
    view = ServedView(
        "model · cpu", "http://x:1/v1", stats, bytes([USED] * 40 + [SHARED] * 9), "needs 5 pages, 2 are free"
    )
    console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True, color_system=None)
    console.print(render_served(view, width))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    assert "http://x:1/v1" in text
    assert "34 answered   2 aborted   5 refused   up 1:01" in text
    assert "7 running   21 waiting" in text
    if width >= 120:
        assert "needs 5 pages, 2 are free" in text
        assert "93% busy   of the idle time: scheduler 75%, http 25%" in text
    assert "in use 40" in text


def test_the_monitor_shows_pages_while_the_engine_works_and_ends_with_it() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, no_color=True)
    shown = console.file.getvalue  # type: ignore[attr-defined]
    engine = fake_engine(FakeExecutor(step_seconds=0.2, threaded=True))
    with ServeMonitor(engine, "title", "address", Messages(console, verbose=False, quiet=False)):
        engine.add(RequestSpec("p" * 60, params=SamplingParams(max_tokens=60)), lambda delta: None)
        ended = time.monotonic() + 60
        while not ("1 running" in shown() and "█" in shown()):
            assert time.monotonic() < ended, shown()
            time.sleep(0.02)
    engine.close()


def test_nothing_is_shown_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=100)
    engine = fake_engine()
    with ServeMonitor(engine, "title", "address", Messages(console, verbose=False, quiet=False)):
        time.sleep(0.3)
    engine.close()
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
