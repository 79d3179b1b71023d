"""The CPU engine measured: its rates beside the machine's limits and beside other engines, all in one run.

    python -m pagedcli.bench.cpu [--json FILE] [--without PART,...]        (or: make bench-cpu)

Runs of ours and of the others take turns, since a machine's speed drifts. Every rate stands beside the limit that
`bench.work` counts for the very same requests at the rates that `bench.machine` measured.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pagedcli.bench.cpu_engine import (
    RANDOM_QWEN,
    CpuBench,
    RunPeer,
    measure_long_context,
    measure_rates,
    measure_ready,
    python_ms_per_step,
)
from pagedcli.bench.cpu_report import Findings, Row, notes, report, roofline, table
from pagedcli.bench.cpu_workloads import CpuWorkload, cpu_workloads
from pagedcli.bench.machine import MachineNow, ReadPasses, measure_machine, reading
from pagedcli.bench.peers import Peer, PeerBudget, PeerResult, installed_peers, run_peer
from pagedcli.errors import ConfigError

PYTHON_BATCHES = (1, 64)
PARTS = ("peers", "context", "variants", "qwen", "python", "ready")
VARIANTS = ("avx512bf16", "avx2")
VARIANT_WORKLOADS = ("decode", "prefill512", "prefix32")
"""The mixed requests take minutes without tiles, and say nothing more."""


@dataclass(frozen=True, slots=True)
class PeerRun:
    """One engine, ready to be called with workloads; says when it begins.

    Attributes:
        peer: Which.
        folder: Of the scripts.
        threads: Compute threads.
        budget: Seconds that it may take.
        progress: Where to say so.
    """

    peer: Peer
    folder: Path
    threads: int
    budget: PeerBudget
    progress: Console

    def __call__(self, workloads: Mapping[str, str]) -> Mapping[str, PeerResult]:
        """A result for each workload."""
        self.progress.print(f"{self.peer.name}: {', '.join(workloads)}")
        return run_peer(self.peer, self.folder, workloads, self.threads, self.budget)


def variant_rows(
    bench: CpuBench, model: str | None, workloads: Sequence[CpuWorkload], machine: MachineNow
) -> Iterator[Row]:
    """The same model on other variants, one run of each workload; those that are not here give no row."""
    few = [workload for workload in workloads if workload.name in VARIANT_WORKLOADS]
    for isa in VARIANTS:
        if isa == bench.isa:
            continue
        try:
            other = CpuBench(model, bench.choice.dtype, bench.choice.threads, bench.choice.depth, isa)
        except ConfigError:
            continue
        yield from measure_rates(other, few, machine, 1)


def measure(
    bench: CpuBench,
    model: str | None,
    workloads: Sequence[CpuWorkload],
    *,
    repeats: int,
    context: int,
    peers: Sequence[RunPeer],
    without: Sequence[str],
    read: ReadPasses,
    progress: Console,
) -> Findings:
    """Everything that is not left out."""

    def wanted(part: str) -> bool:
        if part not in without:
            progress.print(part)
        return part not in without

    machine = MachineNow(measure_machine(bench.choice.threads), read)
    found = Findings(
        machine.rates, dataclasses.asdict(bench.choice), bench.choice.dtype, bench.isa, left_out=without
    )
    found.rows += measure_rates(bench, workloads, machine, repeats, peers)
    if wanted("context"):
        found.rows.append(measure_long_context(bench, machine, context))
    if wanted("python"):
        found.python_ms = {batch: python_ms_per_step(bench, batch) for batch in PYTHON_BATCHES}
    if model != RANDOM_QWEN and wanted("ready"):
        found.ready = measure_ready(model, bench.choice.dtype, bench.choice.threads)
    if wanted("variants"):
        found.rows += variant_rows(bench, model, workloads, machine)
    if model != RANDOM_QWEN and wanted("qwen"):
        qwen = CpuBench(RANDOM_QWEN, bench.choice.dtype, bench.choice.threads, bench.choice.depth)
        found.rows += measure_rates(qwen, workloads, machine, 1)
    return found


def _left_out(without: str) -> tuple[str, ...]:
    parts = tuple(part for part in without.split(",") if part)
    for part in parts:
        if part not in PARTS:
            raise typer.BadParameter(f"{part!r} is no part: {', '.join(PARTS)}", param_hint="--without")
    return parts


def main(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help=f"As in paged generate, or {RANDOM_QWEN}.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    threads: Annotated[int | None, typer.Option(help="Compute threads; none: physical cores.")] = None,
    depth: Annotated[int | None, typer.Option(help="Steps in flight; none: the default.")] = None,
    only: Annotated[str, typer.Option(help="Names of workloads, joined by commas; all if empty.")] = "",
    without: Annotated[str, typer.Option(help=f"Parts to leave out: {', '.join(PARTS)}.")] = "",
    repeats: Annotated[int, typer.Option(help="Runs of each workload.")] = 5,
    context: Annotated[int, typer.Option(help="Tokens of the long context.")] = 8064,
    peers: Annotated[Path | None, typer.Option(help="Folder of the other engines' scripts.")] = None,
    peer_seconds: Annotated[float, typer.Option(help="Seconds for each workload of each.")] = 120.0,
    peer_load_seconds: Annotated[float, typer.Option(help="Seconds for each to load.")] = 300.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    plot: Annotated[Path | None, typer.Option("--roofline", help="Draw them here, as SVG.")] = None,
) -> None:
    """Measure the CPU engine."""
    left_out = _left_out(without)
    folder = peers if peers is not None and (peers / "workloads.json").is_file() else None
    progress = Console(stderr=True, highlight=False)
    bench = CpuBench(model, dtype, threads, depth)
    budget = PeerBudget(peer_load_seconds, peer_seconds)
    runs = [
        (peer.name, PeerRun(peer, folder, bench.choice.threads, budget, progress))
        for peer in installed_peers(folder)
        if folder is not None and "peers" not in left_out
    ]
    workloads = [w for w in cpu_workloads(folder) if not only or w.name in only.split(",")]
    with reading(bench.choice.threads) as read:
        found = measure(
            bench, model, workloads,
            repeats=repeats, context=context, peers=runs, without=left_out, read=read, progress=progress,
        )  # fmt: skip
    found.budget = None if "peers" in left_out else budget
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(table(found.rows))
    for line in notes(found):
        console.print(line, markup=False)
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        plot.write_text(roofline(bench.name, found))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report(found), indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
