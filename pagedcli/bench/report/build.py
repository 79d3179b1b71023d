"""From the JSON of any `paged bench` command to a `Document`. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedcli.bench.report.comparison import comparison_sections
from pagedcli.bench.report.document import Document
from pagedcli.bench.report.head import head_of
from pagedcli.bench.report.kernels import kernel_sections
from pagedcli.bench.report.load import load_sections
from pagedcli.bench.report.runs import run_sections, sweep_sections
from pagedcli.bench.report.tuning import tuning_sections
from pagedcli.errors import ConfigError


def build_document(data: Any) -> Document:
    """The report of what was read.

    Args:
        data: A run, a list of runs (a sweep), or what `paged bench compare` writes.

    Raises:
        ConfigError: It is none of these.
    """
    if _is_runs(data):
        return _sweep(data) if len(data) > 1 else _run(data[0])
    if isinstance(data, Mapping) and data.get("kind") == "compare":
        return Document(
            "What paging, batching and quantization bring", head_of(data), comparison_sections(data)
        )
    if isinstance(data, Mapping) and data.get("kind") == "tune":
        return Document("Settings for this machine", head_of(data), tuning_sections(data))
    if isinstance(data, Mapping) and data.get("kind") == "kernels":
        return Document("The kernels alone", head_of(data), kernel_sections(data))
    if isinstance(data, Mapping) and data.get("kind") == "serve" and _is_runs([data]):
        return Document("A server under load", head_of(data), load_sections(data))
    if isinstance(data, Mapping) and isinstance(data.get("throughput"), Mapping):
        return _run(data)
    raise ConfigError("paged bench did not write it: it has neither throughput nor a kind that is known")


def _is_runs(data: Any) -> bool:
    return (
        isinstance(data, Sequence)
        and not isinstance(data, str)
        and bool(data)
        and all(isinstance(run, Mapping) and isinstance(run.get("throughput"), Mapping) for run in data)
    )


def _run(run: Mapping[str, Any]) -> Document:
    return Document("Benchmark of one setting", head_of(run), run_sections(run))


def _sweep(runs: Sequence[Mapping[str, Any]]) -> Document:
    """What all runs have in common stands at the head."""
    common = {
        key: value
        for key, value in runs[0].get("settings", {}).items()
        if all(run.get("settings", {}).get(key) == value for run in runs)
    }
    head = {**runs[0], "settings": common}
    return Document(f"Sweep over {len(runs)} settings", head_of(head), sweep_sections(runs))
