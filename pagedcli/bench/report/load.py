"""The report of a run over HTTP: rates, goodput, latencies, failures, the client, the saturation point. Stdlib only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pagedcli.bench.report.document import Block, Column, Line, LinePlot, Section, Table
from pagedcli.bench.report.figures import LATENCIES, figure, find
from pagedcli.bench.report.numbers import MISSING, count, number, share
from pagedcli.bench.report.series import distribution, over_time

LoadDict = Mapping[str, Any]


def load_sections(run: LoadDict) -> list[Section]:
    """Of what `paged bench serve` wrote."""
    sections = [Section("Rates", [_rates(run), *_notes(run)])]
    if run.get("saturation"):
        ended = ["The search was interrupted."] if run.get("interrupted") else []
        sections.append(Section("Saturation", [*ended, *_saturation(run["saturation"])]))
    sections.append(Section("Latency", list(_latencies(run))))
    if run.get("errors"):
        columns = [Column("Error", is_number=False), Column("Requests")]
        rows = [(text, count(times)) for text, times in run["errors"].items()]
        sections.append(Section("Failed requests", [Table(columns, rows)]))
    if line := over_time(run, "running", "in flight"):
        plot = LinePlot("Requests in flight", [line], "seconds", "requests", is_step=True)
        sections.append(Section("Over time", [plot]))
    return sections


def _rates(run: LoadDict) -> Table:
    rows = [
        ("Arrivals", _arrivals(run.get("arrivals") or {}), ""),
        ("Requests", count(figure(run, "requests")), ""),
        ("Failed", count(figure(run, "failed")), ""),
        ("Served", number(figure(run, "throughput.requests_per_s")), "/s"),
        ("Output", number(figure(run, "throughput.output_tokens_per_s")), "tokens/s"),
        ("All tokens", number(figure(run, "throughput.total_tokens_per_s")), "tokens/s"),
    ]
    if run.get("goodput"):
        targets = "; ".join(
            f"{name.removesuffix('_s').upper()} {number(seconds * 1e3)} ms"
            for name, seconds in run["goodput"]["targets"].items()
        )
        rows.append((f"Goodput: {targets}", number(figure(run, "goodput.requests_per_s")), "/s"))
        rows.append(("Requests within these targets", share(figure(run, "goodput.share")), ""))
    for key, name in (("prefix_hit_rate", "Prefix hits, as the server says"),):
        if figure(run, key) is not None:
            rows.append((name, share(figure(run, key)), ""))
    for key, name in (
        ("preemptions", "Preemptions, as the server says"),
        ("unfinished", "Without an answer at the end"),
    ):
        if figure(run, key):
            rows.append((name, count(figure(run, key)), ""))
    rows.append(("Client: part of a core", share(figure(run, "client.cpu")), ""))
    if (late := figure(run, "client.late_s.p99")) is not None:
        rows.append(("Client: sent late, p99", number(late * 1e3), "ms"))
    return Table(
        [Column("Figure", is_number=False), Column("Value"), Column("Unit", is_number=False)],
        rows,
        note=_counted(run),
    )


def _arrivals(told: LoadDict) -> str:
    """How requests came, in words."""
    kind, rate = str(told.get("kind", "")), number(figure(told, "requests_per_s"))
    if kind == "closed loop":
        return f"closed loop, {told['concurrency']} at once"
    if kind == "trace":
        return f"as the trace says, gaps times {number(figure(told, 'time_scale'))}"
    if kind == "bursts":
        return f"bursts of {told['size']}, {rate} requests/s"
    if kind == "ramp":
        return f"ramp from {rate} to {number(figure(told, 'last_rate'))} requests/s"
    return f"{kind}, {rate} requests/s"


def _counted(run: LoadDict) -> str:
    """What was counted how."""
    told = run.get("counted") or {}
    parts = [f"Latencies count from {told['from']}." if told.get("from") else ""]
    if told.get("by_events"):
        parts.append(
            f"Output tokens of {told['by_usage']} answers as the server's usage says, of {told['by_events']} as events "
            "with text."
        )
    elif told.get("by_usage"):
        parts.append("Tokens as the server's usage says.")
    per_event = told.get("tokens_per_event")
    if per_event and per_event > 1.05:
        parts.append(f"An event brought {number(per_event)} tokens: ITL is the time between two events.")
    parts += [f"{name}: {times} answers." for name, times in (told.get("doubts") or {}).items()]
    return " ".join(part for part in parts if part)


def _notes(run: LoadDict) -> Iterator[str]:
    for note in run.get("notes") or ():
        yield f"Note: {note}."


def _latencies(run: LoadDict) -> Iterator[Block]:
    columns = [
        Column("Latency", is_number=False),
        *(Column(name, "ms") for name in ("mean", "p50", "p90", "p99")),
    ]
    rows = []
    for key, name in LATENCIES:
        values = [figure(run, f"{key}.{part}") for part in ("mean", "p50", "p90", "p99")]
        rows.append((name, *(MISSING if value is None else number(value * 1e3) for value in values)))
    yield Table(columns, rows)
    for key, name in LATENCIES:
        if plot := distribution(name, [("", run)], key):
            yield plot


def _saturation(found: LoadDict) -> Iterator[Block]:
    yield f"{_verdict(found)} Criterion: {found['criterion']}."
    if found.get("note"):
        yield f"Note: {found['note']}."
    columns = [
        Column("Rate", "/s"),
        Column("Kept up", is_number=False),
        Column("Judged by"),
        Column("Served", "/s"),
    ]
    columns += [Column("Output", "tokens/s"), Column("TTFT p50", "ms"), Column("TTFT p99", "ms")]
    columns += [Column("TPOT p50", "ms"), Column("Failed")]
    trials = sorted(found["trials"], key=lambda trial: float(trial["rate"]))
    yield Table(columns, [_trial(trial) for trial in trials])
    yield from _curves(trials)


def _verdict(found: LoadDict) -> str:
    low, high = found.get("rate"), found.get("above")
    if low is None:
        return f"No rate was kept up with, down to {number(high)} requests/s."
    if high is None:
        return f"Not reached: {number(low)} requests/s were kept up with."
    open_end = "" if found.get("is_found") else " (the search ended early)"
    return f"The largest rate kept up with is {number(low)} requests/s; {number(high)} was not{open_end}."


def _trial(trial: LoadDict) -> tuple[str, ...]:
    def milliseconds(path: str) -> str:
        value = figure(trial, path)
        return MISSING if value is None else number(value * 1e3)

    return (
        number(figure(trial, "rate")),
        "yes" if trial["is_kept"] else "no",
        share(figure(trial, "share")),
        number(figure(trial, "throughput.requests_per_s")),
        number(figure(trial, "throughput.output_tokens_per_s")),
        milliseconds("ttft_s.p50"),
        milliseconds("ttft_s.p99"),
        milliseconds("tpot_s.p50"),
        count(figure(trial, "failed")),
    )


def _curves(trials: Sequence[LoadDict]) -> Iterator[Block]:
    for key, name in LATENCIES[:2]:
        lines = []
        for part in ("p50", "p99"):
            points = [(trial["rate"], find(trial, f"{key}.{part}")) for trial in trials]
            known = [(rate, value * 1e3) for rate, value in points if value is not None]
            if len(known) > 1:
                lines.append(Line(part, [rate for rate, _ in known], [value for _, value in known]))
        if lines:
            yield LinePlot(
                f"{name} by rate",
                lines,
                "requests per second",
                "ms",
                "Where it bends upwards, requests wait.",
            )
