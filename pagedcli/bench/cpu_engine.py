"""One model on the CPU engine, and what of it `make bench-cpu` measures. May import any layer below `bench`."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any, cast

from pagedcli.api.backend import Backend, load_backend
from pagedcli.api.native_backend import NativeBackend
from pagedcli.api.resolve import RunChoice, choose_run
from pagedcli.bench.cpu_report import PythonTime, Ready, Row
from pagedcli.bench.cpu_workloads import CpuWorkload, long_context
from pagedcli.bench.machine import MachineNow, MachineRates, Passes
from pagedcli.bench.peers import PeerResult
from pagedcli.bench.random_checkpoint import QWEN2_5_0_5B, RandomCheckpoint
from pagedcli.bench.requests_run import OpenEngine, open_engine
from pagedcli.bench.work import ModelSizes, Work
from pagedcli.checkpoint.sources import open_checkpoint, resolve_model
from pagedcli.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.select import has_int8_dot
from pagedcli.runtime.native_worker import NativeWorker
from pagedcli.runtime.threads import compute_threads
from pagedcli.text.tokenizer import Tokenizer
from pagedcli.workloads.requests import WorkloadRequest

PAGES = 2048
"""Pages of 16 tokens: enough for 64 requests of 512 tokens."""
RANDOM_QWEN = "qwen2.5-0.5b-random"

RunPeer = tuple[str, Callable[[Mapping[str, str]], Mapping[str, PeerResult]]]
"""A name, and what runs workloads (name, what their rates count) and gives each a result."""


@contextmanager
def _override(isa: str | None) -> Iterator[None]:
    """The same switch that a user has; it is read where a runtime is made."""
    before = os.environ.get("PAGED_CPU_ISA")
    if isa is not None:
        os.environ["PAGED_CPU_ISA"] = isa
    try:
        yield
    finally:
        if isa is not None and before is None:
            del os.environ["PAGED_CPU_ISA"]
        elif isa is not None and before is not None:
            os.environ["PAGED_CPU_ISA"] = before


class CpuBench:
    """A model loaded once.

    Args:
        model: As in `paged generate`, or "qwen2.5-0.5b-random".
        dtype: "float32" or "bfloat16".
        threads: Compute threads; None: physical cores.
        depth: Steps in flight; None: the default.
        isa: Variant of the kernels; None: the best.
    """

    def __init__(
        self,
        model: str | None,
        dtype: str,
        threads: int | None = None,
        depth: int | None = None,
        isa: str | None = None,
    ) -> None:
        named = open_checkpoint(resolve_model(None if model == RANDOM_QWEN else model))
        self.tokenizer: Tokenizer = named.load_tokenizer()
        checkpoint: Any = RandomCheckpoint(QWEN2_5_0_5B) if model == RANDOM_QWEN else named
        config = EngineConfig(
            model=ModelConfig(model=model, dtype=dtype),  # type: ignore[arg-type]
            device=DeviceConfig(device="cpu", threads=threads),
            scheduler=SchedulerConfig(depth=depth),
        )
        spec = ModelSpec.from_config(checkpoint.config)
        self.choice: RunChoice = choose_run(
            config,
            spec,
            has_cuda=False,
            cores=compute_threads(),
            quantization=None if model == RANDOM_QWEN else named.quantization,
            path=named.path,
            int8_dot=has_int8_dot,
        )
        with _override(isa):
            self.backend: Backend = load_backend(checkpoint, self.choice)
        self.sizes = ModelSizes.of(spec, self.choice.dtype)
        self.isa = cast(NativeBackend, self.backend).ops.runtime.isa
        shown = f"{model or 'SmolLM2-135M-Instruct'}, {self.choice.dtype}"
        self.name = f"{shown}, {self.isa}, {self.choice.threads} threads"

    def open(self, *, depth: int | None = None, pages: int = PAGES) -> AbstractContextManager[OpenEngine]:
        """A new engine over the loaded weights; a context manager."""
        return open_engine(
            self.backend,
            self.tokenizer,
            depth=depth or self.choice.depth,
            cache=CacheConfig(num_pages=pages),
            scheduler=SchedulerConfig(),
            max_model_len=min(self.choice.model_len, pages * 16),
        )

    @property
    def weight_bytes(self) -> float:
        """That a step reads."""
        return self.sizes.weights(1).weight_bytes

    def row(
        self,
        workload: CpuWorkload,
        work: Work,
        tokens: int,
        runs: list[float],
        rates: MachineRates,
        passes: Passes,
    ) -> Row:
        """What was reached beside what the machine could reach.

        Args:
            workload: For its names.
            work: All that was to be done.
            tokens: That `runs` count, tokens per second each.
            runs: At least one.
            rates: Of the machine.
            passes: Over memory, right before and after the runs.
        """
        flops_per_s, read = rates.flops_per_s(self.choice.dtype, self.isa), statistics.median(passes.uncached)
        least_s = work.least_seconds(flops_per_s, read)
        best_s = work.least_seconds(flops_per_s, max(rates.read_bytes_per_s, *passes.uncached))
        again = statistics.median(passes.again)
        median = statistics.median(runs)
        tiles = self.isa == "amx" and self.choice.dtype == "bfloat16"
        dots_s = work.least_seconds(rates.bf16_dot_flops_per_s, read) if tiles else 0.0
        return Row(
            engine=self.name,
            workload=workload.name,
            title=workload.title,
            counts=workload.counts,
            tokens_per_s=median,
            runs=runs,
            limit_tokens_per_s=tokens / least_s,
            best_limit_tokens_per_s=tokens / best_s,
            again_limit_tokens_per_s=tokens / work.least_seconds(flops_per_s, again),
            read_bytes_per_s=read,
            again_bytes_per_s=again,
            bound_by="operations" if work.flops / flops_per_s >= least_s else "bytes",
            flops_per_byte=work.flops / work.num_bytes,
            flops_per_s=work.flops * median / tokens,
            dot_limit_tokens_per_s=tokens / dots_s if dots_s else 0.0,
        )


def warm_up(engine: OpenEngine, workloads: Sequence[CpuWorkload]) -> None:
    """The same shapes with short outputs, as the peers' scripts do."""
    for workload in workloads:
        short = tuple(
            dataclasses.replace(request, output_tokens=min(request.output_tokens, 4), max_tokens=4)
            for request in workload.shifted(99)
        )
        engine.run(short)


def measure_rates(
    bench: CpuBench,
    workloads: Sequence[CpuWorkload],
    machine: MachineNow,
    repeats: int,
    peers: Sequence[RunPeer] = (),
) -> Iterator[Row]:
    """Ours and the peers in turn: ours, the first, ours, the second, ..., ours; memory is read in between ours."""
    ours: dict[str, list[float]] = {workload.name: [] for workload in workloads}
    passes = {workload.name: Passes([], []) for workload in workloads}
    theirs: dict[str, dict[str, PeerResult]] = {workload.name: {} for workload in workloads}
    counts = {workload.name: workload.counts for workload in workloads}
    with bench.open() as engine:
        warm_up(engine, workloads)
        for run in range(max(repeats, len(peers) + 1 if peers else 0)):
            before = machine.passes(bench.weight_bytes)
            for workload in workloads:
                seconds = engine.run(workload.shifted(run)).seconds
                ours[workload.name].append(workload.counted_tokens() / seconds)
                after = machine.passes(bench.weight_bytes)
                passes[workload.name] += before + after
                before = after
            if run < len(peers):
                peer, run_workloads = peers[run]
                for name, result in run_workloads(counts).items():
                    theirs[name][peer] = result
    for workload in workloads:
        work = bench.sizes.workload(workload.requests)
        runs, read = ours[workload.name], passes[workload.name]
        row = bench.row(workload, work, workload.counted_tokens(), runs, machine.rates, read)
        row.peers = theirs[workload.name]
        yield row


def measure_long_context(bench: CpuBench, machine: MachineNow, context: int, new: int = 32) -> Row:
    """Decode alone at a long context: the time of many new tokens less that of one."""
    workload = long_context(context, new)
    first = dataclasses.replace(workload.requests[0], output_tokens=1, max_tokens=1)
    with bench.open(pages=context // 16 + 8) as engine:
        engine.run((first,))
        begun = engine.run((dataclasses.replace(first, id="begun"),)).seconds
        passes = machine.passes(bench.weight_bytes)
        seconds = engine.run(workload.requests).seconds - begun
        passes += machine.passes(bench.weight_bytes)
    work = bench.sizes.decode(context, new - 1) + bench.sizes.weights(new - 1)
    return bench.row(workload, work, new - 1, [(new - 1) / seconds], machine.rates, passes)


def python_ms_per_step(bench: CpuBench, batch: int, new: int = 64, runs: int = 5) -> PythonTime:
    """What is spent outside the kernels, nothing overlapped: over whole runs (the median one), and in a usual step.

    A whole run is from requests handed over to answers: admission and ends count, too, divided by the number of steps.
    """
    requests = [
        WorkloadRequest(str(index), tuple(range(1000 + index, 1016 + index)), new, new)
        for index in range(batch)
    ]
    found = []
    with bench.open(depth=1) as engine:
        worker = cast(NativeWorker, engine.worker)
        engine.run(requests)
        for _ in range(runs):
            steps, native = worker.num_steps, worker.native_seconds
            seconds = engine.run(requests).seconds - (worker.native_seconds - native)
            found.append(1e3 * seconds / (worker.num_steps - steps))
        return PythonTime(statistics.median(found), _usual_step_ms(engine, worker, requests))


def _usual_step_ms(engine: OpenEngine, worker: NativeWorker, requests: Sequence[WorkloadRequest]) -> float:
    """The median, over the turns of one run, of what is spent outside the kernels from one turn to the next."""
    marks: list[tuple[float, float]] = []

    def mark() -> None:
        marks.append((time.perf_counter(), worker.native_seconds))

    engine.client.on_turn(mark)
    engine.run(requests)
    engine.client.off_turn(mark)
    return statistics.median(
        1e3 * ((end - start) - (native_end - native_start))
        for (start, native_start), (end, native_end) in pairwise(list(marks))
    )


READY = """
import json, time
from pathlib import Path
from pagedcli import LLM, SamplingParams
with LLM({model!r}, device="cpu", num_pages=64, dtype={dtype!r}, threads={threads}) as llm:
    llm.generate("The capital of France is", SamplingParams(max_tokens=1))
    answered = time.time()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = 1024 * int(status["VmHWM"].split()[0])  # getrusage would count the parent's memory too
    print(json.dumps([answered, llm.engine.resolved.weight_bytes, llm.engine.resolved.kv_bytes, peak]))
"""


def measure_ready(model: str | None, dtype: str, threads: int) -> Ready:
    """Start Python, load the model, answer one token; the file is in the system's cache after the first of four."""
    code = READY.format(model=model, dtype=dtype, threads=threads)
    found: list[tuple[float, int, int, int]] = []
    for _ in range(4):
        started = time.time()
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        answered, *sizes = json.loads(done.stdout)
        found.append((answered - started, *sizes))
    return Ready(statistics.median(seconds for seconds, *_ in found[1:]), *found[-1][1:])
