"""What Prometheus scrapes: the engine's own counts, put into its text format when it asks.

May import prometheus_client, `engine` and `api`. Nothing is recorded here but refusals, so that the step loop pays
nothing for metrics. Names with `vllm:` mean what they mean in vLLM, so that its dashboards work; `paged:` is what it
does not have. docs/serve.md lists them.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pagedcli.api.build import Engine
from pagedcli.core.pacing import MissCause
from pagedcli.core.request import FinishReason
from pagedcli.engine.latency import HistogramValue
from pagedcli.engine.outputs import EngineStats

CONTENT_TYPE = CONTENT_TYPE_LATEST
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("first_token", "From arrival to the first token."),
    "vllm:inter_token_latency_seconds": ("between_tokens", "Between two tokens of a sample."),
    "vllm:request_time_per_output_token_seconds": (
        "per_token",
        "Per output token after the first, of a request.",
    ),
    "vllm:e2e_request_latency_seconds": ("whole", "From arrival to the end."),
    "vllm:request_queue_time_seconds": ("queue", "From arrival until it first ran."),
    "vllm:request_inference_time_seconds": ("inference", "From when it first ran to the end."),
    "vllm:request_prefill_time_seconds": ("prefill", "From when it first ran to the first token."),
    "vllm:request_decode_time_seconds": ("decode", "From the first token to the end."),
    "vllm:request_prompt_tokens": ("prompt_tokens", "Tokens of the prompt."),
    "vllm:request_generation_tokens": ("output_tokens", "Tokens generated, over all samples."),
    "vllm:request_params_max_tokens": ("max_tokens", "max_tokens, of requests that have it."),
    "vllm:request_params_n": ("samples", "n of requests."),
    "vllm:request_num_preemptions": ("preemptions", "Preemptions of a request."),
    "vllm:iteration_tokens_total": ("step_tokens", "Positions computed in a step."),
}
_Values = Iterable[tuple[tuple[str, ...], float]]


class Metrics(Collector):
    """The metrics of one engine.

    Args:
        engine: Read whenever the metrics are asked for.
        model_name: Label of every metric.
    """

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._rejected: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def rejected(self, reason: str) -> None:
        """A request was refused or lost; `reason` is the code of its error."""
        with self._lock:
            self._rejected[reason] += 1

    def render(self) -> bytes:
        """All metrics in Prometheus' text format, of the type `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every metric as of now (prometheus_client calls this)."""
        client = self._engine.client
        stats = client.stats()
        yield from self._gauges(stats, is_up=client.dead is None)
        yield from self._counters(stats)
        for name, value in client.latency().items():
            yield from self._histograms(name, value)

    def _gauges(self, stats: EngineStats, *, is_up: bool) -> Iterator[Metric]:
        gauge = self._gauge
        yield gauge("vllm:num_requests_running", "Sequences that run.", stats.num_running)
        yield gauge("vllm:num_requests_waiting", "Sequences that wait to run.", stats.num_waiting)
        yield gauge(
            "vllm:kv_cache_usage_perc",
            "Part of the pages that running requests hold, 0 to 1.",
            stats.pool_use,
        )
        yield self._cache_info()
        yield gauge("paged:engine_up", "1 while the engine serves, 0 when it has failed.", float(is_up))
        yield gauge(
            "paged:executor_busy_ratio",
            "Part of the last seconds that it computed, 0 to 1.",
            stats.executor_busy,
        )
        states = {
            "free": stats.blocks_free,
            "cached": stats.blocks_cached,
            "used": stats.blocks_used,
            "shared": stats.blocks_shared,
        }
        yield self._gauge_by(
            "paged:blocks", "Pages by state; shared ones are used ones, too.", "state", states
        )

    def _cache_info(self) -> Metric:
        resolved = self._engine.resolved
        labels = {
            "block_size": str(resolved.page_size),
            "num_gpu_blocks": str(resolved.num_pages),
            "enable_prefix_caching": str(resolved.prefix_caching),
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "How the cache is set up.", labels=["model_name", *labels]
        )
        family.add_metric([self._model_name, *labels.values()], 1.0)
        return family

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        counter, counter_by = self._counter, self._counter_by
        yield counter("vllm:num_preemptions", "Preemptions.", stats.num_preemptions)
        yield counter("vllm:prompt_tokens", "Tokens of the prompts that ran.", stats.prompt_tokens)
        yield counter("vllm:prompt_tokens_cached", "Of them, served from the cache.", stats.cached_tokens)
        yield counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prompt_tokens
        )
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", stats.cached_tokens)
        yield counter("vllm:generation_tokens", "Tokens generated.", stats.generated_tokens)
        ended = dict.fromkeys(map(str, FinishReason), 0) | stats.requests_finished
        ended["abort"] += stats.requests_aborted
        yield counter_by(
            "vllm:request_success", "Requests served, by how they ended.", "finished_reason", ended
        )
        gaps = stats.gap_seconds
        causes = {
            "scheduler": gaps.scheduler,
            "tokenizer": gaps.tokenizer,
            "http": gaps.http,
            "no_work": gaps.no_work,
        }
        yield counter_by(
            "paged:step_gap_seconds", "Time in which nothing was computed, by cause.", "cause", causes
        )
        late = dict.fromkeys(map(str, MissCause), 0) | stats.scheduler.counters.itl_misses
        yield counter_by("paged:itl_misses", "Tokens later than --max-itl-ms, by cause.", "cause", late)
        yield counter(
            "paged:executor_seconds", "Time in which something was computed.", stats.executor_seconds
        )
        yield counter("paged:requests_aborted", "Requests aborted by their callers.", stats.requests_aborted)
        with self._lock:
            rejected = dict(self._rejected)
        yield counter_by(
            "paged:requests_rejected", "Requests refused or lost, by error code.", "reason", rejected
        )
        yield counter("paged:tokens_computed", "Positions computed.", stats.computed_tokens)
        yield counter("paged:tokens_recomputed", "Positions computed again.", stats.recomputed_tokens)

    def _histograms(self, attribute: str, value: HistogramValue) -> Iterator[Metric]:
        for name, (wanted, text) in _HISTOGRAMS.items():
            if wanted == attribute:
                family = HistogramMetricFamily(name, text, labels=["model_name"])
                family.add_metric([self._model_name], _cumulative(value), value.total)
                yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return _filled(GaugeMetricFamily(name, text, labels=["model_name"]), [((self._model_name,), value)])

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return _filled(CounterMetricFamily(name, text, labels=["model_name"]), [((self._model_name,), value)])

    def _gauge_by(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name", label])
        return _filled(family, (((self._model_name, key), value) for key, value in values.items()))

    def _counter_by(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", label])
        return _filled(family, (((self._model_name, key), value) for key, value in values.items()))


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: _Values) -> Metric:
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def _cumulative(value: HistogramValue) -> list[tuple[str, float]]:
    """Prometheus' buckets: everything up to a bound, and last everything."""
    bounds = (*map(floatToGoString, value.bounds), "+Inf")
    return list(zip(bounds, itertools.accumulate(map(float, value.counts)), strict=True))
