"""The CPU engine measured: its rates beside the machine's limits and beside other engines, all in one run.

    python -m pagedcli.bench.cpu [--json FILE]        (or: make bench-cpu)

Runs of ours and of the others take turns, since a machine's speed drifts. Every rate stands beside the limit that
`bench.work` counts for the very same requests at the rates that `bench.machine` measured.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table

from pagedcli.api.backend import Backend, load_backend
from pagedcli.api.native_backend import NativeBackend
from pagedcli.api.resolve import RunChoice, choose_run
from pagedcli.bench.cpu_workloads import CpuWorkload, cpu_workloads, long_context
from pagedcli.bench.machine import MachineRates, measure_machine
from pagedcli.bench.peers import installed_peers, run_peer
from pagedcli.bench.random_checkpoint import QWEN2_5_0_5B, RandomCheckpoint
from pagedcli.bench.requests_run import OpenEngine, open_engine
from pagedcli.bench.roofline import Point, roofline_svg
from pagedcli.bench.work import ModelSizes, Work
from pagedcli.checkpoint.sources import open_checkpoint, resolve_model
from pagedcli.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagedcli.models.spec import ModelSpec
from pagedcli.runtime.native_worker import NativeWorker
from pagedcli.runtime.threads import compute_threads
from pagedcli.text.tokenizer import Tokenizer
from pagedcli.workloads.requests import WorkloadRequest

PAGES = 2048
"""Pages of 16 tokens: enough for 64 requests of 512 tokens."""
PYTHON_BATCHES = (1, 64)


@dataclass(slots=True)
class Row:
    """One workload.

    Attributes:
        workload: Which.
        title: For people.
        counts: What the rates count.
        tokens_per_s: Median over the runs.
        runs: Each run's rate.
        limit_tokens_per_s: What the machine could reach.
        bound_by: "operations" or "bytes".
        flops_per_byte: Operations over bytes, as counted.
        flops_per_s: Operations, as counted, over the median's time.
        peers: Other engines' medians.
    """

    workload: str
    title: str
    counts: str
    tokens_per_s: float
    runs: list[float]
    limit_tokens_per_s: float
    bound_by: str
    flops_per_byte: float
    flops_per_s: float
    peers: dict[str, float] = field(default_factory=dict)

    @property
    def limit_share(self) -> float:
        """Part of the limit that was reached."""
        return self.tokens_per_s / self.limit_tokens_per_s


class CpuBench:
    """A model loaded once.

    Args:
        model: As in `paged generate`, or "qwen2.5-0.5b-random".
        dtype: "float32" or "bfloat16".
        threads: Compute threads; None: physical cores.
        depth: Steps in flight; None: the default.
    """

    def __init__(self, model: str | None, dtype: str, threads: int | None, depth: int | None) -> None:
        named = open_checkpoint(resolve_model(None if model == RANDOM_QWEN else model))
        self.tokenizer: Tokenizer = named.load_tokenizer()
        checkpoint: Any = RandomCheckpoint(QWEN2_5_0_5B) if model == RANDOM_QWEN else named
        config = EngineConfig(
            model=ModelConfig(model=model, dtype=dtype),  # type: ignore[arg-type]
            device=DeviceConfig(device="cpu", threads=threads),
            scheduler=SchedulerConfig(depth=depth),
        )
        spec = ModelSpec.from_config(checkpoint.config)
        self.choice: RunChoice = choose_run(config, spec, has_cuda=False, cores=compute_threads())
        self.backend: Backend = load_backend(checkpoint, self.choice)
        self.sizes = ModelSizes.of(spec, self.choice.dtype)
        self.isa = cast(NativeBackend, self.backend).ops.runtime.isa

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

    def row(
        self, workload: CpuWorkload, work: Work, tokens: int, runs: list[float], rates: MachineRates
    ) -> Row:
        """What was reached beside what the machine could reach.

        Args:
            workload: For its names.
            work: All that was to be done.
            tokens: That `runs` count, tokens per second each.
            runs: At least one.
            rates: Of the machine.
        """
        flops_per_s = rates.flops_per_s(self.choice.dtype, self.isa)
        least_s = work.least_seconds(flops_per_s, rates.read_bytes_per_s)
        median = statistics.median(runs)
        return Row(
            workload=workload.name,
            title=workload.title,
            counts=workload.counts,
            tokens_per_s=median,
            runs=runs,
            limit_tokens_per_s=tokens / least_s,
            bound_by="operations" if work.flops / flops_per_s >= least_s else "bytes",
            flops_per_byte=work.flops / work.num_bytes,
            flops_per_s=work.flops * median / tokens,
        )


RANDOM_QWEN = "qwen2.5-0.5b-random"


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
    rates: MachineRates,
    repeats: int,
    peers_folder: Path | None,
) -> Iterator[Row]:
    """Ours and the peers in turn."""
    peers = installed_peers(peers_folder)
    ours: dict[str, list[float]] = {workload.name: [] for workload in workloads}
    theirs: dict[str, dict[str, list[float]]] = {workload.name: {} for workload in workloads}
    counts = {workload.name: workload.counts for workload in workloads}
    with bench.open() as engine:
        warm_up(engine, workloads)
        for run in range(max(repeats, len(peers) + 1 if peers else 0)):
            for workload in workloads:
                seconds = engine.run(workload.shifted(run)).seconds
                ours[workload.name].append(workload.counted_tokens() / seconds)
            if peers and peers_folder is not None and run < len(peers):
                for name, rate in run_peer(peers[run], peers_folder, counts, bench.choice.threads).items():
                    theirs[name].setdefault(peers[run].name, []).append(rate)
    for workload in workloads:
        work = bench.sizes.workload(workload.requests)
        row = bench.row(workload, work, workload.counted_tokens(), ours[workload.name], rates)
        row.peers = {name: statistics.median(values) for name, values in theirs[workload.name].items()}
        yield row


def measure_long_context(bench: CpuBench, rates: MachineRates, context: int, new: int = 32) -> Row:
    """Decode alone at a long context: the time of many new tokens less that of one."""
    workload = long_context(context, new)
    first = dataclasses.replace(workload.requests[0], output_tokens=1, max_tokens=1)
    with bench.open(pages=context // 16 + 8) as engine:
        engine.run((first,))
        begun = engine.run((dataclasses.replace(first, id="begun"),)).seconds
        seconds = engine.run(workload.requests).seconds - begun
    work = bench.sizes.decode(context, new - 1) + bench.sizes.weights(new - 1)
    return bench.row(workload, work, new - 1, [(new - 1) / seconds], rates)


def python_ms_per_step(bench: CpuBench, batch: int, new: int = 64) -> float:
    """Milliseconds of a step outside the kernels, from request to answer, nothing overlapped."""
    requests = [
        WorkloadRequest(str(index), tuple(range(1000 + index, 1016 + index)), new, new)
        for index in range(batch)
    ]
    with bench.open(depth=1) as engine:
        worker = cast(NativeWorker, engine.worker)
        engine.run(requests)
        steps, native = worker.num_steps, worker.native_seconds
        seconds: float = engine.run(requests).seconds
        outside = seconds - (worker.native_seconds - native)
        return 1e3 * outside / (worker.num_steps - steps)


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


@dataclass(frozen=True, slots=True)
class Ready:
    """A fresh process until its first answer.

    Attributes:
        seconds: From starting the interpreter to the first token, median of three.
        weight_bytes: Packed weights.
        kv_bytes: KV pool.
        peak_bytes: Largest resident size of the process.
    """

    seconds: float
    weight_bytes: int
    kv_bytes: int
    peak_bytes: int


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


def table(title: str, rows: Sequence[Row]) -> Table:
    """Rows for people."""
    peers = sorted({name for row in rows for name in row.peers})
    shown = Table(title=title)
    shown.add_column("work")
    for name in ("tokens/s", "limit", "of limit", "bound by", *peers):
        shown.add_column(name, justify="right")
    for row in rows:
        others = [f"{row.peers[name]:,.1f}" if name in row.peers else "-" for name in peers]
        shown.add_row(
            row.title, f"{row.tokens_per_s:,.1f}", f"{row.limit_tokens_per_s:,.1f}", f"{row.limit_share:.0%}",
            row.bound_by, *others,
        )  # fmt: skip
    return shown


def main(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help=f"As in paged generate, or {RANDOM_QWEN}.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    threads: Annotated[int | None, typer.Option(help="Compute threads; none: physical cores.")] = None,
    depth: Annotated[int | None, typer.Option(help="Steps in flight; none: the default.")] = None,
    only: Annotated[str, typer.Option(help="Names of workloads, joined by commas; all if empty.")] = "",
    repeats: Annotated[int, typer.Option(help="Runs of each workload.")] = 3,
    context: Annotated[int, typer.Option(help="Tokens of the long context; 0 leaves it out.")] = 8064,
    startup: Annotated[bool, typer.Option(help="Measure the time to be ready.")] = True,
    peers: Annotated[Path | None, typer.Option(help="Folder of the other engines' scripts.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    plot: Annotated[Path | None, typer.Option("--roofline", help="Draw them here, as SVG.")] = None,
) -> None:
    """Measure the CPU engine."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    folder = peers if peers is not None and (peers / "workloads.json").is_file() else None
    bench = CpuBench(model, dtype, threads, depth)
    rates = measure_machine(bench.choice.threads)
    workloads = [w for w in cpu_workloads(folder) if not only or w.name in only.split(",")]
    rows = list(measure_rates(bench, workloads, rates, repeats, folder))
    if context:
        rows.append(measure_long_context(bench, rates, context))
    python_ms = {batch: python_ms_per_step(bench, batch) for batch in PYTHON_BATCHES}
    ready = measure_ready(model, dtype, bench.choice.threads) if startup and model != RANDOM_QWEN else None
    name = f"{model or 'SmolLM2-135M-Instruct'}, {bench.choice.dtype}, {bench.isa}, {bench.choice.threads} threads"
    console.print(table(name, rows))
    for line in notes(rates, bench, python_ms, ready):
        console.print(line)
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        plot.write_text(roofline(name, bench, rates, rows))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report(bench, rates, rows, python_ms, ready), indent=2) + "\n")


def roofline(title: str, bench: CpuBench, rates: MachineRates, rows: Sequence[Row]) -> str:
    """The rows as a plot; the roof in use is the last."""
    used = rates.flops_per_s(bench.choice.dtype, bench.isa)
    all_roofs = {
        "float32": rates.f32_flops_per_s,
        "bfloat16 dots": rates.bf16_dot_flops_per_s,
        "bfloat16 tiles": rates.bf16_tile_flops_per_s,
    }
    roofs = sorted(
        ((name, rate) for name, rate in all_roofs.items() if rate), key=lambda roof: roof[1] == used
    )
    points = [Point(row.title, row.flops_per_byte, row.flops_per_s) for row in rows]
    return roofline_svg(title, points, rates.read_bytes_per_s, roofs)


def notes(
    rates: MachineRates, bench: CpuBench, python_ms: dict[int, float], ready: Ready | None
) -> Iterator[str]:
    """What the table does not say."""
    flops = rates.flops_per_s(bench.choice.dtype, bench.isa)
    yield (
        f"Limits measured in this run, {rates.threads} threads: reading {rates.read_bytes_per_s / 1e9:.1f} GB/s; "
        f"{bench.choice.dtype} products for {bench.isa} {flops / 1e9:,.0f} GFLOP/s (float32 "
        f"{rates.f32_flops_per_s / 1e9:,.0f}, bfloat16 dots {rates.bf16_dot_flops_per_s / 1e9:,.0f}, tiles "
        f"{rates.bf16_tile_flops_per_s / 1e9:,.0f})."
    )
    yield "Counted: the body's linears for every token, the head for every row of logits, attention; weights, KV."
    for batch, milliseconds in python_ms.items():
        yield f"Python per step at batch {batch}: {milliseconds:.3f} ms."
    if ready is not None:
        over = ready.peak_bytes - ready.weight_bytes - ready.kv_bytes
        yield (
            f"Ready, with the first token, in {ready.seconds:.2f} s; peak {ready.peak_bytes / 1e6:.0f} MB, of which "
            f"weights {ready.weight_bytes / 1e6:.0f}, KV {ready.kv_bytes / 1e6:.0f}, all else {over / 1e6:.0f}."
        )


def report(
    bench: CpuBench,
    rates: MachineRates,
    rows: Sequence[Row],
    python_ms: dict[int, float],
    ready: Ready | None,
) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "settings": {**dataclasses.asdict(bench.choice), "isa": bench.isa},
        "machine": {"limits": dataclasses.asdict(rates), "load": os.getloadavg()},
        "sizes": dataclasses.asdict(bench.sizes),
        "rows": [{**dataclasses.asdict(row), "limit_share": row.limit_share} for row in rows],
        "python_ms_per_step": python_ms,
        "ready": None if ready is None else dataclasses.asdict(ready),
    }


if __name__ == "__main__":
    typer.run(main)
