"""The report of `paged bench tune`: the comparison with the defaults, and everything that was tried.

Standard library only.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pagedcli.bench.report.document import Block, Column, ParetoPlot, Point, Section, Table
from pagedcli.bench.report.numbers import MISSING, number

FIGURES = (
    Column("Output", "tokens/s"),
    Column("TTFT p90", "ms"),
    Column("ITL p90", "ms"),
    Column("Answers p50", "s"),
)
NAMES = {
    "threads": "Threads",
    "max_num_seqs": "Batch",
    "max_num_batched_tokens": "Tokens a step",
    "page_size": "Page",
}


def tuning_sections(data: Mapping[str, Any]) -> list[Section]:
    """What it came to, then how."""
    chosen = f"Settings: {_named(data['best'])}."
    texts: list[Block] = [f"Aim: {data['aim']}.", f"Result: {data['verdict']}.", chosen]
    if data["final"] is not None:
        texts.append(_comparison(data))
    return [Section("Result", texts), Section("Tried", list(_tried(data["trials"])))]


def _comparison(data: Mapping[str, Any]) -> Table:
    rows = [
        [name, *_figures(runs)] for name, runs in zip(("defaults", "found"), data["comparison"], strict=True)
    ]
    return Table([Column("Settings", is_number=False), *FIGURES], rows, "Medians of rounds in turns.")


def _tried(trials: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    ran = sorted((trial for trial in trials if trial["runs"]), key=lambda trial: -trial["worth"])
    columns = [
        *(Column(title) for title in NAMES.values()),
        *FIGURES,
        Column("Limits", is_number=False),
        Column("Runs"),
    ]
    rows = [
        [
            *(str(trial["candidate"][name]) for name in NAMES),
            *_figures(trial["runs"]),
            "kept" if trial["meets_limits"] else "missed",
            str(len(trial["runs"])),
        ]
        for trial in ran
    ]
    yield Table(columns, rows, "The best first. Few runs: dropped early.", num_keys=len(NAMES))
    points = [
        Point(
            _named(trial["candidate"]),
            _median(trial["runs"], "e2e_s"),
            _median(trial["runs"], "tokens_per_s"),
        )
        for trial in ran
    ]
    if len(points) > 1:
        yield ParetoPlot("Latency against throughput", points, "answers, median (s)", "output (tokens/s)")
    for trial in trials:
        if trial["problem"] is not None:
            yield f"Cannot run: {_named(trial['candidate'])}: {trial['problem']}"


def _named(candidate: Mapping[str, Any]) -> str:
    """As threads 2, batch 8."""
    return ", ".join(f"{NAMES[name].lower()} {value}" for name, value in candidate.items())


def _figures(runs: Sequence[Mapping[str, float]]) -> list[str]:
    if not runs:
        return [MISSING] * len(FIGURES)
    return [
        number(_median(runs, "tokens_per_s")),
        number(_median(runs, "ttft_s") * 1e3),
        number(_median(runs, "itl_s") * 1e3),
        number(_median(runs, "e2e_s")),
    ]


def _median(runs: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(run[name] for run in runs)
