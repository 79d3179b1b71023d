"""The report of `paged bench kernels`: a table for each op of each family, and how much of the limits is reached.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pagedcli.bench.report.document import Bar, BarPlot, Block, Column, Section, Table
from pagedcli.bench.report.numbers import MISSING, number, share

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
WITH_FLOPS = ("linear", "head", "attention")
IN_CACHE = "Data lies in the caches here, as between the layers of a model: no limit was measured for it."
FEW_ROWS = 1


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
        caption = "Whole weights from memory for one row: a decode of one sequence. 100% is reading memory, nothing else."
        yield BarPlot("Share of the limit, one row", bars, "share of the measured limit (%)", caption)


def _table(op: str, cases: Sequence[CaseDict]) -> Table:
    with_flops = op in WITH_FLOPS
    columns = [
        Column("Case", is_number=False),
        Column("Format", is_number=False),
        Column("Rows"),
        Column("Variant", is_number=False),
        Column("Time", "µs"),
        Column("±", "%"),
        Column("Moved", "GB/s"),
        *(
            [Column("Products", "GFLOP/s"), Column("Of the limit"), Column("Limit", is_number=False)]
            if with_flops
            else []
        ),
        Column("Faster than torch", "times"),
    ]
    rows = [
        _row(case, variant, found, with_flops)
        for case in cases
        for variant, found in case["variants"].items()
        if "missing" not in found
    ]
    named = sorted({case["torch_op"] for case in cases})
    note = "" if with_flops else f"{IN_CACHE} "
    if any("torch" in case["variants"] and "missing" not in case["variants"]["torch"] for case in cases):
        note += f"Torch's own op: {'; '.join(named)}."
    return Table(columns, rows, note.strip(), num_keys=4)


def _row(case: CaseDict, variant: str, found: Mapping[str, Any], with_flops: bool) -> list[str]:
    seconds = found["seconds"]
    spread = (seconds["high"] - seconds["low"]) / 2 / seconds["median"]
    row = [
        case["name"],
        case["format"],
        f"{case['rows']:,}",
        variant if not found["error"] > 1 else f"{variant}: WRONG RESULT",
        number(seconds["median"] * 1e6),
        number(spread * 100, 2),
        number(found["gb_per_s"]),
    ]
    if with_flops:
        row += [number(found["gflop_per_s"]), share(found["share"]), found["limit"] or MISSING]
    return [*row, times_text(found.get("times_torch"))]


def times_text(ratio: Mapping[str, float] | None) -> str:
    """2.31 (2.25-2.40), with a sign where the interval holds 1."""
    if ratio is None:
        return MISSING
    text = f"{number(ratio['median'])} ({number(ratio['low'])}-{number(ratio['high'])})"
    return f"{text} =" if ratio["low"] <= 1 <= ratio["high"] else text


def _bars(cases: Sequence[CaseDict]) -> Iterator[Bar]:
    for case in cases:
        for variant, found in case["variants"].items():
            if case["rows"] == FEW_ROWS and found.get("share") is not None:
                part = found["share"]
                yield Bar(f"{case['name']} {case['format']}, {variant}", part * 100, share(part))


def _notes(data: Mapping[str, Any]) -> Iterator[Section]:
    reasons: dict[str, list[str]] = {}
    for case in data["cases"]:
        for variant, found in case["variants"].items():
            if "missing" in found:
                name = f"{case['name']} {case['format']}, {case['rows']} rows"
                reasons.setdefault(f"{variant}: {found['missing']}", []).append(name)
    lines = [
        f"{reason} ({len(names)} of {len(data['cases'])} cases, such as {names[0]})"
        for reason, names in reasons.items()
    ]
    texts = [*data.get("notes", []), *lines]
    if texts:
        yield Section("What to know", texts)
