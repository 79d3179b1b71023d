"""A quantized model is measured beside its original: ratios and limits are made of what was counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagedcli.bench.cpu_workloads import CpuWorkload
from pagedcli.bench.quantized import Turns, bytes_to_read, rows
from pagedcli.bench.work import ModelSizes
from pagedcli.workloads.requests import WorkloadRequest

SIZES = ModelSizes(body=1000, head=100, attention=8, kv=20, item_bytes=2)
WORKLOAD = CpuWorkload("decode", "one stream", (WorkloadRequest("0", (1, 2, 3), 4, 4),), "output")


def bench(weight_bytes: int, activation: str) -> Any:
    return SimpleNamespace(
        sizes=SIZES,
        backend=SimpleNamespace(weight_bytes=weight_bytes),
        choice=SimpleNamespace(activation=activation),
    )


def test_every_step_reads_the_kept_weights_and_the_positions() -> None:
    # Four steps: the prompt's writes 3 positions, then 3, 4 and 5 are read with the new one; the last is not computed.
    positions = 3 + (4 + 5 + 6)
    assert bytes_to_read(bench(600, "int8"), WORKLOAD) == 4 * 600 + 2 * 20 * positions


def test_ratios_are_of_runs_of_the_same_number() -> None:
    pair = [bench(2200, ""), bench(600, "int8")]
    # The machine drifts by half: the ratio of medians (1.5 for these) would tell something else.
    found = Turns([[[10.0, 20.0, 40.0]], [[30.0, 30.0, 100.0]]])
    original, quantized = rows(pair, ["a", "b"], [WORKLOAD], found, read_bytes_per_s=1e4)
    assert (original.ratio, quantized.ratio) == (1.0, 2.5)
    assert quantized.tokens_per_s == 30.0
    assert quantized.limit_tokens_per_s == pytest.approx(4 * 1e4 / quantized.limit_bytes)
    assert cast(float, quantized.limit_bytes) < original.limit_bytes
