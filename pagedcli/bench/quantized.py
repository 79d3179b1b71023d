"""A quantized model beside its original on the CPU engine, in turns, and beside the bytes that it must read.

    python -m pagedcli.bench.quantized ORIGINAL QUANTIZED [--json FILE]      (or: make bench-quant)

Both are loaded once; their runs of the same requests take turns, since a machine's speed drifts. The limit is that of
reading memory at the rate measured in the same run: the weights as they are kept (codes, scales, zero points, the
head, which is not quantized, and the norms) once a step, and the keys and values of the positions attended to.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pagedcli.bench.cpu_engine import CpuBench, warm_up
from pagedcli.bench.cpu_workloads import CpuWorkload, cpu_workloads
from pagedcli.bench.machine import measure_machine

WORKLOADS = ("decode", "prefill512", "batch64")


@dataclass(frozen=True, slots=True)
class QuantRow:
    """One model and one list of requests.

    Attributes:
        model: Name of its folder.
        activation: What its quantized linears' inputs are.
        workload: What was run.
        counts: The tokens that the rates count.
        runs: Tokens per second of each run.
        ratio: Median over the original's, of the same run number; 1 for the original.
        limit_tokens_per_s: If all time were spent reading `limit_bytes`.
        limit_bytes: All that the requests must read.
    """

    model: str
    activation: str
    workload: str
    counts: str
    runs: list[float]
    ratio: float
    limit_tokens_per_s: float
    limit_bytes: float

    @property
    def tokens_per_s(self) -> float:
        """The median run."""
        return statistics.median(self.runs)


def bytes_to_read(bench: CpuBench, workload: CpuWorkload) -> float:
    """Bytes of weights, as they are kept, and of keys and values, that the requests must read at least."""
    work = bench.sizes.workload(workload.requests)
    steps = max(request.output_tokens for request in workload.requests)
    return steps * float(bench.backend.weight_bytes) + work.kv_bytes


def measure_in_turns(
    benches: Sequence[CpuBench], workloads: Sequence[CpuWorkload], repeats: int
) -> list[list[list[float]]]:
    """Tokens per second, [model][workload][run]; models take turns within each run of each workload."""
    found: list[list[list[float]]] = [[[] for _ in workloads] for _ in benches]
    with benches[0].open() as first, benches[1].open() as second:
        engines = (first, second)
        for engine in engines:
            warm_up(engine, workloads)
        for run in range(repeats):
            for index, workload in enumerate(workloads):
                # Who goes first changes, so that neither always finds the caches of the other.
                for which in (0, 1) if run % 2 == 0 else (1, 0):
                    seconds = engines[which].run(workload.shifted(run)).seconds
                    found[which][index].append(workload.counted_tokens() / seconds)
    return found


def rows(
    benches: Sequence[CpuBench],
    names: Sequence[str],
    workloads: Sequence[CpuWorkload],
    found: list[list[list[float]]],
    read_bytes_per_s: float,
) -> list[QuantRow]:
    """Workload by workload, the original first."""
    made = []
    for index, workload in enumerate(workloads):
        for which, bench in enumerate(benches):
            runs, base = found[which][index], found[0][index]
            read = bytes_to_read(bench, workload)
            made.append(
                QuantRow(
                    names[which],
                    bench.choice.activation,
                    workload.title,
                    workload.counts,
                    runs,
                    statistics.median(mine / original for mine, original in zip(runs, base, strict=True)),
                    workload.counted_tokens() * read_bytes_per_s / read,
                    read,
                )
            )
    return made


def table(measured: Sequence[QuantRow]) -> Table:
    """For people."""
    shown = Table(title="tokens per second")
    for name in (
        "work",
        "model",
        "activations",
        "tokens/s",
        "runs",
        "to the original",
        "limit of bytes",
        "share",
    ):
        shown.add_column(name, justify="left" if name in ("work", "model", "activations") else "right")
    for row in measured:
        shown.add_row(
            row.workload,
            row.model,
            row.activation or "as the weights",
            f"{row.tokens_per_s:,.1f}",
            " ".join(f"{rate:,.0f}" for rate in row.runs),
            f"{row.ratio:.2f}",
            f"{row.limit_tokens_per_s:,.0f}",
            f"{row.tokens_per_s / row.limit_tokens_per_s:.0%}",
        )
    return shown


def report(
    measured: Sequence[QuantRow], benches: Sequence[CpuBench], read_bytes_per_s: float
) -> dict[str, Any]:
    """What --json writes."""
    return {
        "read_bytes_per_s": read_bytes_per_s,
        "threads": benches[0].choice.threads,
        "isa": benches[0].isa,
        "weight_bytes": [bench.backend.weight_bytes for bench in benches],
        "rows": [{**dataclasses.asdict(row), "tokens_per_s": row.tokens_per_s} for row in measured],
    }


def main(
    original: Annotated[str, typer.Argument(help="A model in bfloat16, as in paged generate -m.")],
    quantized: Annotated[str, typer.Argument(help="The same model, quantized.")],
    threads: Annotated[int | None, typer.Option(help="Compute threads; none: physical cores.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each workload.")] = 3,
    only: Annotated[str, typer.Option(help="Names of workloads, joined by commas.")] = ",".join(WORKLOADS),
    peers: Annotated[Path | None, typer.Option(help="A folder with a workloads.json.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure a quantized model beside its original."""
    benches = [CpuBench(original, "bfloat16", threads), CpuBench(quantized, "auto", threads)]
    rates = measure_machine(benches[0].choice.threads)
    folder = peers if peers is not None and (peers / "workloads.json").is_file() else None
    workloads = [workload for workload in cpu_workloads(folder) if workload.name in only.split(",")]
    found = measure_in_turns(benches, workloads, repeats)
    names = [Path(original).name or original, Path(quantized).name or quantized]
    measured = rows(benches, names, workloads, found, rates.read_bytes_per_s)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(table(measured))
    for name, bench in zip(names, benches, strict=True):
        size = bench.backend.weight_bytes / 1e6
        console.print(f"{name}: {size:.0f} MB of weights, {bench.choice.dtype}", markup=False)
    gigabytes = rates.read_bytes_per_s / 1e9
    console.print(f"reading {gigabytes:.1f} GB/s, {benches[0].choice.threads} threads, {benches[0].isa}")
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report(measured, benches, rates.read_bytes_per_s), indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
