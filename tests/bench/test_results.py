"""The dictionary of one setting: every figure against what the scripted clock says, and its JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedcli.api.resolve import ResolvedConfig
from pagedcli.bench.machine import MachineLimits
from pagedcli.bench.report.build import build_document
from pagedcli.bench.report.markdown import as_markdown
from pagedcli.bench.results import Measured, as_dict, thinned
from pagedcli.bench.run import Run, StepRecord
from pagedcli.bench.work import ModelSizes, RunWork
from pagedcli.config import EngineConfig
from tests.bench.scripted import request, run_scripted

SIZES = ModelSizes(body=1000, head=100, attention=10, kv=8, item_bytes=2)
LIMITS = MachineLimits("cpu", 2, 1e6, 1e7, "bfloat16", "a test")
RESOLVED = ResolvedConfig(
    model="m", path=Path("/m"), checkpoint_format="safetensors", architecture="A", dtype="bfloat16",
    quantization=None, activation="bfloat16", device="cpu", backend="native", threads=2, page_size=16, num_pages=64,
    kv_bytes_per_token=16, kv_bytes=16384, weight_bytes=2200, max_model_len=256, max_num_seqs=8,
    max_num_batched_tokens=2048, policy="fcfs", depth=1, prefix_caching=True, seed=0, seed_drawn=False,
    vocab_size=258, notes=(),
)  # fmt: skip


def measured(*runs: Run, limits: MachineLimits | None = LIMITS) -> Measured:
    return Measured(EngineConfig(), RESOLVED, runs, limits, RunWork(SIZES, 2200.0))


@pytest.fixture(scope="module")
def run() -> Run:
    return run_scripted([request("a", 10, 3), request("long", 300, 5), request("b", 20, 5)])


@pytest.fixture(scope="module")
def figures(run: Run) -> dict[str, Any]:
    slower = dataclasses.replace(run, seconds=0.6)
    faster = dataclasses.replace(run, seconds=0.5)
    made: dict[str, Any] = as_dict(measured(slower, run, faster), machine={"cpu": "none"})
    return made


def test_it_has_everything_that_interface_md_promises(figures: dict[str, Any]) -> None:
    assert {"model", "dtype", "page_size", "num_pages", "max_num_seqs", "threads"} <= set(figures["settings"])
    assert set(figures["throughput"]) >= {"requests_per_s", "total_tokens_per_s", "output_tokens_per_s"}
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert set(figures[name]) == {"mean", "p50", "p90", "p99"}
    promised = {
        "machine",
        "requests",
        "failed",
        "kv_use",
        "prefix_hit_rate",
        "preemptions",
        "recomputed_tokens",
    }
    assert promised | {"executor_busy", "limits"} <= set(figures)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_failed_requests_are_counted_apart_and_in_no_latency(figures: dict[str, Any]) -> None:
    assert (figures["requests"], figures["failed"]) == (3, 1)
    assert list(figures["errors"].values()) == [1]
    assert figures["e2e_s"]["mean"] == pytest.approx((0.334 + 0.536) / 2)


def test_percentiles_are_those_of_numpy_over_all_rounds(figures: dict[str, Any]) -> None:
    a, b = [0.102] * 2, [0.102, 0.102, 0.101, 0.101]
    for name, values in (
        ("ttft_s", [0.130, 0.130]), ("tpot_s", [0.102, 0.406 / 4]), ("itl_s", a + b), ("e2e_s", [0.334, 0.536])
    ):  # fmt: skip
        for key, share in (("p50", 50), ("p90", 90), ("p99", 99)):
            assert figures[name][key] == pytest.approx(np.percentile(values * 3, share)), (name, key)
        assert figures[name]["mean"] == pytest.approx(np.mean(values))


def test_rates_are_medians_over_rounds_with_intervals(figures: dict[str, Any]) -> None:
    rates = figures["throughput"]
    assert rates["output_tokens_per_s"] == pytest.approx(8 / 0.536)
    assert rates["total_tokens_per_s"] == pytest.approx(38 / 0.536)
    interval = rates["intervals"]["output_tokens_per_s"]
    assert interval["low"] < 8 / 0.6 < 8 / 0.5 < interval["high"]
    assert figures["rounds"]["seconds"] == [0.6, run_seconds(figures), 0.5]


def run_seconds(figures: dict[str, Any]) -> float:
    return float(figures["rounds"]["seconds"][1])


def test_block_tables_count_the_ids_that_were_sent(figures: dict[str, Any]) -> None:
    tables = figures["block_tables"]
    assert tables["bytes"] == 4 * 3  # one page for 10 tokens, two for 20, and no more until the end
    assert tables["ids_per_step"] == pytest.approx(3 / 5)
    assert figures["step_s"]["executor_s"] == pytest.approx(0.536 / 5)
    assert figures["step_s"]["kernels_s"] == pytest.approx(0.5 / 5)
    assert tables["hand_over_us_per_step"] == pytest.approx(0.036 / 5 * 1e6)


def test_shares_of_the_limits_are_those_of_the_steps_that_were_done(
    run: Run, figures: dict[str, Any]
) -> None:
    tokens, logits, pairs, kv = 36, 8, (55 + 210) + (11 + 21) + (12 + 22) + 23 + 24, 30 + 32 + 34 + 23 + 24
    flops = 2 * (1000 * tokens + 100 * logits + 10 * pairs)
    num_bytes = 5 * 2200 + 2 * 8 * kv
    limits = figures["limits"]
    assert limits["bandwidth_share"] == pytest.approx(num_bytes / 0.536 / 1e6)
    assert limits["arithmetic_share"] == pytest.approx(flops / 0.536 / 1e7)
    # The first step takes longer to multiply than to read, the others the other way round.
    first_flops = 2 * (1000 * 30 + 200 + 10 * 265)
    rest_bytes = 4 * 2200 + 16 * (kv - 30)
    assert limits["limit_share"] == pytest.approx((first_flops / 1e7 + rest_bytes / 1e6) / 0.536)
    assert limits["bound_by"] == "bytes"


def test_without_a_rate_of_products_only_reading_is_told(run: Run) -> None:
    limits = as_dict(measured(run, limits=dataclasses.replace(LIMITS, flops_per_s=None)))["limits"]
    assert limits["arithmetic_share"] is None
    assert limits["bound_by"] == "bytes"
    assert limits["limit_share"] == pytest.approx(limits["bandwidth_share"])


def test_windows_leave_attention_out_so_that_a_limit_stays_one() -> None:
    step = StepRecord(0.0, 0.1, 1, 1, 1, 5000, 5000, 0)
    whole, windowed = RunWork(SIZES, 0.0), RunWork(SIZES, 0.0, has_windows=True)
    assert whole.of_step(step).attention_flops == 2 * 10 * 5000
    assert (windowed.of_step(step).attention_flops, windowed.of_step(step).kv_bytes) == (0.0, 0.0)


def test_what_ends_with_the_step_that_began_it_ran_but_shows_no_use_of_pages() -> None:
    run = run_scripted([request("a", 10, 1), request("b", 20, 1)])
    found = as_dict(measured(run))
    assert (found["peak_running"], found["kv_use"], found["internal_fragmentation"]) == (2, None, None)
    told = as_markdown(build_document(json.loads(json.dumps(found))))
    assert "KV use" not in told
    assert re.search(r"Block tables.*build [\d.]+% of the time", told)


def test_if_all_fail_there_are_no_latencies_and_the_json_is_still_one() -> None:
    run = run_scripted([request("long", 300, 5)])
    figures = as_dict(measured(run))
    assert (figures["requests"], figures["failed"]) == (1, 1)
    assert figures["ttft_s"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert figures["throughput"]["requests_per_s"] == 0.0
    json.dumps(figures, allow_nan=False)


def test_series_are_of_the_typical_round_and_thinned_evenly(figures: dict[str, Any]) -> None:
    series = figures["series"]
    assert series["time_s"] == pytest.approx([0.130, 0.232, 0.334, 0.435, 0.536])
    assert series["stored_tokens"] == [30, 32, 22, 23, 0]
    assert series["ttft_s"] == pytest.approx([0.130] * 6)
    assert thinned(range(1000), 5) == [0, 250, 500, 749, 999]
    assert thinned(range(4), 5) == [0, 1, 2, 3]
