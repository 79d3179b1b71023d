"""The report of one run, and of a sweep over settings. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedcli.bench.report import figures as f
from pagedcli.bench.report.document import (
    Block,
    Column,
    Line,
    LinePlot,
    ParetoPlot,
    Point,
    Section,
    Surface,
    Table,
)
from pagedcli.bench.report.head import described
from pagedcli.bench.report.numbers import MISSING, number
from pagedcli.bench.report.series import distribution, over_time, use_line

RunDict = Mapping[str, Any]
RUN_FIGURES = (
    f.Figure("requests", "Requests"),
    f.FAILED,
    f.REQUEST_RATE,
    f.OUTPUT_RATE,
    f.TOTAL_RATE,
    f.AT_ONCE,
    f.KV_USE,
    f.INTERNAL,
    f.EXTERNAL,
    f.HIT_RATE,
    f.PREEMPTIONS,
    f.RECOMPUTED,
    f.BUSY,
    f.LIMIT_SHARE,
    f.BANDWIDTH_SHARE,
    f.ARITHMETIC_SHARE,
)
SWEEP_FIGURES = (
    f.OUTPUT_RATE,
    f.TOTAL_RATE,
    f.TTFT_P50,
    f.TTFT_P99,
    f.TPOT,
    f.E2E_P99,
    f.AT_ONCE,
    f.KV_USE,
    f.HIT_RATE,
    f.PREEMPTIONS,
    f.LIMIT_SHARE,
)
NAMES = {
    "page_size": "Page size, tokens",
    "num_pages": "Pages",
    "max_num_seqs": "Requests at once, at most",
    "max_num_batched_tokens": "Tokens in a step, at most",
    "threads": "Threads",
    "policy": "Policy",
    "kv_bytes": "KV memory, bytes",
}


def run_sections(run: RunDict) -> list[Section]:
    """Of one run."""
    sections = [Section("Rates and memory", [_vertical(run)]), Section("Latency", _latency(run))]
    if memory := _memory_plots(run):
        sections.append(Section("Over time", memory))
    details = [(name, key) for name, key in _DETAILS if run.get(key)]
    if details:
        rows = [(name, described(run[key])) for name, key in details]
        columns = [Column("Part", is_number=False), Column("What was measured", is_number=False)]
        sections.append(Section("Where the time went", [Table(columns, rows)]))
    return sections


_DETAILS = (
    ("Gaps of the executor, by cause", "gap_s"),
    ("Parts of a step", "step_s"),
    ("Block tables", "block_tables"),
)


def _vertical(run: RunDict) -> Table:
    """A figure a row."""
    rows = []
    for item in f.known(RUN_FIGURES, [run]):
        column, texts = item.column([run])
        rows.append(
            (column.title, texts[0], column.unit, f.rate_interval(run) if item is f.OUTPUT_RATE else "")
        )
    columns = [Column("Figure", is_number=False), Column("Value"), Column("Unit", is_number=False)]
    if any(row[3] for row in rows):
        return Table([*columns, Column("95% interval")], rows)
    return Table(columns, [row[:3] for row in rows])


def _latency(run: RunDict) -> list[Block]:
    columns = [Column("Seconds from the arrival of a request", is_number=False)]
    columns += [Column(name, "ms") for name in ("mean", "p50", "p90", "p99")]
    rows = []
    for key, name in f.LATENCIES:
        values = [f.figure(run, f"{key}.{part}") for part in ("mean", "p50", "p90", "p99")]
        if any(value is not None for value in values):
            rows.append((name, *(MISSING if value is None else number(value * 1e3) for value in values)))
    blocks: list[Block] = [Table([Column("Latency", is_number=False), *columns[1:]], rows)]
    plots = [distribution(name, [("", run)], key) for key, name in f.LATENCIES]
    return [*blocks, *(plot for plot in plots if plot is not None)]


def _memory_plots(run: RunDict) -> list[Block]:
    tokens = [
        line
        for column, name in (
            ("allocated_tokens", "allocated"),
            ("stored_tokens", "stored"),
            ("cached_tokens", "cached"),
        )
        if (line := over_time(run, column, name))
    ]
    counts = [line for column in ("running", "waiting") if (line := over_time(run, column, column))]
    blocks: list[Block] = []
    if tokens:
        caption = (
            "Token slots allocated to running requests, the tokens stored in them, and cached slots "
            "that may be evicted."
        )
        blocks.append(LinePlot("KV memory over time", tokens, "seconds", "tokens", caption, is_step=True))
    if use := use_line(run, "KV use"):
        blocks.append(
            LinePlot("KV use over time", [use], "seconds", "stored / allocated", is_share=True, is_step=True)
        )
    if counts:
        blocks.append(LinePlot("Requests over time", counts, "seconds", "requests", is_step=True))
    return blocks


def swept(runs: Sequence[RunDict]) -> list[str]:
    """The settings that were swept; of runs that do not say it, those in which they differ, in their order."""
    if told := list(runs[0].get("swept") or ()):
        return told
    keys = list(dict.fromkeys(key for run in runs for key in run.get("settings", {})))
    return [key for key in keys if len({str(f.find(run, f"settings.{key}")) for run in runs}) > 1]


def sweep_sections(runs: Sequence[RunDict]) -> list[Section]:
    """Of runs that differ in settings."""
    keys = swept(runs)
    blocks: list[Block] = [_sweep_table(runs, keys)]
    if len(keys) == 1:
        blocks += _curves(runs, keys[0])
    for x, y in [(x, y) for place, y in enumerate(keys) for x in keys[place + 1 :]][:3]:
        blocks += _surfaces(runs, x, y)
    blocks.append(_pareto(runs, keys))
    return [Section("All settings", blocks), *_latency_of_best(runs, keys)]


def _label(run: RunDict, keys: Sequence[str]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {setting(run, key)}" for key in keys) or "as set"


def setting(run: RunDict, key: str) -> str:
    """A setting's value as text."""
    return described(f.find(run, f"settings.{key}"))


def _sweep_table(runs: Sequence[RunDict], keys: Sequence[str]) -> Table:
    columns = [Column(NAMES.get(key, key.replace("_", " "))) for key in keys]
    cells = [[setting(run, key) for run in runs] for key in keys]
    failed = (f.FAILED,) if any(f.FAILED.of(run) for run in runs) else ()
    for item in f.known((*failed, *SWEEP_FIGURES), runs):
        column, texts = item.column(runs)
        columns.append(column)
        cells.append(texts)
        if item is f.OUTPUT_RATE and any(intervals := [f.rate_interval(run) for run in runs]):
            columns.append(Column("95% interval", column.unit))
            cells.append(intervals)
    if any(shown := [str(f.find(run, "against_first.verdict") or "") for run in runs]):
        columns.append(Column("Output, against the first", is_number=False))
        cells.append(shown)
    rates = [f.OUTPUT_RATE.of(run) or 0.0 for run in runs]
    best = frozenset({rates.index(max(rates))})
    return Table(
        columns, list(zip(*cells, strict=True)), "Bold: most output tokens/s.", best, max(1, len(keys))
    )


def _curves(runs: Sequence[RunDict], key: str) -> list[Block]:
    """Throughput and KV use over the one setting that changes, if it is a number."""
    values = [f.figure(run, f"settings.{key}") for run in runs]
    if any(value is None for value in values):
        return []
    x = [float(value) for value in values if value is not None]
    rate = Line("", x, [f.OUTPUT_RATE.of(run) or 0.0 for run in runs])
    use = Line("", x, [f.KV_USE.of(run) or 0.0 for run in runs])
    name = NAMES.get(key, key.replace("_", " "))
    return [
        LinePlot(f"Throughput over {key.replace('_', ' ')}", [rate], name, "output tokens/s", log_x=True),
        LinePlot(f"KV use over {key.replace('_', ' ')}", [use], name, "KV use", is_share=True, log_x=True),
    ]


def _surfaces(runs: Sequence[RunDict], x: str, y: str) -> list[Block]:
    xs, ys = (list(dict.fromkeys(setting(run, key) for run in runs)) for key in (x, y))
    blocks: list[Block] = []
    for item, title, unit, factor, better in (
        (f.OUTPUT_RATE, "Throughput", "output tokens/s", 1.0, max),
        (f.TPOT, "Time per output token", "ms", 1e3, min),
    ):
        values = []
        for row in ys:
            cells = [
                [item.of(run) for run in runs if setting(run, x) == column and setting(run, y) == row]
                for column in xs
            ]
            known = [[value * factor for value in cell if value is not None] for cell in cells]
            values.append([better(cell) if cell else None for cell in known])
        caption = (
            f"{title}, {unit}; {'more' if better is max else 'less'} is better. Of further settings the "
            "best is shown."
        )
        if any(value is not None for line in values for value in line):
            blocks.append(
                Surface(title, NAMES.get(x, x), NAMES.get(y, y), xs, ys, values, unit, caption, better is max)
            )
    return blocks


def _pareto(runs: Sequence[RunDict], keys: Sequence[str]) -> ParetoPlot:
    points = []
    for run in runs:
        latency, rate = f.TPOT.of(run), f.OUTPUT_RATE.of(run)
        if latency is not None and rate is not None:
            points.append(Point(_short_label(run, keys), latency * 1e3, rate))
    caption = "Settings on the line are beaten by no other in both; hollow squares are."
    names = " / ".join(key.replace("_", " ") for key in keys)
    if names:
        caption += f" Named by {names}."
    return ParetoPlot("Latency against throughput", points, "TPOT mean, ms", "output tokens/s", caption)


def _short_label(run: RunDict, keys: Sequence[str]) -> str:
    return " / ".join(setting(run, key) for key in keys)


def _latency_of_best(runs: Sequence[RunDict], keys: Sequence[str]) -> list[Section]:
    """Distributions of the settings on the front, five at most."""
    ordered = sorted(runs, key=lambda run: -(f.OUTPUT_RATE.of(run) or 0.0))[:5]
    named = [(_short_label(run, keys), run) for run in ordered]
    plots = [distribution(name, named, key) for key, name in f.LATENCIES if key in ("ttft_s", "e2e_s")]
    blocks = [plot for plot in plots if plot is not None]
    return [Section("Latency of the fastest settings", blocks)] if blocks else []
