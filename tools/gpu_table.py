"""What `make gpu-check` found, as Markdown. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Rows = list[tuple[str, ...]]


def markdown(device: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """Parts, kernels, models; a part without data is a line of the first table alone."""
    lines = [
        f"# {device['gpu']}, torch {device['torch']}, CUDA {device['cuda']}, Python {device['python']}",
        "",
    ]
    parts = [(part["name"], part["outcome"], f"{part['seconds']:.1f}") for part in results]
    lines += table(("part", "outcome", "s"), parts)
    data = {part["name"]: part["data"] for part in results if part["data"]}
    if "kernels" in data:
        lines += kernel_lines(data["kernels"])
    models = [found for found in data.values() if "engine" in found]
    if models:
        lines += model_lines(models)
    return "\n".join(lines) + "\n"


def table(head: Sequence[str], rows: Rows) -> list[str]:
    """Lines of one table, an empty one after it."""
    written = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(row) + " |" for row in written] + [""]


def kernel_lines(found: Mapping[str, Any]) -> list[str]:
    """Each case: our time, its rate beside that of a copy, and torch's own op."""
    copying = found["bytes_per_s"]
    rows: Rows = [_kernel_row(case, copying) for case in found["cases"]]
    head = (
        "op",
        "case",
        "format",
        "rows",
        "ours µs",
        "GB/s",
        "of a copy",
        "torch µs",
        "torch / ours",
        "error",
    )
    said = [f"left out: {found['left_out']}", ""] if found.get("left_out") else []
    return [f"Kernels; a copy moves {copying / 1e9:,.0f} GB/s.", "", *table(head, rows), *said]


def _kernel_row(case: Mapping[str, Any], copying: float) -> tuple[str, ...]:
    ours, torch = (case["variants"].get(name) for name in ("cuda", "torch"))
    ours_s, torch_s = (_seconds(variant) for variant in (ours, torch))
    rate = case["bytes"] / ours_s if ours_s else None
    return (
        case["op"],
        case["name"],
        case["format"],
        str(case["rows"]),
        _number(ours_s, 1e6, ".1f"),
        _number(rate, 1e-9, ",.0f"),
        _number(rate, 100 / copying, ".0f", "%"),
        _number(torch_s, 1e6, ".1f"),
        _number(torch_s / ours_s if ours_s and torch_s else None, 1, ".2f"),
        _number(ours["error"] if ours_s else None, 1, ".2f"),
    )


def _seconds(variant: Mapping[str, Any] | None) -> float | None:
    return None if variant is None or "seconds" not in variant else float(variant["seconds"]["median"])


def model_lines(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each engine and batch: the rate, its limit, and transformers at the same batch."""
    base = {
        row["batch"]: row["tokens_per_s"]
        for model in models
        if model["engine"] == "transformers"
        for row in model.get("rows", ())
    }
    rows: Rows = []
    for model in models:
        for row in model.get("rows", ()):
            rate, theirs = row["tokens_per_s"], base.get(row["batch"])
            rows.append(
                (
                    model["engine"],
                    str(row["batch"]),
                    _number(rate, 1, ",.0f"),
                    _number(row["limit_tokens_per_s"], 1, ",.0f"),
                    _number(row["share"], 100, ".0f", "%"),
                    _number(rate / theirs if rate and theirs else None, 1, ".2f"),
                    _number(row["prefill_tokens_per_s"], 1, ",.0f"),
                )
            )
    head = (
        "engine",
        "batch",
        "decode tokens/s",
        "limit of bytes",
        "share",
        "to transformers",
        "prefill tokens/s",
    )
    said = [f"{model['engine']}: left out: {model['left_out']}" for model in models if model.get("left_out")]
    return [f"{models[0]['shape']}, random weights.", "", *table(head, rows), *said]


def _number(value: float | None, scale: float, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value * scale:{form}}{unit}"
