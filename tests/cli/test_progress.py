"""When a run will have ended, and what tells a user at a terminal that it is not stuck."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pagedcli.cli.console import Messages
from pagedcli.cli.display import View, render
from pagedcli.cli.progress import Progress, expected_seconds
from tests.fakes import fake_engine


def test_rows_that_run_together_end_together():
    # 60 rows of 20 tokens run together and one of them has ended, after 10 s in which each made its 20 tokens.
    progress = Progress(total=61, answered=1, generated_tokens=20)
    left = expected_seconds(progress, 20 * 60 + 20, 10.0)
    assert left is not None
    assert left < 1.0, "not 600 s, as one row in 10 s would have it"


@pytest.mark.parametrize("served", [10, 40, 90])
def test_rows_one_after_the_other_have_the_pace_of_rows(served):
    progress = Progress(total=100, answered=served, generated_tokens=served * 7)
    assert expected_seconds(progress, served * 7, served * 2.0) == pytest.approx((100 - served) * 2.0)


def test_rows_of_an_earlier_run_and_failed_ones_have_no_pace():
    progress = Progress(total=100, before=50, answered=10, failed=20, generated_tokens=70)
    assert expected_seconds(progress, 70, 30.0) == pytest.approx(20 * 3.0)


@pytest.mark.parametrize(
    "progress", [Progress(), Progress(total=9), Progress(answered=3), Progress(9, failed=2)]
)
def test_nothing_is_expected_before_anything_is_known(progress):
    assert expected_seconds(progress, 5, 1.0) is None


def test_a_big_pool_is_told_within_80_columns():
    engine = fake_engine()
    stats = engine.stats()
    engine.close()
    blocks = bytes([2] * 1234 + [3] * 567 + [1] * 8901 + [0] * 12345)
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    console.print(render(View("title", Progress(), stats, blocks, 1.0, None), 80))
    legend = console.file.getvalue().splitlines()[-1]
    assert legend.strip().endswith("free 12,345  109 a cell")


@pytest.mark.parametrize(
    ("is_terminal", "quiet", "shown"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_loading_is_told_on_a_terminal(is_terminal, quiet, shown):
    file = io.StringIO()
    messages = Messages(Console(file=file, force_terminal=is_terminal, width=80), quiet=quiet)
    with messages.waiting("loading the model"):
        pass
    assert ("loading the model" in file.getvalue()) == shown
