"""The benchmark of the server runs against a real one; what it says of other servers, and of those that fail."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from pagedcli.bench import serving
from pagedcli.bench.latency import Distribution, LoadReport
from pagedcli.bench.server_process import ServerCommand, ServerError, ServerProcess, free_port
from pagedcli.bench.serving import Pair, RateRow, overhead_table, rates_table
from pagedcli.errors import ConfigError
from tests.conftest import MakeModel


def test_it_measures_a_real_server(
    tiny_checkpoint: MakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serving, "VOCAB", 300)
    file = tmp_path / "figures.json"
    serving.main(
        model=str(tiny_checkpoint("llama")),
        rounds=1,
        rate=[20.0],
        seconds=0.5,
        peer=[f"broken={sys.executable} -c pass {{port}}"],
        json_file=file,
    )
    figures = json.loads(file.read_text())
    [pair] = figures["overhead"]["rounds"]
    assert pair["serve"] > 0
    assert pair["ratio"] == pair["serve"] / pair["generate"] == figures["overhead"]["ratio"]
    [row] = figures["rates"]
    assert (row["server"], row["requests"], row["failed"]) == ("paged", 10, 0)
    assert row["itl_s"]["p99"] >= row["itl_s"]["p50"] >= 0
    assert row["ttft_s"]["p50"] > 0
    said = capsys.readouterr().out
    assert "broken: left out: broken has ended" in said


def test_tables_say_what_was_measured() -> None:
    same = Distribution(0.1, 0.1, 0.2, 0.3)
    report = LoadReport(10, 1, {"429": 1}, 2.0, 100, 90, same, same, same, same)
    console = Console(file=io.StringIO(), width=140)
    console.print(overhead_table([Pair(95.0, 100.0), Pair(90.0, 100.0), Pair(92.0, 100.0)]))
    console.print(rates_table([RateRow("one", 2.0, report)]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0.920" in text
    assert "one" in text
    assert "300" in text


def test_a_command_without_a_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="NAME=COMMAND"):
        ServerCommand.parse("llama-server -m x")
    assert ServerCommand.parse("x=serve 'a b' {port}") == ServerCommand("x", ("serve", "a b", "{port}"))


def test_a_server_that_is_not_ready_in_time_is_stopped() -> None:
    sleeper = ServerCommand("sleeper", (sys.executable, "-c", "import time; time.sleep(60)", "{port}"))
    with pytest.raises(ServerError, match="not ready within"), ServerProcess(sleeper, timeout_s=0.1):
        pass
    with (
        pytest.raises(ServerError, match="cannot be started"),
        ServerProcess(ServerCommand("x", ("/no/such",))),
    ):
        pass
    assert free_port() > 0
