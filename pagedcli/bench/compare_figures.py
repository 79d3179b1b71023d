"""From the runs of an arm to its figures: one number each, by name, and the rows of the main table.

Standard library and `bench` only. Names ending in `_s` are seconds.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagedcli.bench.latency import Distribution
from pagedcli.bench.run import RequestRun, Run

MAX_POINTS = 400
"""Moments of a series that is kept for a plot."""


def figures_of(run: Run) -> dict[str, float]:
    """The numbers of one run that claims and tables are made of; those that it does not have are left out."""
    served = run.served
    figures = {
        "seconds": run.seconds,
        "output_tokens_per_s": run.output_tokens_per_s,
        "ttft_s": _mean(request.ttft_s for request in served),
        "tpot_s": _mean(request.tpot_s for request in served if request.tpot_s is not None),
        "e2e_s": _mean(request.e2e_s for request in served),
        "peak_running": float(run.peak_running),
        "kv_use": run.kv_use(),
        "external_fragmentation": run.external_fragmentation(),
        "swing": swing(run),
        "longest_tokens": max((r.prompt_tokens + len(r.token_times) for r in served), default=math.nan),
        "scheduler_s_per_step": run.times.gaps.scheduler / max(1, run.counters.steps),
        "preemptions": float(run.counters.preemptions),
        "short_e2e_s": _median(_named(served, "fair-short")),
        "long_e2e_s": _median(_named(served, "fair-long")),
    }
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _named(requests: Iterable[RequestRun], begin: str) -> list[float]:
    return [request.e2e_s for request in requests if request.id.startswith(begin)]


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return statistics.fmean(known) if known else math.nan


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def swing(run: Run) -> float:
    """Standard deviation over mean of the token slots held, over time, while half of the peak or more run."""
    least = run.peak_running / 2
    held = [
        (sample.allocated_tokens, after.t - sample.t)
        for sample, after in itertools.pairwise(run.samples)
        if sample.running >= least and sample.allocated_tokens
    ]
    seconds = math.fsum(weight for _, weight in held)
    if not seconds:
        return math.nan
    mean = math.fsum(value * weight for value, weight in held) / seconds
    variance = math.fsum((value - mean) ** 2 * weight for value, weight in held) / seconds
    return math.sqrt(variance) / mean


def row_of(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """A row of the main table: the run of median throughput, with all its distributions and its series."""
    run = sorted(runs, key=lambda item: item.output_tokens_per_s)[(len(runs) - 1) // 2]
    return {
        "name": name,
        "requests": len(run.requests),
        "failed": len(run.failed),
        "throughput": {
            "requests_per_s": run.requests_per_s,
            "total_tokens_per_s": run.total_tokens_per_s,
            "output_tokens_per_s": statistics.median(item.output_tokens_per_s for item in runs),
        },
        **{key: _distribution(values) for key, values in _latencies(run).items()},
        "peak_running": run.peak_running,
        "kv_use": run.kv_use(),
        "internal_fragmentation": 1.0 - run.kv_use(),
        "external_fragmentation": run.external_fragmentation(),
        "prefix_hit_rate": run.prefix_hit_rate,
        "preemptions": run.counters.preemptions,
        "recomputed_tokens": run.counters.recomputed_tokens,
        "executor_busy": run.executor_busy,
        "series": series_of(run),
    }


def _latencies(run: Run) -> dict[str, list[float]]:
    served = run.served
    return {
        "ttft_s": [request.ttft_s for request in served],
        "tpot_s": [request.tpot_s for request in served if request.tpot_s is not None],
        "itl_s": [value for request in served for value in request.itl_s],
        "e2e_s": [request.e2e_s for request in served],
    }


def _distribution(values: Sequence[float]) -> dict[str, float | None]:
    found = Distribution.of(values)
    return {
        name: value if math.isfinite(value := getattr(found, name)) else None
        for name in ("mean", "p50", "p90", "p99")
    }


def series_of(run: Run) -> dict[str, list[float]]:
    """Columns over time, thinned, and the latencies of the requests."""
    samples = run.samples[:: max(1, len(run.samples) // MAX_POINTS)]
    columns: dict[str, list[float]] = {
        "time_s": [round(sample.t, 4) for sample in samples],
        "running": [sample.running for sample in samples],
        "waiting": [sample.waiting for sample in samples],
        "stored_tokens": [sample.stored_tokens for sample in samples],
        "allocated_tokens": [sample.allocated_tokens for sample in samples],
        "cached_tokens": [sample.cached_tokens for sample in samples],
    }
    latencies = {
        key: [round(v, 5) for v in values] for key, values in _latencies(run).items() if key != "itl_s"
    }
    return {**columns, **latencies}


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of every figure that all rounds have."""
    names = [name for name in rounds[0] if all(name in figures for figures in rounds)]
    return {name: statistics.median(figures[name] for figures in rounds) for name in names}
