"""The program that measures the machine, compiled for the least processors and run for a moment."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from pagedcli.bench.machine import SOURCE, MachineRates

FEW = ["-O3", "-DROUNDS=20000", "-pthread"]


def rates(tmp_path: Path, compiler: str, *options: str, runner: tuple[str, ...] = ()) -> MachineRates:
    program = tmp_path / "machine"
    subprocess.run([compiler, *FEW, "-Werror", *options, str(SOURCE), "-o", str(program)], check=True)
    done = subprocess.run([*runner, str(program), "2", "4"], check=True, capture_output=True, timeout=100)
    return MachineRates(**json.loads(done.stdout))


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="another kind of processor")
def test_a_processor_without_wide_registers_has_a_rate(tmp_path: Path) -> None:
    found = rates(tmp_path, "gcc")
    assert found.threads == 2
    assert found.read_bytes_per_s > 1e8
    assert found.flops_per_s("bfloat16", "portable") == found.f32_flops_per_s > 1e8
    assert found.f32_wide_flops_per_s == found.bf16_tile_flops_per_s == 0


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="there is no compiler for Arm")
@pytest.mark.skipif(shutil.which("qemu-aarch64-static") is None, reason="there is no emulator for Arm")
@pytest.mark.parametrize(("march", "has_dots"), [("armv8-a", False), ("armv8.6-a", True)])
def test_arm_has_a_rate_and_one_of_dots_where_it_has_dots(tmp_path: Path, march: str, has_dots: bool) -> None:
    options = ("-static", f"-march={march}")
    runner = ("qemu-aarch64-static", "-cpu", "max")
    found = rates(tmp_path, "aarch64-linux-gnu-gcc", *options, runner=runner)
    assert found.flops_per_s("float32", "neon") == found.f32_flops_per_s > 0
    assert (found.bf16_dot_flops_per_s > 0) == has_dots
    text = subprocess.run(
        ["aarch64-linux-gnu-gcc", *FEW, f"-march={march}", "-S", str(SOURCE), "-o", "-"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert text.count("\tfmla\t") >= 12
    assert (text.count("\tbfdot\t") >= 12) == has_dots
