"""What `paged bench kernels` found, as plain data for JSON and reports. Standard library and `bench` only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedcli.bench.kernels import KernelTimes
from pagedcli.bench.machine import MachineLimits
from pagedcli.bench.statistics import Interval, median_interval, paired_ratio
from pagedcli.ops.kernel_cases import Case

BASE = "torch"
"""What the others are compared with."""
NO_INT8_DOT = ("avx512", "avx2", "portable", "neon")
"""Variants without an instruction for int8 products, whose limit is not measured."""


def case_dict(times: KernelTimes, machine: MachineLimits) -> dict[str, Any]:
    """One case with all its variants."""
    case = times.case
    return {
        "families": list(case.families),
        "op": case.op,
        "name": case.label,
        "format": case.format.name,
        "rows": case.rows,
        "inputs": case.inputs,
        "outputs": case.outputs,
        "sequences": case.sequences,
        "context": case.context,
        "page_size": case.page_size,
        "bytes": case.bytes,
        "flops": case.flops,
        "variants": {
            variant: _variant_dict(times, variant, machine) for variant in (*times.seconds, *times.missing)
        },
    }


def _variant_dict(times: KernelTimes, variant: str, machine: MachineLimits) -> dict[str, Any]:
    if variant in times.missing:
        return {"missing": times.missing[variant]}
    case, seconds = times.case, times.seconds[variant]
    interval = median_interval(seconds)
    found: dict[str, Any] = {
        "seconds": _interval_dict(interval),
        "rounds": len(seconds),
        "gb_per_s": case.bytes / interval.middle / 1e9,
        "gflop_per_s": case.flops / interval.middle / 1e9 if case.flops else None,
        "error": times.errors[variant],
        "called": times.called[variant],
    }
    share, limit = share_of_limit(case, variant, interval.middle, machine)
    found |= {"share": share, "limit": limit}
    if variant != BASE and BASE in times.seconds:
        found["times_torch"] = _interval_dict(paired_ratio(times.seconds[BASE], seconds))
    return found


def _interval_dict(interval: Interval) -> dict[str, float]:
    return {"low": interval.low, "median": interval.middle, "high": interval.high}


def share_of_limit(
    case: Case, variant: str, seconds: float, machine: MachineLimits
) -> tuple[float | None, str | None]:
    """The least time that the machine's limits allow over the time taken, and which limit it is.

    Nothing for ops whose data lies in caches: no limit was measured for these.
    """
    if not case.cold_bytes:
        return None, None
    memory = case.cold_bytes / machine.read_bytes_per_s
    rate = _flops_per_s(case, variant, machine)
    arithmetic = case.flops / rate if rate else 0.0
    return max(memory, arithmetic) / seconds, "arithmetic" if arithmetic > memory else "memory"


def _flops_per_s(case: Case, variant: str, machine: MachineLimits) -> float | None:
    products = {"int8": "int8"}.get(case.format.activation, case.format.dtype)
    if variant.startswith(BASE):
        # Torch may use whatever the machine has; its products of codes multiply in bfloat16.
        products, variant = case.format.dtype, "amx"
    if machine.rates is None:
        return machine.flops_per_s if machine.products == products else None
    if products == "int8" and variant in NO_INT8_DOT:
        return None
    best = machine.rates.flops_per_s(products, variant)
    return best or machine.rates.flops_per_s(products, "avx512bf16") or machine.rates.f32_flops_per_s or None


def report_dict(
    settings: Mapping[str, Any],
    machine: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    **head: Any,
) -> dict[str, Any]:
    """All of it: what `--json` writes."""
    return {
        "kind": "kernels",
        "settings": dict(settings),
        "machine": dict(machine),
        **head,
        "cases": list(results),
    }
