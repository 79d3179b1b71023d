"""`paged doctor`: what it says of this machine, and its judgement of models."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import version

import pytest

from pagedcli.cli.doctor_run import read_processor
from pagedcli.cli.main import run
from pagedcli.runtime.cgroups import ControlGroups

X86 = """processor : 0
model name : Some CPU @ 2.0GHz
flags : fpu sse4_2 avx2 avx512_vnni amx_tile unknown_thing

processor : 1
model name : Some other CPU
flags : fpu
"""
ARM = "processor : 0\nFeatures : fp asimd asimddp i8mm\n"


def test_processor_of_an_x86_and_an_arm_machine(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(X86)
    found = read_processor(path)
    assert found.name == "Some CPU @ 2.0GHz"
    assert found.instruction_sets == ("sse4_2", "avx2", "avx512_vnni", "amx_tile")
    path.write_text(ARM)
    assert read_processor(path).instruction_sets == ("asimd", "asimddp", "i8mm")
    assert read_processor(tmp_path / "none").instruction_sets == ()


def test_machine_report_goes_to_stdout(capfd):
    assert run(["doctor"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    for words in (platform.python_version(), "instruction sets", "physical", "attention"):
        assert words in out
    for package in ("pagedcli", "torch", "tokenizers", "transformers"):
        assert re.search(rf"^ +{package} +{re.escape(version(package))} *$", out, re.MULTILINE)
    for pattern in (
        r"CPU quota +(none|[\d.]+ CPUs)",
        r"in the machine +[\d.]+ [GM]iB",
        r"free for us +[\d.]+ [GM]iB",
        r"--device +(cpu|cuda) ",
        r"--threads +\d+ |--gpu-memory-utilization +0\.9",
        r"--kv-memory +\d+MiB |--gpu-memory-utilization",
    ):
        assert re.search(pattern, out), pattern


def test_quota_and_memory_of_a_container_are_told(capfd, monkeypatch):
    monkeypatch.setattr(ControlGroups, "cpu_quota", lambda self: 1.5)
    monkeypatch.setattr(ControlGroups, "free_memory", lambda self: 300 << 20)
    assert run(["doctor"]) == 0
    out = capfd.readouterr().out
    assert re.search(r"CPU quota +1.5 CPUs", out)
    assert re.search(r"free for us +300(\.0)? MiB", out)
    assert re.search(r"container limit +300(\.0)? MiB left", out)


@pytest.mark.parametrize("command", [["doctor"], ["--version"], ["--help"]])
def test_a_full_disk_behind_stdout_is_one_line(command):
    code = "from pagedcli.cli.main import main; main()"
    with open("/dev/full", "w") as full:  # noqa: PTH123
        call = [sys.executable, "-c", code, *command]
        done = subprocess.run(call, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "paged: cannot write: No space left on device\n"


def test_sizes_are_in_the_units_of_the_error_messages(capfd, tiny_checkpoint):
    assert run(["doctor", str(tiny_checkpoint("llama"))]) == 0
    out = capfd.readouterr().out
    assert "KiB" in out
    assert not re.search(r"\b[kM]B\b", out)


def test_a_good_model(capfd, tiny_checkpoint):
    folder = tiny_checkpoint("llama")
    assert run(["doctor", str(folder)]) == 0
    out = capfd.readouterr().out
    assert str(folder) in out
    assert "LlamaForCausalLM" in out
    assert out.rstrip().endswith("can be used")


def test_a_good_gguf_file(capfd, tiny_gguf):
    file = tiny_gguf("llama")
    assert run(["doctor", str(file)]) == 0
    out = capfd.readouterr().out
    assert str(file) in out
    assert out.rstrip().endswith("can be used")


def test_an_unknown_family_is_refused_with_exit_code_2(capfd, tiny_checkpoint, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    assert run(["doctor", str(folder)]) == 2
    out = capfd.readouterr().out
    assert "MambaForCausalLM" in out
    assert "LlamaForCausalLM" in out
    assert out.rstrip().endswith("cannot be used")


def test_a_model_that_is_not_there(capfd):
    assert run(["doctor", "no/such/model/folder"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
