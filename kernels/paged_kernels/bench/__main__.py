"""Times programs of real models' shapes, whole and kernel by kernel, beside what the machine can do.

    python -m paged_kernels.bench [--shape smollm2-135m] [--dtype bfloat16] [--isa amx] [--threads 2] [--json FILE]
    python -m paged_kernels.bench --bits 4 [--group-size 64] [--activation int8]      quantized linears

The limits come from kernels/bench/machine.c, compiled and run first where that is possible (a checkout, a C compiler);
without them only rates are shown. A step's time is the best of many: other load can only add to it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paged_kernels.bench.shapes import SHAPES, STEPS, Shape, Step, Weights, record
from paged_kernels.native import Program, Runtime

MACHINE = Path(__file__).parents[2] / "bench" / "machine.c"


def measure_limits(threads: int) -> dict[str, float]:
    """What machine.c prints, or nothing without a compiler."""
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None or not MACHINE.is_file():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "machine")
        subprocess.run(
            [compiler, "-O3", "-march=native", "-pthread", str(MACHINE), "-o", program], check=True
        )
        done = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True)
    limits: dict[str, float] = json.loads(done.stdout)
    return limits


def best_seconds(run: Callable[[], object], seconds: float) -> float:
    """The least time of a call, tried for some seconds and at least three times."""
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def kernel_seconds(program: Program, step: list[Any], tries: int) -> dict[str, float]:
    """Seconds of all calls of each kernel, each call's best of some tries."""
    runs = [program.time_calls(*step) for _ in range(tries)]
    totals: dict[str, float] = defaultdict(float)
    for calls in zip(*runs, strict=True):
        totals[calls[0][0]] += min(seconds for _, seconds in calls)
    return dict(totals)


def flops_limit(limits: dict[str, float], isa: str, dtype: str) -> float:
    """Operations per second of the fastest instructions that a variant may use; 0 if not known."""
    names = {"avx2": ["f32_flops_per_s"]}.get(isa, ["f32_flops_per_s", "f32_wide_flops_per_s"])
    if dtype == "bfloat16" and isa in ("avx512bf16", "amx"):
        names.append("bf16_dot_flops_per_s")
    if dtype == "bfloat16" and isa == "amx":
        names.append("bf16_tile_flops_per_s")
    return max((limits.get(name, 0.0) for name in names), default=0.0)


def measure(
    program: Program, shape: Shape, weights: Weights, step: Step, limits: dict[str, float], seconds: float
) -> dict[str, Any]:
    """One row of the table."""
    dtype = program.dtype
    arrays = step.arrays(shape.vocab_size)
    took = best_seconds(lambda: program.run(*arrays), seconds)
    flops, moved = step.flops(shape), step.bytes(shape, dtype, weights)
    row: dict[str, Any] = {
        "step": step.name,
        "ms": took * 1e3,
        "tokens_per_s": step.num_tokens / took,
        "gb_per_s": moved / took / 1e9,
        "gflop_per_s": flops / took / 1e9,
        "kernels_ms": {name: value * 1e3 for name, value in kernel_seconds(program, arrays, 5).items()},
    }
    rate = flops_limit(limits, program.runtime.isa, dtype)
    if rate and limits.get("read_bytes_per_s"):
        least = max(flops / rate, moved / limits["read_bytes_per_s"])
        row["share"] = least / took
    return row


def show(row: dict[str, Any]) -> None:
    """A row of the table on standard output."""
    share = f"{row['share']:6.0%}" if "share" in row else "     -"
    kernels = " ".join(f"{name} {value:.2f}" for name, value in row["kernels_ms"].items() if value >= 0.01)
    print(  # noqa: T201 - a table is what this command is for
        f"{row['step']:14s} {row['ms']:9.2f} ms {row['tokens_per_s']:9.0f} tokens/s {row['gb_per_s']:7.1f} GB/s "
        f"{row['gflop_per_s']:8.0f} GFLOP/s {share}   {kernels}"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m paged_kernels.bench", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--isa", default="")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bits", type=int, choices=[4, 8], help="quantize the layers' linears")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--activation", choices=["int8", "bfloat16", "float32"], default="int8")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    limits = measure_limits(options.threads)
    cpus = sorted(os.sched_getaffinity(0))[: options.threads]
    runtime, shape = Runtime(options.threads, cpus=cpus, isa=options.isa), SHAPES[options.shape]
    runtime.bind_caller()
    weights = Weights(options.bits, options.group_size, options.activation)
    program = record(runtime, shape, options.dtype, STEPS, weights)
    rows = [measure(program, shape, weights, step, limits, options.seconds) for step in STEPS]
    print(  # noqa: T201
        f"{options.shape} {options.dtype} {weights} {runtime.isa}, {options.threads} threads; limits {limits}"
    )
    for row in rows:
        show(row)
    if options.json:
        options.json.write_text(
            json.dumps({"options": vars(options) | {"json": None}, "limits": limits, "rows": rows})
        )


if __name__ == "__main__":
    main()
