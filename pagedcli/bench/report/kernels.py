"""The report of `paged bench kernels`: a table for each op of each family, and how much of the limits is reached.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pagedcli.bench.report.document import Bar, BarPlot, Block, Column, Section, Table
from pagedcli.bench.report.numbers import MISSING, number

CaseDict = Mapping[str, Any]

OPS = {
    "linear": "Linears",
    "head": "Head",
    "attention": "Paged attention",
    "norm": "Residual and RMS norm",
    "rope": "Rotation and KV write",
    "gated": "Gated activation",
    "embedding": "Embedding",
    "sampler": "Sampler",
}
BASE = "torch"
LIMITED = ("linear", "head", "attention")
IN_CACHE = (
    "No limit was measured for this: the data lies in the caches, as it does between the layers of a model."
)
ATTENTION = "Sequences x context / page size."
HOW = (
    "x torch: over 1 is faster than torch's own op; = where the interval holds 1 and no difference is shown."
)


def kernel_sections(data: Mapping[str, Any]) -> list[Section]:
    """One for each family and op, and one of what was left out."""
    groups: dict[tuple[str, str], list[CaseDict]] = {}
    for case in data["cases"]:
        groups.setdefault((", ".join(case["families"]), case["op"]), []).append(case)
    sections = [
        Section(f"{family}: {OPS.get(op, op)}", list(_blocks(op, cases)))
        for (family, op), cases in groups.items()
    ]
    return [*sections, *_notes(data)]


def _blocks(op: str, cases: Sequence[CaseDict]) -> Iterator[Block]:
    yield _table(op, cases)
    bars = list(_bars(cases))
    if op in ("linear", "head") and bars:
        caption = (
            "One row: a decode of one sequence, its weights read from memory. 100% is reading memory alone."
        )
        yield BarPlot("Share of the limit, one row", bars, "share of the measured limit (%)", caption)


def _table(op: str, cases: Sequence[CaseDict]) -> Table:
    """A row for each case and variant; torch's own op is a column, unless nothing else ran."""
    variants = {name for case in cases for name in _measured(case)}
    shown = variants - {BASE} or variants
    is_beside = BASE in variants - shown
    one = next(iter(shown)) if len(shown) == 1 else ""
    columns = [
        Column("Case", is_number=False),
        Column("Format", is_number=False),
        Column("Rows"),
        *([] if one else [Column("Variant", is_number=False)]),
        Column("Time", "µs"),
        Column("Rate"),
        *([Column("Of limit")] if op in LIMITED else []),
        *([Column("x torch")] if is_beside else []),
    ]
    rows = [
        _row(case, name, is_beside, without_name=bool(one), is_limited=op in LIMITED)
        for case in cases
        for name in _measured(case)
        if name in shown
    ]
    return Table(columns, rows, _note(op, cases, one, is_beside), num_keys=3 if one else 4)


def _measured(case: CaseDict) -> list[str]:
    return [name for name, found in case["variants"].items() if "missing" not in found]


def _note(op: str, cases: Sequence[CaseDict], one: str, is_beside: bool) -> str:
    called = {case["variants"][BASE]["called"] for case in cases if BASE in _measured(case)}
    parts = [
        f"Variant: {one}." if one else "",
        ATTENTION if op == "attention" else "",
        IN_CACHE if op not in LIMITED else "",
        f"{HOW} Torch's own: {'; '.join(sorted(called))}." if is_beside else "",
    ]
    return " ".join(part for part in parts if part)


def _row(case: CaseDict, name: str, is_beside: bool, *, without_name: bool, is_limited: bool) -> list[str]:
    found = case["variants"][name]
    row = [case["name"], case["format"], f"{case['rows']:,}"]
    row += [] if without_name else [name]
    row += [time_text(found["seconds"], with_interval=not is_beside), rate_text(found)]
    row += [limit_text(found)] if is_limited else []
    if found["error"] > 1:
        row[0] = f"WRONG RESULT: {row[0]}"
    if is_beside:
        row.append(times_text(found.get("times_torch")))
    return row


def time_text(seconds: Mapping[str, float], *, with_interval: bool) -> str:
    """Microseconds, and half of the interval in percent: 24.6 ±5%."""
    text = number(seconds["median"] * 1e6)
    spread = (seconds["high"] - seconds["low"]) / 2 / seconds["median"]
    return f"{text} ±{spread:.0%}" if with_interval else text


def rate_text(found: Mapping[str, Any]) -> str:
    """Of what limits it: bytes, or operations where arithmetic does."""
    if found.get("limit") == "arithmetic":
        return f"{number(found['gflop_per_s'])} GFLOP/s"
    return f"{number(found['gb_per_s'])} GB/s"


def limit_text(found: Mapping[str, Any]) -> str:
    """Such as 46% memory."""
    if found.get("share") is None:
        return MISSING
    return f"{found['share']:.0%} {'products' if found['limit'] == 'arithmetic' else 'memory'}"


def times_text(ratio: Mapping[str, float] | None) -> str:
    """Such as 2.31 (2.25-2.40), with a sign where the interval holds 1."""
    if ratio is None:
        return MISSING
    text = f"{number(ratio['median'])} ({number(ratio['low'])}-{number(ratio['high'])})"
    return f"= {text}" if ratio["low"] <= 1 <= ratio["high"] else text


def _bars(cases: Sequence[CaseDict]) -> Iterator[Bar]:
    for case in cases:
        for name in _measured(case):
            part = case["variants"][name]["share"]
            if case["rows"] == 1 and part is not None:
                yield Bar(f"{case['name']} {case['format']}, {name}", part * 100, f"{part:.0%}")


def _notes(data: Mapping[str, Any]) -> Iterator[Section]:
    reasons: dict[str, list[str]] = {}
    for case in data["cases"]:
        for name, found in case["variants"].items():
            if "missing" in found:
                example = f"{case['name']} {case['format']}, {case['rows']} rows"
                reasons.setdefault(f"{name}: {found['missing']}", []).append(example)
    lines = [
        f"{reason} ({len(names)} of {len(data['cases'])} cases, such as {names[0]})"
        for reason, names in reasons.items()
    ]
    texts = [*data.get("notes", []), *lines]
    if texts:
        yield Section("What to know", texts)
