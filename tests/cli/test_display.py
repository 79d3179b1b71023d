"""The live display as text, without terminal and clock; the meter and the estimate behind the summary."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from pagedcli.cli.console import Messages, make_messages
from pagedcli.cli.display import (
    CACHED,
    FREE,
    SHARED,
    USED,
    View,
    block_codes,
    cell_states,
    duration,
    idle_causes,
    percent,
    plain_line,
    render,
)
from pagedcli.cli.monitor import Monitor
from pagedcli.cli.progress import Progress
from pagedcli.cli.summary import KVEstimate, KVUseMeter, summary_lines
from pagedcli.core.request import FinishReason
from pagedcli.core.sampling import SamplingParams
from pagedcli.core.snapshot import BlockState
from pagedcli.engine.outputs import GapSeconds, RequestOutput, SampleOutput, Seconds, Usage
from pagedcli.engine.prompt import RequestSpec
from pagedcli.errors import ConfigError
from tests.fakes import FakeExecutor, fake_engine

BLOCKS = bytes([USED] * 30 + [SHARED] * 10 + [CACHED] * 20 + [FREE] * 40)


@pytest.fixture
def stats():
    engine = fake_engine()
    found = engine.stats()
    engine.close()
    return replace(
        found,
        num_running=7,
        num_waiting=21,
        num_preemptions=3,
        prompt_tokens=100,
        cached_tokens=25,
        prompt_tokens_per_s=1234.4,
        generated_tokens_per_s=88.6,
        pool_use=0.4,
        kv_use=0.973,
        executor_busy=0.93,
        gap_seconds=GapSeconds(scheduler=3.0, tokenizer=1.0, no_work=0.0),
    )


@pytest.fixture
def view(stats):
    progress = Progress(total=200, before=10, answered=40, failed=2)
    return View("model · cpu", progress, stats, BLOCKS, 61.0, 125.0, "needs 5 pages, 2 are free")


def draw(view, width, **options):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, **options)
    console.print(render(view, width))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_display_fits_and_says_everything_without_colour(view, width):
    text = draw(view, width, no_color=True, color_system=None)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 11
    assert "52/200" in text
    assert "26%" in text
    assert "7 running" in text
    assert "21 waiting" in text
    assert "prompt 1,234   generation 89   prefix hits 25%" in text
    assert "93% busy" in text
    assert "40% of pages in use" in text
    if width >= 80:
        assert "2 failed" in text
        assert "ETA 2:05" in text
        assert "of the idle time: scheduler 75%, tokenizer 25%" in text
        assert "KV use 97%" in text
        assert "█ in use 30  ▓ shared 10  ░ cached 20  · free 40" in text
    if width >= 120:
        assert "needs 5 pages" in text
        assert "3 preemptions" in text


def test_display_uses_colour_where_it_may(view, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32m" in draw(view, 80, color_system="standard")


def test_display_before_anything_is_known(view):
    early = replace(view, progress=Progress(), blocks=b"", eta_s=None)
    text = draw(early, 80, color_system=None)
    assert "ETA" not in text
    assert "rows     0 " in text


def test_map_shows_one_cell_per_page_while_it_fits():
    assert cell_states(BLOCKS, 100) == list(BLOCKS)


def test_map_of_a_large_pool_shows_a_single_page_in_use():
    blocks = bytearray([FREE] * 10_000)
    blocks[5_000] = USED
    states = cell_states(bytes(blocks), 100)
    assert len(states) == 100
    assert states.count(USED) == 1
    assert states[50] == USED


def test_map_cells_take_what_most_of_their_pages_are():
    assert cell_states(bytes([CACHED, CACHED, FREE, FREE, FREE, CACHED]), 2) == [CACHED, FREE]
    assert cell_states(bytes([USED, SHARED, SHARED, FREE, FREE, FREE]), 2) == [SHARED, FREE]


def test_block_codes():
    assert list(block_codes([BlockState.FREE, BlockState.CACHED, BlockState.USED, BlockState.SHARED])) == [
        0,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0%"), (0.001, "<1%"), (0.5, "50%"), (0.999, "99%"), (1.0, "100%"), (0.996, "99%")],
)
def test_percent_says_all_and_nothing_only_where_it_is(value, text):
    assert percent(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61.4, "1:01"), (3723, "1:02:03")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_idle_causes():
    assert idle_causes(GapSeconds()) == ""
    assert idle_causes(GapSeconds(no_work=2.0)) == "no work 100%"


def test_plain_line_is_one_line(view):
    line = plain_line(view)
    assert "\n" not in line
    assert line.startswith("52/200 rows, 2 failed, 7 running, 21 waiting, prompt 1234 tokens/s")
    assert "40% of pages in use, prefix hits 25%, 3 preemptions, " in line
    assert line.endswith("executor 93% busy, ETA 2:05")


def output(prompt_tokens, *lengths):
    samples = tuple(
        SampleOutput(index, "", tuple(range(length)), FinishReason.STOP)
        for index, length in enumerate(lengths)
    )
    usage = Usage(prompt_tokens, sum(lengths), 0)
    return RequestOutput("r", "", (), samples, None, usage, Seconds(0.0, 0.0, 1.0))


def test_contiguous_estimate_is_a_sum_over_steps():
    """Against a plain simulation of what each step stores and blocks."""
    cases = [(10, 5, (3, 5)), (1, 200, (1,)), (50, None, (20,)), (99, 5, (1,)), (7, 0, (0,))]
    estimate = KVEstimate(max_model_len=100)
    stored = by_request = by_longest = 0
    for prompt, max_tokens, lengths in cases:
        estimate.add(SamplingParams(max_tokens=max_tokens, n=len(lengths)), output(prompt, *lengths))
        room = 100 - prompt
        reserved = prompt + (room if max_tokens is None else min(max_tokens, room))
        for length in lengths:
            for step in range(max(1, length)):
                stored += prompt + step
                by_request += reserved
                by_longest += 100
    assert estimate.request_use == stored / by_request
    assert estimate.longest_use == stored / by_longest


def test_meter_weighs_by_slots_and_falls_back_to_the_peak(stats):
    def seen(stored, allocated):
        scheduler = replace(stats.scheduler, stored_tokens=stored, allocated_tokens=allocated)
        return replace(stats, scheduler=scheduler)

    meter = KVUseMeter()
    assert meter.use(stats) is None
    peaks = replace(stats.scheduler, peak_stored_tokens=30, peak_allocated_tokens=40)
    assert meter.use(replace(stats, scheduler=peaks)) == 0.75
    meter.see(seen(0, 0))
    meter.see(seen(90, 100))
    meter.see(seen(1, 16))
    assert meter.use(stats) == 91 / 116


def test_summary(stats):
    estimate = KVEstimate(100, stored=50, by_request=100, by_longest=500)
    progress = Progress(
        10, before=2, answered=7, failed=1, prompt_tokens=70, cached_tokens=7, generated_tokens=30
    )
    text = "\n".join(summary_lines(progress, 3.0, stats, 0.97, estimate, 16))
    assert "8 rows in 3.0 s: 7 answered, 1 failed, 2 done before" in text
    assert "70 prompt tokens (7 from the prefix cache), 30 generated (10.0/s)" in text
    assert "KV use 97.0% of the slots allocated (page 16)" in text
    assert "50.0% (prompt + max_tokens), 10.0% (longest sequence, 100)" in text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_monitor_shows_a_run_and_cleans_up(monkeypatch, is_terminal):
    monkeypatch.setattr("pagedcli.cli.monitor.PLAIN_SECONDS", 0.1)
    monkeypatch.setattr("pagedcli.cli.monitor.SHOW_SECONDS", 0.1)
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=100, soft_wrap=not is_terminal)
    engine = fake_engine(FakeExecutor(step_seconds=0.02, threaded=True))
    progress = Progress(total=1)
    with Monitor(engine, progress, "the title", Messages(console)) as monitor:
        engine.add(RequestSpec(prompt="x" * 40, params=SamplingParams(max_tokens=25)), lambda delta: None)
        engine.drain()
    use = monitor.kv_use()
    engine.close()
    text = file.getvalue()
    assert use is not None
    assert 0.5 < use <= 1.0
    assert "1 running" in text
    if is_terminal:
        assert "the title" in text
        assert "█" in text
        assert text.endswith("\x1b[?25h") or "\x1b[?25h" in text, "the cursor is shown again"
    else:
        assert "\x1b" not in text
        lines = text.splitlines()
        assert 1 <= len(lines) <= 12
        assert all(line.startswith("0/1 rows") for line in lines)


def test_quiet_monitor_does_nothing():
    engine = fake_engine()
    file = io.StringIO()
    with Monitor(engine, Progress(), "title", Messages(Console(file=file), quiet=True)):
        pass
    engine.close()
    assert file.getvalue() == ""


def test_log_level_comes_from_the_environment(monkeypatch, capfd):
    import logging

    monkeypatch.setenv("PAGED_LOG", "debug")
    make_messages(verbose=False, quiet=True)
    logging.getLogger("pagedcli.test").debug("something")
    assert "DEBUG pagedcli.test: something" in capfd.readouterr().err
    monkeypatch.setenv("PAGED_LOG", "loud")
    with pytest.raises(ConfigError, match="PAGED_LOG is 'loud': choose debug"):
        make_messages(verbose=False, quiet=False)


def test_downloads_are_told_once_a_second(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("pagedcli.cli.console.time", SimpleNamespace(monotonic=lambda: now[0]))
    file = io.StringIO()
    messages = Messages(Console(file=file, width=80))
    for done in range(0, 101, 5):
        messages.transfer("model.gguf", done * 1_000_000, 100_000_000)
        now[0] += 0.25
    lines = file.getvalue().splitlines()
    assert 4 <= len(lines) <= 7
    assert all(re.fullmatch(r"model\.gguf: \d+ of 100 MB", line) for line in lines)
