"""Lines for plots from the `series` of a run's dictionary. Standard library only.

`series` has columns over time (`time_s`, `running`, `stored_tokens`, ...) and, by name, the latencies of the requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedcli.bench.report.document import Line, LinePlot
from pagedcli.bench.report.figures import find
from pagedcli.bench.report.numbers import time_unit

WIDE = 8.0
"""Largest over smallest value from which a distribution's axis is logarithmic."""


def over_time(run: Mapping[str, Any], column: str, name: str) -> Line | None:
    """A column over time; None if the run has none."""
    times, values = find(run, "series.time_s"), find(run, f"series.{column}")
    if not times or not values:
        return None
    return Line(name, times, values)


def use_line(run: Mapping[str, Any], name: str) -> Line | None:
    """KV use over time: stored over allocated, while anything is allocated."""
    times, stored, held = (
        find(run, f"series.{key}") for key in ("time_s", "stored_tokens", "allocated_tokens")
    )
    if not times or not stored or not held:
        return None
    points = [(t, s / a) for t, s, a in zip(times, stored, held, strict=True) if a]
    return Line(name, [t for t, _ in points], [use for _, use in points]) if points else None


def distribution(title: str, runs: Sequence[tuple[str, Mapping[str, Any]]], latency: str) -> LinePlot | None:
    """The cumulative distribution of a latency (`ttft_s` and so on), a line a run; None: none has it."""
    found = {name: sorted(find(run, f"series.{latency}") or ()) for name, run in runs}
    known = {name: values for name, values in found.items() if values}
    if not known:
        return None
    unit, factor = time_unit([values[-1] for values in known.values()])
    lines = [
        Line(
            name,
            [value * factor for value in values],
            [(index + 1) / len(values) for index in range(len(values))],
        )
        for name, values in known.items()
    ]
    low, high = min(line.x[0] for line in lines), max(line.x[-1] for line in lines)
    return LinePlot(
        title,
        lines,
        unit,
        "part of all",
        "The part that took so long at most; further left is better.",
        is_share=True,
        log_x=low > 0 and high / low > WIDE,
        is_distribution=True,
    )
