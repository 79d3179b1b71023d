"""Cases of the engine tried over HTTP: A1 to A5, A8, C2, and `max_itl_ms`."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedcli.api.build import build_engine
from pagedcli.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagedcli.core.block_pool import BlockKey
from tests.conftest import MakeModel
from tests.fakes import FakeExecutor
from tests.serve.support import Served, http_post, scripted_engine, served


@contextmanager
def tiny(folder: object, *, pages: int, caching: bool = True, **scheduler: Any) -> Iterator[Served]:
    config = EngineConfig(
        model=ModelConfig(model=str(folder), dtype="float32"),
        cache=CacheConfig(num_pages=pages, prefix_caching=caching),
        scheduler=SchedulerConfig(**scheduler),
        device=DeviceConfig(device="cpu", threads=1),
        seed=0,
    )
    with served(build_engine(config)) as server:
        yield server
        server.assert_no_block_lost()


def prompt(length: int, first: int) -> list[int]:
    return [3 + (first * 13 + at * 7 + at * at) % 300 for at in range(length)]


def together(server: Served, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: server.complete(**body), bodies))


def counter(server: Served, name: str) -> float:
    text = server.http.get(server.url + "/metrics").text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )


def answers(bodies: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (b["choices"][0]["text"], b["choices"][0]["finish_reason"], b["usage"]["completion_tokens"])
        for b in bodies
    ]


def test_A1_a_prompt_over_the_pool_is_400_with_numbers_and_others_are_served(
    tiny_checkpoint: MakeModel,
) -> None:
    with tiny(tiny_checkpoint("llama"), pages=10) as server:
        short = {"prompt": prompt(20, 1), "max_tokens": 5, "temperature": 0}
        before = server.complete(**short)
        for number in range(5):
            error = server.refusal("/v1/completions", {"prompt": prompt(300, number)})
            assert error["code"] == "prompt_too_long"
            assert "needs 19 pages, the pool has 10" in error["message"]
        assert answers([server.complete(**short)]) == answers([before])
        assert counter(server, "paged:requests_rejected_total") == 5


def test_A2_A3_preemption_changes_nothing_and_is_reported(tiny_checkpoint: MakeModel) -> None:
    bodies = [
        {"prompt": prompt(40, n), "max_tokens": 100, "temperature": 0, "ignore_eos": True} for n in range(4)
    ]
    with tiny(tiny_checkpoint("llama"), pages=200) as server:
        wanted = answers(together(server, bodies))
        assert counter(server, "vllm:num_preemptions_total") == 0
    with tiny(tiny_checkpoint("llama"), pages=14) as server:
        assert answers(together(server, bodies)) == wanted
        preemptions = counter(server, "vllm:num_preemptions_total")
        assert 0 < preemptions <= 4 * 3
        computed = counter(server, "paged:tokens_computed_total")
        recomputed = counter(server, "paged:tokens_recomputed_total")
        assert recomputed > 0
        assert computed < 2 * (computed - recomputed)


def test_A4_new_prompts_do_not_hold_a_stream_back() -> None:
    """One long decode, and long prompts all the time: it gets a token in every step."""
    executor = FakeExecutor(num_blocks=512, max_model_len=1024, step_seconds=0.004, threaded=True)
    engine = scripted_engine(executor, max_num_batched_tokens=64, depth=1)
    stop = threading.Event()
    with served(engine) as server:

        def keep_coming(number: int) -> None:
            count = 0
            while not stop.is_set():
                server.complete(prompt=f"{number}-{count} " + "x" * 400, max_tokens=1)
                count += 1

        with ThreadPoolExecutor(3) as pool:
            coming = [pool.submit(keep_coming, number) for number in range(3)]
            server.wait_until(lambda: len(executor.plans) > 3)
            events = server.events(
                "/v1/completions", {"prompt": "long", "max_tokens": 80, "ignore_eos": True}
            )
            stop.set()
            for future in coming:
                future.result()
        assert len([event for event in events if event["choices"][0]["text"]]) == 80
        assert engine.client.stats().scheduler.counters.max_decode_gap == 1


class _SameHash(BlockKey):
    def __hash__(self) -> int:
        return 1


def test_A5_keys_that_collide_share_nothing_but_equal_tokens(tiny_checkpoint: MakeModel) -> None:
    bodies = [{"prompt": prompt(50, n), "max_tokens": 8, "temperature": 0} for n in (1, 2, 1, 3, 2)]
    with tiny(tiny_checkpoint("llama"), pages=60, caching=False) as server:
        cold = answers([server.complete(**body) for body in bodies])
    with tiny(tiny_checkpoint("llama"), pages=60) as server:
        server.engine.client._scheduler.kv.pool.make_key = _SameHash  # type: ignore[attr-defined]
        warm = [server.complete(**body) for body in bodies]
    assert answers(warm) == cold
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in warm]
    assert cached == [0, 0, 48, 0, 48]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_A8_what_does_not_fit_is_the_same_error_with_and_without_prefix_caching(
    tiny_checkpoint: MakeModel, path: str
) -> None:
    words = "the cat and the hat " * 60
    body: dict[str, Any] = (
        {"prompt": words} if path == "/v1/completions" else {"messages": [{"role": "user", "content": words}]}
    )
    errors = []
    for caching in (True, False):
        with tiny(tiny_checkpoint("llama"), pages=4, caching=caching) as server:
            errors.append(server.refusal(path, body))
            assert server.refusal(path, {**body, "stream": True}) == errors[-1]
    assert errors[0] == errors[1]
    assert errors[0]["code"] == "prompt_too_long"


@pytest.mark.parametrize("prompt_length", [5, 900])
def test_A18_pages_are_free_within_two_steps_of_a_client_that_left(prompt_length: int) -> None:
    """In the middle of a stream, and in the middle of a prefill of fifteen steps."""
    executor = FakeExecutor(num_blocks=512, max_model_len=1024, step_seconds=0.15, threaded=True)
    with served(scripted_engine(executor, max_num_batched_tokens=64, depth=1)) as server:
        body = json.dumps({"prompt": "x" * prompt_length, "max_tokens": 100, "stream": True}).encode()
        connection = socket.create_connection(server.address, timeout=60)
        connection.sendall(http_post("/v1/completions", body))
        server.wait_until(lambda: len(executor.plans) >= 3)
        assert server.engine.client.stats().blocks_used > 0
        begun = len(executor.plans)
        connection.close()
        server.wait_until(lambda: server.engine.client.stats().blocks_used == 0)
        assert len(executor.plans) - begun <= 2


def test_C2_a_short_request_does_not_wait_behind_a_huge_prefill() -> None:
    executor = FakeExecutor(num_blocks=512, max_model_len=2000, step_seconds=0.02, threaded=True)
    with served(scripted_engine(executor, max_num_batched_tokens=32, depth=1)) as server:
        with ThreadPoolExecutor(1) as pool:
            huge = pool.submit(server.complete, prompt="h" * 20 * 32, max_tokens=1)
            server.wait_until(lambda: len(executor.plans) >= 2)
            begun = len(executor.plans)
            server.complete(prompt="short", max_tokens=1)
            taken = len(executor.plans) - begun
            assert not huge.done()
            huge.result()
        assert taken <= 5


def test_a_pace_that_is_asked_for_reaches_the_scheduler_and_the_metrics() -> None:
    executor = FakeExecutor(num_blocks=256, max_model_len=1024, step_seconds=0.02, threaded=True)
    with served(scripted_engine(executor, max_itl_ms=5.0, depth=1)) as server:
        server.complete(prompt="hello", max_tokens=10, ignore_eos=True)
        text = server.http.get(server.url + "/metrics").text
    assert 'paged:itl_misses_total{cause="batch",model_name="fake-model"} 9.0' in text
