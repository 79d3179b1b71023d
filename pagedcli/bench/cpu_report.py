"""What `make bench-cpu` found: rows, and the same as a table, as lines, as JSON and as a plot."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from pagedcli.bench.machine import MachineRates
from pagedcli.bench.peers import PeerBudget, PeerResult
from pagedcli.bench.roofline import Point, roofline_svg


@dataclass(slots=True)
class Row:
    """One workload.

    Attributes:
        engine: Model, dtype, variant and threads.
        workload: Which.
        title: For people.
        counts: What the rates count.
        tokens_per_s: Median over the runs.
        runs: Each run's rate.
        limit_tokens_per_s: What the machine could reach, memory being as fast as in between the runs (median).
        best_limit_tokens_per_s: The same at the best pass over memory that was seen.
        again_limit_tokens_per_s: The same where as many bytes as the weights are read again and again.
        read_bytes_per_s: The median of the passes over memory in between the runs.
        again_bytes_per_s: The same of those over as many bytes as the weights.
        bound_by: "operations" or "bytes".
        flops_per_byte: Operations over bytes, as counted.
        flops_per_s: Operations, as counted, over the median's time.
        dot_limit_tokens_per_s: On tiles: what the machine could reach with dots of bfloat16 alone; else 0.
        peers: Other engines on the same requests.
    """

    engine: str
    workload: str
    title: str
    counts: str
    tokens_per_s: float
    runs: list[float]
    limit_tokens_per_s: float
    best_limit_tokens_per_s: float
    again_limit_tokens_per_s: float
    read_bytes_per_s: float
    again_bytes_per_s: float
    bound_by: str
    flops_per_byte: float
    flops_per_s: float
    dot_limit_tokens_per_s: float = 0.0
    peers: dict[str, PeerResult] = field(default_factory=dict)

    @property
    def limit_share(self) -> float:
        """Part of the limit that was reached."""
        return self.tokens_per_s / self.limit_tokens_per_s

    @property
    def best_limit_share(self) -> float:
        """The same of the limit at memory's best."""
        return self.tokens_per_s / self.best_limit_tokens_per_s

    @property
    def again_limit_share(self) -> float:
        """The same of the limit of reading again."""
        return self.tokens_per_s / self.again_limit_tokens_per_s

    @property
    def dot_limit_share(self) -> float | None:
        """The same of the limit with dots; None if no tiles are in use."""
        return self.tokens_per_s / self.dot_limit_tokens_per_s if self.dot_limit_tokens_per_s else None


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


@dataclass(frozen=True, slots=True)
class PythonTime:
    """Milliseconds of a step outside the kernels.

    Attributes:
        whole_run: All of a run's, from requests to answers, over the number of its steps.
        usual_step: The median from one turn of the engine to the next.
    """

    whole_run: float
    usual_step: float


@dataclass(slots=True)
class Findings:
    """All of one run.

    Attributes:
        rates: Of the machine.
        settings: Model, dtype, threads and the like of the first engine.
        dtype: "float32" or "bfloat16".
        isa: Variant of the first engine.
        rows: In the order of measuring; those of one engine follow each other.
        python_ms: Python per step, by batch.
        ready: Of a fresh process; None: left out.
        budget: Of the peers; None: none was asked for.
        left_out: What was not measured.
    """

    rates: MachineRates
    settings: dict[str, Any]
    dtype: str
    isa: str
    rows: list[Row] = field(default_factory=list)
    python_ms: dict[int, PythonTime] = field(default_factory=dict)
    ready: Ready | None = None
    budget: PeerBudget | None = None
    left_out: Sequence[str] = ()


def table(rows: Sequence[Row]) -> Table:
    """Rows for people, a section for each engine."""
    peers = sorted({name for row in rows for name in row.peers})
    dots = any(row.dot_limit_share is not None for row in rows)
    shown = Table(title="tokens/s")
    shown.add_column("work")
    for name in (
        "paged",
        "limit",
        "of limit",
        "at best",
        "again",
        *(("of dots",) if dots else ()),
        "bound by",
        *peers,
    ):
        shown.add_column(name, justify="right")
    engine = ""
    for row in rows:
        if row.engine != engine:
            engine = row.engine
            shown.add_section()
            shown.add_row(f"[bold]{engine}[/bold]")
        others = [str(row.peers[name]) if name in row.peers else "-" for name in peers]
        share = row.dot_limit_share
        shown.add_row(
            "  " + row.title, f"{row.tokens_per_s:,.1f}", f"{row.limit_tokens_per_s:,.1f}", f"{row.limit_share:.0%}",
            f"{row.best_limit_share:.0%}", f"{row.again_limit_share:.0%}",
            *(("" if share is None else f"{share:.0%}",) if dots else ()), row.bound_by, *others,
        )  # fmt: skip
    return shown


def roofline(title: str, found: Findings) -> str:
    """The first engine's rows as a plot; the roof in use is the last."""
    rates = found.rates
    used = rates.flops_per_s(found.dtype, found.isa)
    all_roofs = {
        "float32, 256 bits": rates.f32_flops_per_s,
        "float32, 512 bits": rates.f32_wide_flops_per_s,
        "bfloat16 dots": rates.bf16_dot_flops_per_s,
        "bfloat16 tiles": rates.bf16_tile_flops_per_s,
    }
    roofs = sorted(
        ((name, rate) for name, rate in all_roofs.items() if rate), key=lambda roof: roof[1] == used
    )
    rows = [row for row in found.rows if row.engine == found.rows[0].engine]
    points = [Point(row.title, row.flops_per_byte, row.flops_per_s) for row in rows]
    return roofline_svg(title, points, rates.read_bytes_per_s, roofs, rows[0].again_bytes_per_s)


def notes(found: Findings) -> Iterator[str]:
    """What the table does not say."""
    rates = found.rates
    yield (
        f"Limits measured in this run, {rates.threads} threads: reading {rates.read_bytes_per_s / 1e9:.1f} GB/s at "
        f"best before the runs, {_span([row.read_bytes_per_s for row in found.rows])} in between (median, each row has "
        'its own; "at best" is the share at the best pass of all), '
        f"{_span([row.again_bytes_per_s for row in found.rows])} of as many bytes as the weights take, again and again "
        '("again" is the share of that; a last-level cache that keeps weights lets "of limit" pass 100%); '
        f"products in GFLOP/s: float32 {rates.f32_flops_per_s / 1e9:,.0f} at 256 and "
        f"{rates.f32_wide_flops_per_s / 1e9:,.0f} at 512 bits, bfloat16 dots {rates.bf16_dot_flops_per_s / 1e9:,.0f}, "
        f"tiles {rates.bf16_tile_flops_per_s / 1e9:,.0f}. A variant's limit is that of its own instructions: avx2 has "
        "float32 at 256 bits, avx512 at 512, avx512bf16 dots, amx tiles (and beside it, of dots)."
    )
    yield "Counted: the body's linears for every token, the head for every row of logits, attention; weights, KV."
    for batch, python in found.python_ms.items():
        yield (
            f"Python per step at batch {batch}: {python.whole_run:.3f} ms of whole runs, admission and answers "
            f"included; {python.usual_step:.3f} ms in the median step."
        )
    if found.ready is not None:
        ready = found.ready
        over = ready.peak_bytes - ready.weight_bytes - ready.kv_bytes
        yield (
            f"Ready, with the first token, in {ready.seconds:.2f} s; peak {ready.peak_bytes / 1e6:.0f} MB, of which "
            f"weights {ready.weight_bytes / 1e6:.0f}, KV {ready.kv_bytes / 1e6:.0f}, all else {over / 1e6:.0f}."
        )
    yield from _peer_notes(found)
    if found.left_out:
        yield f"Left out: {', '.join(found.left_out)}."


def _span(rates: Sequence[float]) -> str:
    return f"{min(rates) / 1e9:.1f} to {max(rates) / 1e9:.1f}" if rates else "not measured"


def _peer_notes(found: Findings) -> Iterator[str]:
    results = [(name, row, result) for row in found.rows for name, result in row.peers.items()]
    if found.budget is None:
        return
    if not results:
        yield "Other engines: none is installed (VENVS, MODELS and LLAMA_CB name where they are)."
        return
    yield (
        f"Other engines, in turn with ours: {found.budget.load_s:,.0f} s to load and {found.budget.workload_s:,.0f} s "
        "for each workload, warm-up included; what takes longer is ended and has no rate."
    )
    loads: Mapping[str, PeerResult] = {
        name: result for name, _, result in results if result.load_s is not None
    }
    for name, result in loads.items():
        yield f"{name} {result.version}".rstrip() + f": loaded in {result.load_s:.1f} s."
    for name, row, result in results:
        if result.error is not None:
            yield f"{name} failed on {row.title}: {result.error}"


def report(found: Findings) -> dict[str, Any]:
    """The same as JSON."""
    shares = [
        {
            "limit_share": row.limit_share,
            "best_limit_share": row.best_limit_share,
            "again_limit_share": row.again_limit_share,
            "dot_limit_share": row.dot_limit_share,
        }
        for row in found.rows
    ]
    return {
        "settings": {**found.settings, "isa": found.isa},
        "machine": {"limits": dataclasses.asdict(found.rates), "load": os.getloadavg()},
        "rows": [{**dataclasses.asdict(row), **share} for row, share in zip(found.rows, shares, strict=True)],
        "python_ms_per_step": {batch: python.whole_run for batch, python in found.python_ms.items()},
        "python_ms_of_usual_step": {batch: python.usual_step for batch, python in found.python_ms.items()},
        "ready": None if found.ready is None else dataclasses.asdict(found.ready),
        "peer_budget": None if found.budget is None else dataclasses.asdict(found.budget),
        "left_out": list(found.left_out),
    }
