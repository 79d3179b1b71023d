"""The report of `paged bench compare`: what each mechanism brings, the claims, and the experiments behind them.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedcli.bench.report import figures as f
from pagedcli.bench.report.document import (
    Bar,
    BarPlot,
    Block,
    Claims,
    ClaimText,
    Column,
    Line,
    LinePlot,
    ParetoPlot,
    Point,
    Section,
    Table,
)
from pagedcli.bench.report.head import other_load
from pagedcli.bench.report.numbers import MISSING, count, number, ratio, share
from pagedcli.bench.report.series import distribution, use_line

ROW_FIGURES = (
    f.OUTPUT_RATE,
    f.SPEEDUP,
    f.TTFT,
    f.TPOT,
    f.E2E,
    f.AT_ONCE,
    f.Figure("context_tokens", "Longest context", "tokens", count),
    f.KV_USE,
    f.INTERNAL,
    f.EXTERNAL,
    f.HIT_RATE,
    f.PREEMPTIONS,
)
WATCHED = ("contiguous, continuous", "first-fit, continuous", "paged, continuous")
"""Rows whose KV use is drawn over time."""
ARM_FIGURES = (
    f.Figure("output_tokens_per_s", "Output", "tokens/s"),
    f.Figure("ttft_s", "TTFT mean", "s"),
    f.Figure("tpot_s", "TPOT mean", "s"),
    f.Figure("e2e_s", "Whole answer, mean", "s"),
    f.AT_ONCE,
    f.Figure("longest_tokens", "Longest", "tokens", count),
    f.KV_USE,
    f.EXTERNAL,
    f.Figure("swing", "Swing", "", share),
    f.Figure("scheduler_us_per_step", "Scheduler", "µs a step"),
    f.Figure("short_e2e_s", "Short ones, p50", "s"),
    f.Figure("long_e2e_s", "Long ones, p50", "s"),
)


def comparison_sections(data: Mapping[str, Any]) -> list[Section]:
    """All sections."""
    return [
        Section("What each mechanism brings", _mechanisms(data)),
        Section("The claims, on this machine", _claims(data)),
        *(_experiment(item) for item in data["experiments"]),
    ]


def _mechanisms(data: Mapping[str, Any]) -> list[Block]:
    rows: Sequence[Mapping[str, Any]] = data["rows"]
    blocks: list[Block] = [data["about"]]
    if other_load(data).startswith("noticed"):
        blocks.append(f"Other load {other_load(data)}.")
    blocks.append(table_of(rows, "", ROW_FIGURES, note=data.get("note", "")))
    blocks += list(data.get("left_out", ()))
    blocks += [_rates(rows), _concurrency(rows), *_over_time(rows), *_latencies(rows)]
    return blocks


def table_of(
    rows: Sequence[Mapping[str, Any]], title: str, figures: Sequence[f.Figure], *, note: str = ""
) -> Table:
    """A row for each mapping, named by its `name`; figures that none of them has are left out."""
    columns, cells = [Column(title, is_number=False)], [[str(row["name"]) for row in rows]]
    for item in f.known(figures, rows):
        column, texts = item.column(rows)
        columns.append(column)
        cells.append(texts)
    return Table(columns, list(zip(*cells, strict=True)), note)


def _rates(rows: Sequence[Mapping[str, Any]]) -> BarPlot:
    bars = []
    for row in rows:
        value = f.OUTPUT_RATE.of(row)
        text = f"{number(value)} ({ratio(f.SPEEDUP.of(row))})"
        bars.append(Bar(row["name"], value or 0.0, text, _interval(row.get("output_tokens_per_s_interval"))))
    caption = "Median over the rounds with its interval; in brackets, times the first row."
    return BarPlot("Throughput of the same requests in the same memory", bars, "output tokens/s", caption)


def _interval(pair: Any) -> tuple[float, float] | None:
    return (pair[0], pair[1]) if pair else None


def _concurrency(rows: Sequence[Mapping[str, Any]]) -> BarPlot:
    bars = [
        Bar(row["name"], value, number(value)) for row in rows if (value := f.AT_ONCE.of(row)) is not None
    ]
    return BarPlot("Requests that ran at once, at most", bars, "requests", "In the same memory.")


def _over_time(rows: Sequence[Mapping[str, Any]]) -> list[Block]:
    lines = [line for row in rows if row["name"] in WATCHED if (line := use_line(row, row["name"]))]
    if not lines:
        return []
    caption = (
        "Tokens stored over token slots allocated to running requests: the rest of each line to 100% is "
        "reserved or "
        "unfilled. A line ends where its last request does."
    )
    return [LinePlot("KV use over time", lines, "seconds", "KV use", caption, is_share=True, is_step=True)]


def _latencies(rows: Sequence[Mapping[str, Any]]) -> list[Block]:
    chosen = [row for row in rows if row["name"] in (*WATCHED, "paged, static")]
    found = [
        distribution(title, [(row["name"], row) for row in chosen], key)
        for key, title in (("ttft_s", "Time to the first token"), ("e2e_s", "Time to the whole answer"))
    ]
    return [plot for plot in found if plot is not None]


def _claims(data: Mapping[str, Any]) -> list[Block]:
    claims = data["claims"]
    counts: dict[str, int] = {}
    for claim in claims:
        counts[claim["verdict"]] = counts.get(claim["verdict"], 0) + 1
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    texts = [ClaimText(claim["text"], claim["test"], _measured(claim), claim["verdict"]) for claim in claims]
    return [
        f"Of {len(claims)} claims made for paged engines: {told}. Intervals are those of paired rounds.",
        Claims(texts),
    ]


def _measured(claim: Mapping[str, Any]) -> str:
    text = str(claim["measured"]) or MISSING
    return text[:1].upper() + text[1:]


def _experiment(data: Mapping[str, Any]) -> Section:
    blocks: list[Block] = [data["about"], table_of(data["arms"], data["of"], ARM_FIGURES)]
    drawn = _DRAWN.get(data["name"])
    if drawn is not None:
        blocks += drawn(data["arms"])
    return Section(data["title"], blocks)


Arms = Sequence[Mapping[str, Any]]


def _balance(arms: Arms) -> list[Block]:
    points = [Point(arm["name"], arm["tpot_s"] * 1e3, arm["output_tokens_per_s"]) for arm in arms]
    caption = (
        "Each point is a batch size. Along the line more throughput costs latency; hollow squares are "
        "beaten in both."
    )
    return [ParetoPlot("Latency against throughput", points, "TPOT, ms", "output tokens/s", caption)]


def _over_pages(arms: Arms) -> list[Block]:
    sizes = [float(arm["name"]) for arm in arms]
    rates = Line("", sizes, [arm["output_tokens_per_s"] for arm in arms])
    uses = Line("", sizes, [arm["kv_use"] for arm in arms])
    return [
        LinePlot("Throughput over page size", [rates], "tokens in a page", "output tokens/s", log_x=True),
        LinePlot("KV use over page size", [uses], "tokens in a page", "KV use", is_share=True, log_x=True),
    ]


def _waits(arms: Arms) -> list[Block]:
    bars = [
        Bar(arm["name"], arm["short_e2e_s"] * 1e3, f"{number(arm['short_e2e_s'] * 1e3)} ms")
        for arm in arms
        if arm.get("short_e2e_s") is not None
    ]
    return [BarPlot("The median short request, until its answer", bars, "ms", "By policy, beside long ones.")]


def _speeds(arms: Arms) -> list[Block]:
    bars = [Bar(arm["name"], arm["output_tokens_per_s"], number(arm["output_tokens_per_s"])) for arm in arms]
    return [BarPlot("Decoding speed, one request at a time", bars, "output tokens/s")]


_DRAWN = {"batch": _balance, "pages": _over_pages, "fairness": _waits, "int4": _speeds}
