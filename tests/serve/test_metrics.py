"""What Prometheus reads: every promised name, its type, its label, and numbers that add up."""

from __future__ import annotations

import json
import queue
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedcli.core.sampling import SamplingParams
from pagedcli.engine.latency import Histogram, token_bounds
from pagedcli.engine.outputs import Delta
from pagedcli.engine.prompt import RequestSpec
from pagedcli.serve.metrics import Metrics
from tests.fakes import FakeExecutor, fake_engine

HISTOGRAMS = {
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_params_max_tokens",
    "vllm:request_params_n",
    "vllm:request_num_preemptions",
    "vllm:iteration_tokens_total",
}
GAUGES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "paged:engine_up",
    "paged:executor_busy_ratio",
    "paged:blocks",
}
COUNTERS = {
    "vllm:num_preemptions",
    "vllm:prompt_tokens",
    "vllm:prompt_tokens_cached",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:generation_tokens",
    "vllm:request_success",
    "paged:step_gap_seconds",
    "paged:executor_seconds",
    "paged:requests_aborted",
    "paged:requests_rejected",
    "paged:tokens_computed",
    "paged:tokens_recomputed",
    "paged:itl_misses",
}
ROOT = Path(__file__).parents[2]


def engine_of(client: object) -> Any:
    resolved = SimpleNamespace(page_size=16, num_pages=64, prefix_caching=True)
    return SimpleNamespace(client=client, resolved=resolved)


class Scrape:
    """Samples of a scrape, by name and labels other than the model's name."""

    def __init__(self, text: bytes) -> None:
        families = list(text_string_to_metric_families(text.decode()))
        self.types = {family.name: family.type for family in families}
        self.samples = {
            (sample.name, *sorted(v for k, v in sample.labels.items() if k != "model_name")): sample.value
            for family in families
            for sample in family.samples
        }
        self.models = {
            sample.labels.get("model_name")
            for family in families
            if family.name.startswith(("vllm:", "paged:"))
            for sample in family.samples
        }

    def __getitem__(self, name: object) -> float:
        return self.samples[cast(Any, name) if isinstance(name, tuple) else (name,)]


@pytest.fixture(scope="module")
def scrape() -> Scrape:
    engine = fake_engine(FakeExecutor(num_blocks=12, block_size=4, max_model_len=40, max_num_seqs=8))
    deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    for number in range(6):
        params = SamplingParams(max_tokens=20, n=2 if number == 0 else 1)
        engine.add(RequestSpec(f"prompt {number}", params=params), deltas.put)
    assert engine.drain(30)
    name = engine.add(RequestSpec("gone", params=SamplingParams(max_tokens=30)), lambda delta: None)
    engine.abort(name)
    assert engine.drain(30)
    metrics = Metrics(engine_of(engine), "tiny")
    metrics.rejected("queue_full")
    metrics.rejected("queue_full")
    text = metrics.render()
    engine.close()
    return Scrape(text)


def test_every_promised_name_is_there_with_its_type(scrape: Scrape) -> None:
    for names, kind in ((HISTOGRAMS, "histogram"), (GAUGES, "gauge"), (COUNTERS, "counter")):
        for name in names:
            assert scrape.types.get(name) == kind, name
    ours = {name for name in scrape.types if name.startswith(("vllm:", "paged:"))}
    assert ours == HISTOGRAMS | GAUGES | COUNTERS
    assert scrape.models == {"tiny"}


def test_the_numbers_add_up(scrape: Scrape) -> None:
    assert scrape["vllm:e2e_request_latency_seconds_count"] == 6
    assert scrape["vllm:time_to_first_token_seconds_count"] == 6
    assert scrape["vllm:request_generation_tokens_sum"] == 7 * 20
    assert scrape["vllm:generation_tokens_total"] >= 7 * 20
    assert scrape["vllm:inter_token_latency_seconds_count"] >= 7 * 19
    assert scrape["vllm:request_params_n_sum"] == 7
    assert scrape["vllm:request_prompt_tokens_sum"] == 6 * len("prompt 0")
    assert scrape[("vllm:request_success_total", "length")] == 6
    assert scrape[("vllm:request_success_total", "abort")] == 1
    assert scrape["paged:requests_aborted_total"] == 1
    assert scrape[("paged:requests_rejected_total", "queue_full")] == 2
    assert scrape["vllm:num_preemptions_total"] > 0
    assert scrape["paged:tokens_recomputed_total"] > 0
    assert scrape["paged:tokens_computed_total"] > scrape["paged:tokens_recomputed_total"]
    assert scrape["vllm:iteration_tokens_total_sum"] == scrape["paged:tokens_computed_total"]
    states = {state: scrape[("paged:blocks", state)] for state in ("free", "cached", "used", "shared")}
    assert states["free"] + states["cached"] + states["used"] == 12
    assert scrape["vllm:kv_cache_usage_perc"] == states["used"] == 0
    assert scrape["paged:engine_up"] == 1


def test_histograms_are_cumulative_and_end_with_everything(scrape: Scrape) -> None:
    for name in HISTOGRAMS:
        buckets = [value for (sample, *_), value in scrape.samples.items() if sample == f"{name}_bucket"]
        assert buckets == sorted(buckets)
        assert buckets[-1] == scrape[f"{name}_count"]


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    histogram.observe(3.0, times=2)
    assert histogram.value().counts == (2, 2, 3)
    assert histogram.value().total == 20.0
    assert token_bounds(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_bounds(41) == (1, 2, 5, 10, 20)


def test_the_dashboard_names_metrics_that_exist(scrape: Scrape) -> None:
    board = json.loads((ROOT / "configs" / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(expressions) >= 15
    known = {sample for sample, *_ in scrape.samples}
    for expression in expressions:
        names = set(re.findall(r"(?:vllm|paged|process)[:_][a-z0-9_]+", expression))
        assert names, expression
        assert names <= known, f"{names - known} of {expression}"
    wanted = {"paged:executor_busy_ratio", "vllm:kv_cache_usage_perc", "paged:requests_rejected_total"}
    assert all(any(name in expression for expression in expressions) for name in wanted)


def expanded(name: str) -> list[str]:
    """`a_{b,c}_d{label}` as a_b_d and a_c_d; labels go."""
    match = re.search(r"_\{([a-z_,]+)\}", name)
    if match is None:
        return [re.sub(r"\{.*", "", name)]
    return [
        each
        for part in match[1].split(",")
        for each in expanded(f"{name[: match.start()]}_{part}{name[match.end() :]}")
    ]


def test_the_page_lists_exactly_what_is_there(scrape: Scrape) -> None:
    page = (ROOT / "docs" / "serve.md").read_text()
    table = page[page.index("## Metrics") : page.index("## Logs")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {
        each
        for row in rows
        for name in re.findall(r"`((?:vllm|paged):[^`]+)`", row)
        for each in expanded(name)
    }
    counters = {f"{name}_total" for name in COUNTERS}
    assert named == HISTOGRAMS | GAUGES | counters
