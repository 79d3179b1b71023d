"""The figures of a run's dictionary: where each is found, its name, unit and how it is written. Standard library only.

A run is what `paged bench --json` writes for one setting (docs/cli.md). A figure that a run does not have is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedcli.bench.report.document import Column
from pagedcli.bench.report.numbers import count, number, ratio, share, time_unit

RunDict = Mapping[str, Any]


def find(data: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None."""
    found: Any = data
    for key in path.split("."):
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found


def figure(data: Mapping[str, Any], path: str) -> float | None:
    """The number at a dotted path; None where there is none, or it is not finite."""
    value = find(data, path)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a run.

    Attributes:
        path: Where it is in the dictionary.
        title: Its name.
        unit: Of its number as written; "s" is turned into milliseconds where these read better.
        text: How it is written.
    """

    path: str
    title: str
    unit: str = ""
    text: Callable[[float | None], str] = number

    def of(self, run: RunDict) -> float | None:
        """Its value."""
        return figure(run, self.path)

    def column(self, runs: Sequence[RunDict]) -> tuple[Column, list[str]]:
        """Its heading and its texts for some runs, in one unit."""
        values = [self.of(run) for run in runs]
        if self.unit == "s":
            unit, factor = time_unit(values)
            scaled = [None if value is None else value * factor for value in values]
            return Column(self.title, unit), [self.text(value) for value in scaled]
        return Column(self.title, self.unit), [self.text(value) for value in values]


FAILED = Figure("failed", "Failed")
REQUEST_RATE = Figure("throughput.requests_per_s", "Served", "/s")
OUTPUT_RATE = Figure("throughput.output_tokens_per_s", "Output", "tokens/s")
TOTAL_RATE = Figure("throughput.total_tokens_per_s", "All tokens", "tokens/s")
TTFT = Figure("ttft_s.mean", "TTFT mean", "s")
TTFT_P50 = Figure("ttft_s.p50", "TTFT p50", "s")
TTFT_P99 = Figure("ttft_s.p99", "TTFT p99", "s")
TPOT = Figure("tpot_s.mean", "TPOT mean", "s")
E2E = Figure("e2e_s.mean", "Whole answer, mean", "s")
E2E_P99 = Figure("e2e_s.p99", "Whole answer, p99", "s")
AT_ONCE = Figure("peak_running", "At once", "requests", count)
KV_USE = Figure("kv_use", "KV use", "", share)
INTERNAL = Figure("internal_fragmentation", "Internal fragm.", "", share)
EXTERNAL = Figure("external_fragmentation", "External fragm.", "", share)
HIT_RATE = Figure("prefix_hit_rate", "Prefix hits", "", share)
PREEMPTIONS = Figure("preemptions", "Preemptions")
RECOMPUTED = Figure("recomputed_tokens", "Recomputed", "tokens")
BUSY = Figure("executor_busy", "Executor busy", "", share)
LIMIT_SHARE = Figure("limits.limit_share", "Of the machine's limit", "", share)
BANDWIDTH_SHARE = Figure("limits.bandwidth_share", "Of its bandwidth", "", share)
ARITHMETIC_SHARE = Figure("limits.arithmetic_share", "Of its arithmetic", "", share)
SPEEDUP = Figure("speedup", "Against the first", "", ratio)
LATENCIES = (
    ("ttft_s", "Time to first token (TTFT)"),
    ("tpot_s", "Time per output token after it (TPOT)"),
    ("itl_s", "Between two tokens (ITL)"),
    ("e2e_s", "Whole answer (E2E)"),
)


def rate_interval(run: RunDict) -> str:
    """Where the median of the output rate lies, as 98.0 to 102; empty if that was not asked."""
    low, high = (figure(run, f"throughput.intervals.output_tokens_per_s.{end}") for end in ("low", "high"))
    if low is None or high is None or low == high:
        return ""
    return f"{number(low)} to {number(high)}"


def known(figures: Sequence[Figure], runs: Sequence[RunDict]) -> list[Figure]:
    """Those that at least one of the runs has."""
    return [item for item in figures if any(item.of(run) is not None for run in runs)]
