"""A process that opens cases and times them on demand: `python -m paged_kernels.bench.worker OPTIONS`.

Who asks runs several of them, one after the other in turns, so that what is compared ran in the same seconds. A
request is a line of JSON on stdin, its answer a line on stdout:

    {"open": {...}, "variant": "amx"}      {"error": 0.1, "op": "linear"}, or {"unavailable": "why"}; over 1 is wrong
    {"time": 0.02, "variant": "amx"}       {"seconds": 0.001, "ops": 12}: of one op, the median over 0.02 s
    {"close": true}                        {"closed": true}

On its start it says {"variants": [...], "cold_bytes": N, "about": "..."}.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

from paged_kernels.bench.cases import FORMATS, Case, Opened, UnavailableError
from paged_kernels.bench.data import cold_target_bytes

Measure = Callable[[], tuple[float, int]]


class Runner(Protocol):
    """`NativeRunner` or `TorchRunner`."""

    @property
    def variants(self) -> tuple[str, ...]:
        """What it can run."""

    def open(self, case: Case, variant: str) -> Opened:
        """Make a case ready."""


def case_from(values: dict[str, Any]) -> Case:
    """A case as `dataclasses.asdict` wrote it, its format by name."""
    lists = {name: tuple(values[name]) for name in ("families", "heads")}
    return Case(**{**values, **lists, "format": FORMATS[values["format"]["name"]]})


class Worker:
    """Answers requests.

    Args:
        runner: Opens cases.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._case: Case | None = None
        self._open: dict[str, Measure] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """To one request."""
        if "open" in request:
            return self._answer_open(case_from(request["open"]), request["variant"])
        if "time" in request:
            return self._answer_time(self._open[request["variant"]], request["time"])
        self._open.clear()
        return {"closed": True}

    def _answer_open(self, case: Case, variant: str) -> dict[str, Any]:
        if case != self._case:
            self._open.clear()
            self._case = case
        try:
            opened = self._runner.open(case, variant)
        except UnavailableError as reason:
            return {"unavailable": str(reason)}
        self._open[variant] = opened.measure
        return {"error": opened.error, "op": opened.op}

    @staticmethod
    def _answer_time(measure: Measure, at_least: float) -> dict[str, Any]:
        """The median of some measurements; the first after a pause is left out, unless it takes all the time."""
        end = time.perf_counter() + at_least
        first = measure()
        found = [] if time.perf_counter() < end else [first]
        while not found or time.perf_counter() < end:
            found.append(measure())
        return {
            "seconds": statistics.median(seconds / ops for seconds, ops in found),
            "ops": sum(ops for _, ops in found),
        }


def _runner(options: argparse.Namespace, cold_bytes: int) -> tuple[Runner, str]:
    if options.kind == "native":
        from paged_kernels.bench.native_runner import NativeRunner

        cpus = [int(cpu) for cpu in options.cpus.split(",") if cpu]
        return NativeRunner(options.threads, cpus, cold_bytes), "native kernels"
    import torch

    if options.library:
        from paged_kernels import cuda_abi
        from paged_kernels.bench.cuda_runner import CudaRunner

        library = cuda_abi.load(Path(options.library))
        runner = CudaRunner(options.threads, options.device, cold_bytes, library)
        return runner, f"torch {torch.__version__} and our CUDA kernels"
    from paged_kernels.bench.torch_runner import TorchRunner

    return TorchRunner(options.threads, options.device, cold_bytes), f"torch {torch.__version__}"


def serve(worker: Worker, requests: IO[str], answers: IO[str]) -> None:
    """Until there are no more requests."""
    for line in requests:
        answers.write(json.dumps(worker.answer(json.loads(line))) + "\n")
        answers.flush()


def main() -> None:
    """The process. What others print must not get between the answers."""
    parser = argparse.ArgumentParser(prog="python -m paged_kernels.bench.worker")
    parser.add_argument("kind", choices=["native", "torch"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpus", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cold-bytes", type=int, default=0)
    parser.add_argument("--library", default="", help="of our CUDA kernels, with torch")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    cold_bytes = options.cold_bytes or cold_target_bytes()
    runner, about = _runner(options, cold_bytes)
    hello = {"variants": runner.variants, "cold_bytes": cold_bytes, "about": about}
    answers.write(json.dumps(hello) + "\n")
    answers.flush()
    serve(Worker(runner), sys.stdin, answers)


if __name__ == "__main__":
    main()
