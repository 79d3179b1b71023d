"""From the runs of one setting to the dictionary that `paged bench --json` writes. Standard library and `bench` only.

Rates are medians over the rounds, with intervals; latencies are those of all requests of all rounds; series are of the
round whose duration is the median. What does not exist is None, never NaN.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedcli.api.resolve import ResolvedConfig
from pagedcli.bench.latency import Distribution
from pagedcli.bench.machine import MachineLimits
from pagedcli.bench.run import RequestRun, Run, Sample
from pagedcli.bench.statistics import Interval, median_interval
from pagedcli.bench.work import RunWork
from pagedcli.config import EngineConfig

MAX_POINTS = 400
"""Moments of a series that is kept for plots."""
MAX_LATENCIES = 1000
"""Values of a distribution that are kept for plots; more are thinned out evenly."""
ID_BYTES = 4
"""Of a page's number in a block table."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was run with one setting.

    Attributes:
        config: As asked for.
        resolved: As it ran.
        runs: Of each round, the warm-up left out.
        limits: Of the machine with these threads; None: not measured.
        work: Counts operations and bytes of steps.
    """

    config: EngineConfig
    resolved: ResolvedConfig
    runs: Sequence[Run]
    limits: MachineLimits | None
    work: RunWork

    @property
    def typical(self) -> Run:
        """The round of the median duration."""
        ordered = sorted(self.runs, key=lambda run: run.seconds)
        return ordered[(len(ordered) - 1) // 2]

    def rates(self) -> list[float]:
        """Output tokens per second of each round."""
        return [run.output_tokens_per_s for run in self.runs]


def as_dict(measured: Measured, **about: Any) -> dict[str, Any]:
    """The figures of one setting.

    Args:
        measured: What was run.
        about: Added as it is: machine, workload, date and so on.
    """
    runs, typical = measured.runs, measured.typical
    served = [request for run in runs for request in run.served]
    counters = typical.counters
    kv_use = _median(runs, Run.kv_use) if typical.holds_kv else None
    return {
        "settings": settings(measured.config, measured.resolved),
        **about,
        "requests": len(typical.requests),
        "failed": max(len(run.failed) for run in runs),
        "errors": _errors(runs),
        "throughput": _throughput(runs),
        **latencies(served),
        "kv_use": kv_use,
        "internal_fragmentation": None if kv_use is None else 1.0 - kv_use,
        "external_fragmentation": _median(runs, Run.external_fragmentation),
        "pool_use": _median(runs, Run.pool_use),
        "peak_running": typical.peak_running,
        "prefix_hit_rate": typical.prefix_hit_rate,
        "preemptions": counters.preemptions,
        "recomputed_tokens": counters.recomputed_tokens,
        "computed_tokens": counters.computed_tokens,
        "steps": counters.steps,
        "executor_busy": _median(runs, lambda run: run.executor_busy),
        "gap_s": _gaps(typical),
        "step_s": _step_parts(typical),
        "block_tables": _block_tables(typical),
        "limits": _limits(measured),
        "rounds": _rounds(runs),
        "series": series(typical, served),
    }


def settings(config: EngineConfig, resolved: ResolvedConfig) -> dict[str, Any]:
    """As it ran, and what else of the configuration matters to the figures."""
    values = dataclasses.asdict(resolved)
    for name in ("notes", "path", "seed", "seed_drawn"):
        del values[name]
    return {
        **values,
        "allocation": config.cache.allocation,
        "batching": config.scheduler.batching,
        "max_itl_ms": config.scheduler.max_itl_ms,
    }


def _median(runs: Sequence[Run], figure: Callable[[Run], float]) -> float:
    return statistics.median(figure(run) for run in runs)


def _errors(runs: Sequence[Run]) -> dict[str, int]:
    """How often each failure was met in the worst round, by its first line."""
    worst = max(runs, key=lambda run: len(run.failed))
    errors: dict[str, int] = {}
    for request in worst.failed:
        line = (request.error or "").splitlines()[0][:120]
        errors[line] = errors.get(line, 0) + 1
    return errors


def _throughput(runs: Sequence[Run]) -> dict[str, Any]:
    names = ("requests_per_s", "total_tokens_per_s", "output_tokens_per_s")
    intervals = {name: median_interval([getattr(run, name) for run in runs]) for name in names}
    return {
        **{name: interval.middle for name, interval in intervals.items()},
        "intervals": {name: _interval(interval) for name, interval in intervals.items()},
    }


def _interval(interval: Interval) -> dict[str, Any]:
    return {key: value for key, value in interval.as_dict().items() if key != "middle"}


def latencies(served: Sequence[RequestRun]) -> dict[str, dict[str, float | None]]:
    """mean, p50, p90 and p99 of TTFT, TPOT, ITL and E2E, in seconds."""
    return {name: _distribution(values) for name, values in _values(served).items()}


def _values(served: Sequence[RequestRun]) -> dict[str, list[float]]:
    return {
        "ttft_s": [request.ttft_s for request in served],
        "tpot_s": [request.tpot_s for request in served if request.tpot_s is not None],
        "itl_s": [gap for request in served for gap in request.itl_s],
        "e2e_s": [request.e2e_s for request in served],
    }


def _distribution(values: Sequence[float]) -> dict[str, float | None]:
    figures = dataclasses.asdict(Distribution.of(values))
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def _gaps(run: Run) -> dict[str, float]:
    gaps = run.times.gaps
    return {"scheduler_s": gaps.scheduler, "tokenizer_s": gaps.tokenizer, "no_work_s": gaps.no_work}


def _step_parts(run: Run) -> dict[str, float | None]:
    """Mean seconds of a step, by part; the handing over is what the executor does besides the kernels."""
    steps, times = max(1, run.counters.steps), run.times
    kernels = times.kernels
    return {
        "executor_s": times.executor / steps,
        "kernels_s": None if kernels is None else kernels / steps,
        "handing_over_s": None if kernels is None else max(0.0, times.executor - kernels) / steps,
        "scheduler_s": times.gaps.scheduler / steps,
        "text_s": times.gaps.tokenizer / steps,
    }


def _block_tables(run: Run) -> dict[str, float | None]:
    """What tables of pages cost: built by the scheduler, sent down with the plan."""
    steps = max(1, len(run.steps))
    num_ids = sum(step.num_blocks for step in run.steps)
    handing_over = _step_parts(run)["handing_over_s"]
    return {
        "build_us_per_step": run.times.block_tables / steps * 1e6,
        "build_share": run.times.block_tables / run.seconds if run.seconds else None,
        "hand_over_us_per_step": None if handing_over is None else handing_over * 1e6,
        "ids_per_step": num_ids / steps,
        "bytes_per_step": num_ids * ID_BYTES / steps,
        "bytes": num_ids * ID_BYTES,
    }


def _limits(measured: Measured) -> dict[str, Any]:
    """Shares of what the machine can do, over the whole duration of the typical round."""
    limits, run = measured.limits, measured.typical
    if limits is None:
        return {}
    least = measured.work.least(run.steps, limits.read_bytes_per_s, limits.flops_per_s)
    figures: dict[str, Any] = {
        "read_bytes_per_s": limits.read_bytes_per_s,
        "product_flops_per_s": limits.flops_per_s,
        "products": limits.products,
        "threads": limits.threads,
        "measured_by": limits.measured_by,
    }
    if run.seconds <= 0 or not run.steps:
        return figures
    figures["bandwidth_share"] = least.num_bytes / run.seconds / limits.read_bytes_per_s
    figures["arithmetic_share"] = (
        None if limits.flops_per_s is None else least.flops / run.seconds / limits.flops_per_s
    )
    figures["limit_share"] = least.seconds / run.seconds
    figures["bound_by"] = least.bound_by
    return figures


def _rounds(runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "count": len(runs),
        "seconds": [run.seconds for run in runs],
        "output_tokens_per_s": [run.output_tokens_per_s for run in runs],
        "late_s": max(run.late_s for run in runs),
        "interrupted": any(run.is_interrupted for run in runs),
    }


_COLUMNS: Mapping[str, Callable[[Sample], float]] = {
    "time_s": lambda sample: sample.t,
    "running": lambda sample: sample.running,
    "waiting": lambda sample: sample.waiting,
    "stored_tokens": lambda sample: sample.stored_tokens,
    "allocated_tokens": lambda sample: sample.allocated_tokens,
    "free_tokens": lambda sample: sample.free_tokens,
    "cached_tokens": lambda sample: sample.cached_tokens,
    "shared_tokens": lambda sample: sample.shared_tokens,
    "hole_tokens": lambda sample: sample.hole_tokens,
    "preemptions": lambda sample: sample.preemptions,
}


def series(run: Run, served: Sequence[RequestRun]) -> dict[str, list[float]]:
    """Columns over time, and latencies in ascending order, for plots."""
    samples = thinned(run.samples, MAX_POINTS)
    columns = {name: [column(sample) for sample in samples] for name, column in _COLUMNS.items()}
    values = {name: thinned(sorted(items), MAX_LATENCIES) for name, items in _values(served).items()}
    return {**columns, **values}


def thinned(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]
