"""Flags and help: every flag means a setting that exists, help fits on a screen, the generated page is up to date."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pagedcli.cli.main import run
from pagedcli.cli.options import MODEL_FLAGS, POOL_FLAGS, SAMPLING_FLAGS, with_flags
from pagedcli.config import EngineConfig
from pagedcli.core.sampling import SamplingParams

FLAGS = (*MODEL_FLAGS, *POOL_FLAGS, *SAMPLING_FLAGS)
ROOT = Path(__file__).parents[2]
NO_SETTINGS = {"tensor_parallel_size"}  # taken or refused by name


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.names[0])
def test_flags_mean_settings_that_exist(flag):
    section, _, name = flag.key.rpartition(".")
    if section == "sampling":
        known = SamplingParams
    elif section:
        known = type(getattr(EngineConfig(), section))
    else:
        known = EngineConfig
    assert flag.key in NO_SETTINGS or name in {field.name for field in dataclasses.fields(known)}


def test_flags_are_declared_once():
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    assert len({flag.key for flag in FLAGS}) == len(FLAGS)


@pytest.mark.parametrize(
    ("typed", "value"), [("--cuda-graphs", True), ("--no-cuda-graphs", False), ("--enforce-eager", False)]
)
def test_graphs_go_by_our_names_and_by_vllms(typed, value):
    app, seen = typer.Typer(), {}
    app.command()(with_flags(MODEL_FLAGS)(lambda flags: seen.update(flags)))
    assert CliRunner().invoke(app, [typed]).exit_code == 0
    assert seen["device.cuda_graphs"].value is value


@pytest.mark.parametrize("command", [(), ("generate",), ("doctor",)])
def test_help_is_at_most_a_screen(command, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*command, "--help"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) <= 54
    assert max(map(len, lines)) <= 100


def test_help_shows_each_option_in_one_line(capfd):
    run(["generate", "--help"])
    out = capfd.readouterr().out
    shown = [flag for flag in FLAGS if not flag.hidden]
    for flag in shown:
        assert sum(flag.help in line for line in out.splitlines()) == 1, flag.names
    assert "--block-size" not in out
    assert "--no-prefix-caching" in out


@pytest.mark.parametrize(("command", "usage"), [("doctor", "[MODEL]"), ("generate", "[FILE|-]")])
def test_usage_puts_one_pair_of_brackets_around_what_may_be_left_out(command, usage, capfd):
    run([command, "--help"])
    assert capfd.readouterr().out.splitlines()[0] == f"Usage: paged {command} [OPTIONS] {usage}"


def test_no_command_shows_help_and_is_a_mistake(capfd):
    assert run([]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "generate" in err


def test_version(capfd):
    assert run(["--version"]) == 0
    assert capfd.readouterr().out.startswith("paged ")


def test_unknown_command_is_one_line_with_a_suggestion(capfd):
    assert run(["genrate"]) == 2
    err = capfd.readouterr().err
    assert "Did you mean 'generate'?" in err
    assert err.count("\n") == 1


def test_generated_page_is_up_to_date():
    check = [sys.executable, "tools/cli_docs.py", "--check"]
    result = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
