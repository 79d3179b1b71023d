"""A quantized model beside its original on the CPU engine, in turns, and beside the bytes that it must read.

    python -m pagedcli.bench.quantized ORIGINAL QUANTIZED [--openvino FOLDER] [--json FILE]  (or: make bench-quant)

Both are loaded once; their runs of the same requests take turns, since a machine's speed drifts, and with `--openvino`
OpenVINO has its turn after each round, in a process of its own, on the very same requests. No round begins that would
not end within `--seconds`; the first is always run. The limit is that of reading memory at the rate measured in the
same run: the weights as they are kept (codes, scales, zero points, the head, which is not quantized, and the norms)
once a step, and the keys and values of the positions attended to.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pagedcli.bench.cpu_engine import CpuBench, warm_up
from pagedcli.bench.cpu_workloads import CpuWorkload, cpu_workloads
from pagedcli.bench.environment import LoadMeter, describe_machine, provenance
from pagedcli.bench.machine import measure_machine
from pagedcli.bench.peers import Peer, PeerBudget, PeerResult, is_installed, run_peer
from pagedcli.errors import ConfigError

WORKLOADS = ("decode", "prefill512", "batch64")

Say = Callable[[str], None]
RunPeer = Callable[[Mapping[str, str]], Mapping[str, PeerResult]]
"""Runs workloads (name, what their rates count) once each and gives each a result."""


@dataclass(frozen=True, slots=True)
class QuantRow:
    """One model and one list of requests.

    Attributes:
        model: Name of its folder, or of another engine.
        activation: What its quantized linears' inputs are.
        workload: What was run.
        counts: The tokens that the rates count.
        runs: Tokens per second of each run.
        ratio: Median over the original's, of the same run number; 1 for the original.
        limit_tokens_per_s: If all time were spent reading `limit_bytes`; None for another engine.
        limit_bytes: All that the requests must read.
    """

    model: str
    activation: str
    workload: str
    counts: str
    runs: list[float]
    ratio: float
    limit_tokens_per_s: float | None = None
    limit_bytes: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """The median run."""
        return statistics.median(self.runs)


@dataclass(slots=True)
class Turns:
    """What was measured.

    Attributes:
        ours: Tokens per second, [model][workload][round].
        peer: What the other engine did, by round and name of the workload.
    """

    ours: list[list[list[float]]]
    peer: list[Mapping[str, PeerResult]] = field(default_factory=list)


def bytes_to_read(bench: CpuBench, workload: CpuWorkload) -> float:
    """Bytes of weights, as they are kept, and of keys and values, that the requests must read at least."""
    work = bench.sizes.workload(workload.requests)
    steps = max(request.output_tokens for request in workload.requests)
    return steps * float(bench.backend.weight_bytes) + work.kv_bytes


def measure_in_turns(
    benches: Sequence[CpuBench],
    names: Sequence[str],
    workloads: Sequence[CpuWorkload],
    *,
    repeats: int,
    seconds: float,
    say: Say,
    peer: RunPeer | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Turns:
    """Rounds in which each model runs each workload, and then the other engine all of them.

    Args:
        benches: The original and the quantized one.
        names: Of both.
        workloads: What they run.
        repeats: Rounds, at most.
        seconds: No round begins that would take longer in all; the first does.
        say: Told what was measured, as it comes.
        peer: The other engine.
        clock: Tells seconds.
    """
    begun = clock()
    turns = Turns([[[] for _ in workloads] for _ in benches])
    with benches[0].open() as first, benches[1].open() as second:
        engines = (first, second)
        for name, engine in zip(names, engines, strict=True):
            say(f"warming up {name}")
            warm_up(engine, workloads)
        longest = 0.0
        for run in range(repeats):
            started = clock()
            if run > 0 and started - begun + longest > seconds:
                say(f"{run} rounds in {started - begun:.0f} s: another would take longer than {seconds:g} s")
                break
            for index, workload in enumerate(workloads):
                # Who goes first changes, so that neither always finds the caches of the other.
                for which in (0, 1) if run % 2 == 0 else (1, 0):
                    rate = workload.counted_tokens() / engines[which].run(workload.shifted(run)).seconds
                    turns.ours[which][index].append(rate)
                    say(f"round {run + 1}: {workload.title}: {names[which]} {rate:,.1f} tokens/s")
            if peer is not None:
                turns.peer.append(peer({workload.name: workload.counts for workload in workloads}))
                for workload in workloads:
                    result = turns.peer[-1][workload.name]
                    did = result.error or (f"{result}" if result.over_s else f"{result} tokens/s")
                    say(f"round {run + 1}: {workload.title}: OpenVINO {did}")
            longest = max(longest, clock() - started)
    return turns


def rows(
    benches: Sequence[CpuBench],
    names: Sequence[str],
    workloads: Sequence[CpuWorkload],
    turns: Turns,
    read_bytes_per_s: float,
) -> list[QuantRow]:
    """Workload by workload, the original first, another engine last."""
    made = []
    for index, workload in enumerate(workloads):
        base = turns.ours[0][index]
        for which, bench in enumerate(benches):
            runs, read = turns.ours[which][index], bytes_to_read(bench, workload)
            made.append(
                QuantRow(
                    names[which],
                    bench.choice.activation,
                    workload.title,
                    workload.counts,
                    runs,
                    _ratio(runs, base),
                    workload.counted_tokens() * read_bytes_per_s / read,
                    read,
                )
            )
        results = [found[workload.name] for found in turns.peer]
        theirs = [(result.tokens_per_s, run) for result, run in zip(results, base, strict=False)]
        reached = [(rate, run) for rate, run in theirs if rate is not None]
        if reached:
            version = next((result.version for result in results if result.version), "")
            name = f"OpenVINO {version}".strip()
            their_runs = [rate for rate, _ in reached]
            ratio = _ratio(their_runs, [run for _, run in reached])
            made.append(QuantRow(name, "its own", workload.title, workload.counts, their_runs, ratio))
    return made


def _ratio(runs: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(mine / original for mine, original in zip(runs, base, strict=True))


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
            "" if row.limit_tokens_per_s is None else f"{row.limit_tokens_per_s:,.0f}",
            "" if row.limit_tokens_per_s is None else f"{row.tokens_per_s / row.limit_tokens_per_s:.0%}",
        )
    return shown


def report(
    measured: Sequence[QuantRow], benches: Sequence[CpuBench], read_bytes_per_s: float, other_load: str
) -> dict[str, Any]:
    """What --json writes."""
    return {
        **provenance(),
        "machine": describe_machine(),
        "other_load": other_load,
        "read_bytes_per_s": read_bytes_per_s,
        "threads": benches[0].choice.threads,
        "isa": benches[0].isa,
        "weight_bytes": [bench.backend.weight_bytes for bench in benches],
        "rows": [{**dataclasses.asdict(row), "tokens_per_s": row.tokens_per_s} for row in measured],
    }


def openvino(model: Path, scripts: Path, threads: int, seconds: float) -> RunPeer:
    """OpenVINO on a model in its own format.

    Args:
        model: Folder of the exported model.
        scripts: Folder with `peer_openvino.py`.
        threads: Compute threads.
        seconds: For each workload, warm-up included; and for loading.

    Raises:
        ConfigError: It is not installed as ../shared/peers/setup.md says, or the model is not there.
    """
    peer = Peer(
        "OpenVINO",
        "peer_openvino.py",
        "ov/bin/python",
        str(model.resolve()),
        ("--precision", "bf16"),
        "",
        "int4",
    )
    if not (scripts / peer.script).is_file() or not is_installed(peer):
        raise ConfigError(
            f"OpenVINO cannot be run: {scripts / peer.script}, $VENVS/{peer.python} and {model} are needed, and $MODELS"
        )
    budget = PeerBudget(load_s=seconds, workload_s=seconds, runs=1)
    return lambda workloads: run_peer(peer, scripts, workloads, threads, budget)


def main(
    original: Annotated[str, typer.Argument(help="A model in bfloat16, as in paged generate -m.")],
    quantized: Annotated[str, typer.Argument(help="The same model, quantized.")],
    threads: Annotated[int | None, typer.Option(help="Compute threads; none: physical cores.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds, at most.")] = 5,
    seconds: Annotated[float, typer.Option(min=0, help="For all rounds.")] = 180.0,
    only: Annotated[str, typer.Option(help="Names of workloads, joined by commas.")] = ",".join(WORKLOADS),
    peers: Annotated[Path | None, typer.Option(help="Folder of the other engines' scripts.")] = None,
    openvino_model: Annotated[
        Path | None, typer.Option("--openvino", help="The model in OpenVINO's format; with --peers.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure a quantized model beside its original."""
    progress = Console(stderr=True, highlight=False)

    def say(line: str) -> None:
        progress.print(line, markup=False, soft_wrap=True)

    say("loading both")
    benches = [CpuBench(original, "bfloat16", threads), CpuBench(quantized, "auto", threads)]
    if not benches[1].choice.as_codes:
        raise ConfigError(
            f"{quantized} does not run as codes here: {benches[1].choice.dtype}, there is nothing to compare"
        )
    folder = peers if peers is not None and (peers / "workloads.json").is_file() else None
    peer = None
    if openvino_model is not None:
        peer = openvino(openvino_model, peers or Path(), benches[0].choice.threads, seconds)
    say("measuring the machine")
    rates = measure_machine(benches[0].choice.threads)
    workloads = [workload for workload in cpu_workloads(folder) if workload.name in only.split(",")]
    names = [Path(original).name or original, Path(quantized).name or quantized]
    meter = LoadMeter()
    turns = measure_in_turns(benches, names, workloads, repeats=repeats, seconds=seconds, say=say, peer=peer)
    meter.end()
    measured = rows(benches, names, workloads, turns, rates.read_bytes_per_s)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(table(measured))
    for name, bench in zip(names, benches, strict=True):
        size = bench.backend.weight_bytes / 1e6
        console.print(f"{name}: {size:.0f} MB of weights, {bench.choice.dtype}", markup=False)
    gigabytes, other_load = rates.read_bytes_per_s / 1e9, meter.told()
    console.print(f"reading {gigabytes:.1f} GB/s, {benches[0].choice.threads} threads, {benches[0].isa}")
    console.print(f"other load: {other_load}", markup=False)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        found = report(measured, benches, rates.read_bytes_per_s, other_load)
        json_file.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    # However it is ended, another engine's process ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    typer.run(main)
