"""Cases from the field, tried over HTTP: A6, A7, A11 to A18, C1, C9, C11."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pagedcli.api.build import build_engine
from pagedcli.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from tests.conftest import MakeModel
from tests.fakes import FakeExecutor, scripted
from tests.serve.support import Served, events_of, http_post, scripted_engine, served, texts_of

CHAT = [{"role": "user", "content": "hi"}]
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if reasoning_effort is defined and reasoning_effort not in ['low', 'high'] %}"
    "{{ raise_exception('unknown reasoning_effort ' + reasoning_effort) }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A loaded model with a template that refuses what A16 sends."""
    template = tmp_path_factory.mktemp("template") / "alternating.jinja"
    template.write_text(ALTERNATING)
    config = EngineConfig(
        ModelConfig(str(tiny_checkpoint("llama")), dtype="float32", chat_template=str(template)),
        CacheConfig(num_pages=200),
        device=DeviceConfig("cpu", threads=1),
        seed=0,
    )
    with served(build_engine(config)) as server:
        yield server
        server.assert_no_block_lost()


def prompt_of(length: int, first: int = 5) -> list[int]:
    return [first, *(20 + index * 7 % 90 for index in range(length - 1))]


def test_A6_prompt_logprobs_with_a_cached_prefix(tiny: Served) -> None:
    asked = {"prompt": prompt_of(33, 6), "prompt_logprobs": 1, "max_tokens": 1, "temperature": 0}
    first, second = (tiny.complete(**asked)["choices"][0]["prompt_logprobs"] for _ in range(2))
    assert len(second) == 33
    assert second[0] is None
    assert all(entry for entry in second[1:])
    assert second == first


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33])
def test_A7_full_cache_hit(tiny: Served, length: int) -> None:
    asked = {"prompt": prompt_of(length, 7), "max_tokens": 8, "temperature": 0}
    answers = [tiny.complete(**asked) for _ in range(5)]
    assert all(answer["choices"] == answers[0]["choices"] for answer in answers)
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    # the last token is always computed
    assert all(count < length for count in cached)
    if length > 16:
        assert cached[1] >= 16


def said(text: str, **options: Any) -> Any:
    """A server whose model says `text` to everything."""
    return served(scripted_engine(FakeExecutor(next_token=scripted({}, default=text), **options)))


def test_A11_no_character_of_a_stop_is_streamed() -> None:
    with said("The capital of France is Paris.") as server:
        asked = {"prompt": "q", "max_tokens": 64, "stop": "l of Fr"}
        events = server.events("/v1/completions", asked)
        assert texts_of(events) == {0: "The capita"}
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        # what only begins like a stop is held back, then sent
        assert texts_of(server.events("/v1/completions", {**asked, "stop": "l of Fi"})) == {
            0: "The capital of France is Paris."
        }


@pytest.mark.parametrize(("stop", "text"), [("Pari", "The capital is "), ("al is", "The capit")])
def test_A12_a_stop_need_not_end_with_a_token(stop: str, text: str) -> None:
    with said("The capital is Paris.") as server:
        asked = {"prompt": "q", "max_tokens": 64, "stop": [stop]}
        assert server.complete(**asked)["choices"][0]["text"] == text
        assert texts_of(server.events("/v1/completions", asked)) == {0: text}


def test_A13_streamed_characters_are_whole() -> None:
    text = "안녕하세요 👩‍👩‍👧 你好 é"
    with said(text) as server:
        asked = {"messages": CHAT, "max_tokens": 100}
        events = server.events("/v1/chat/completions", asked)
        assert texts_of(events) == {0: text}
        assert "\ufffd" not in json.dumps(events, ensure_ascii=False)
        assert server.chat(**asked)["choices"][0]["message"]["content"] == text
        cut = server.events("/v1/chat/completions", {**asked, "max_tokens": 2})
        assert texts_of(cut) == {0: "\ufffd"}


@pytest.mark.parametrize(
    ("bias", "named"), [({"999999": 5}, "999999"), ({"-1": 1}, "-1"), ({"abc": 1}, "abc"), ({"5": 1e9}, "5")]
)
def test_A14_a_bad_logit_bias_is_400_and_names_it(tiny: Served, bias: dict[str, float], named: str) -> None:
    other = {"prompt": prompt_of(9), "max_tokens": 12, "temperature": 0}
    before = tiny.complete(**other)["choices"]
    error = tiny.refusal("/v1/completions", {"prompt": "a", "logit_bias": bias})
    assert error["param"] == "logit_bias"
    assert named in error["message"]
    assert tiny.complete(**other)["choices"] == before


def test_A15_max_tokens_null_zero_and_nonsense(tiny: Served) -> None:
    body = tiny.complete(prompt=prompt_of(4), max_tokens=None, temperature=0, ignore_eos=True)
    assert body["usage"]["total_tokens"] == tiny.engine.resolved.max_model_len
    for wrong in (0, -1, "5"):
        assert tiny.refusal("/v1/completions", {"prompt": "a", "max_tokens": wrong})["param"] == "max_tokens"
    echo = tiny.complete(prompt="hello there", max_tokens=0, echo=True, logprobs=1)
    (choice,) = echo["choices"]
    assert choice["text"] == "hello there"
    assert echo["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["token_logprobs"]) == echo["usage"]["prompt_tokens"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert None not in choice["logprobs"]["token_logprobs"][1:]
    assert "".join(choice["logprobs"]["tokens"]) == "hello there"
    assert tiny.complete(prompt="hello there", max_tokens=0, echo=True)["choices"][0]["logprobs"] is None
    events = tiny.events(
        "/v1/completions", {"prompt": "hello there", "max_tokens": 0, "echo": True, "logprobs": 1}
    )
    assert texts_of(events) == {0: "hello there"}


@pytest.mark.parametrize("stream", [False, True])
def test_A16_the_templates_own_message(tiny: Served, stream: bool) -> None:
    twice = {"messages": CHAT + CHAT, "stream": stream}
    answer = tiny.post("/v1/chat/completions", twice)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert "Conversation roles must alternate" in answer.json()["error"]["message"]
    answer = tiny.post(
        "/v1/chat/completions", {"messages": CHAT, "reasoning_effort": "extreme", "stream": stream}
    )
    assert answer.status_code == 400
    assert "unknown reasoning_effort extreme" in answer.json()["error"]["message"]
    low = {"messages": CHAT, "reasoning_effort": "low", "max_tokens": 1}
    assert tiny.chat(**low)["usage"]["completion_tokens"] == 1
    kwargs = {"messages": CHAT, "chat_template_kwargs": {"reasoning_effort": "odd"}}
    assert "odd" in tiny.refusal("/v1/chat/completions", kwargs)["message"]


def test_continue_final_message_goes_on_with_it(tiny: Served) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "So it"}]
    told = tiny.post("/apply-template", {"messages": messages, "continue_final_message": True})
    assert told.json() == {"prompt": "hiSo it"}
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert tiny.refusal("/v1/chat/completions", both)["code"] == "invalid_value"


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_A17_no_usage_unless_asked_for(server: Served, options: Any) -> None:
    asked = {"messages": CHAT, "max_tokens": 3} | ({} if options is None else {"stream_options": options})
    events = server.events("/v1/chat/completions", asked)
    assert all("usage" not in event for event in events)
    assert all(event["choices"] for event in events)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_A17_usage_comes_once_with_totals_over_all_choices(server: Served, path: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 5, "n": 2, "stream_options": {"include_usage": True}}
    asked |= {"prompt": ["ab", "cde"]} if path == "/v1/completions" else {"messages": CHAT}
    events = server.events(path, asked)
    assert [event for event in events if "usage" in event] == [events[-1]]
    assert events[-1]["choices"] == []
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == 5 * 2 * (2 if "prompt" in asked else 1)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert "cached_tokens" in usage["prompt_tokens_details"]


def test_A17_continuous_usage_counts_up(server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events(
        "/v1/chat/completions", {"messages": CHAT, "max_tokens": 4, "stream_options": options}
    )
    said_so = [event["usage"]["completion_tokens"] for event in events[1:]]
    assert said_so == [1, 2, 3, 4, 4, 4]
    assert {event["usage"]["prompt_tokens"] for event in events[1:]} == {events[-1]["usage"]["prompt_tokens"]}


def slow_server(**options: Any) -> Any:
    executor = FakeExecutor(
        step_seconds=0.01, threaded=True, max_model_len=2000, num_blocks=2048, max_num_seqs=64, **options
    )
    return served(scripted_engine(executor, max_num_batched_tokens=64))


def open_request(server: Served, path: str, body: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection(server.address, timeout=60)
    connection.sendall(http_post(path, json.dumps(body).encode()))
    return connection


def steps_at_aborts(server: Served) -> list[int]:
    """Steps done whenever the server aborts something, from now on."""
    client, steps = server.engine.client, []
    abort = client.abort

    def noting(request_id: str) -> bool:
        is_open = abort(request_id)
        steps.append(client._scheduler.stats.counters.steps)  # not as published a moment ago
        return is_open

    client.abort = noting  # type: ignore[method-assign]
    return steps


def assert_abandoned(server: Served, count: int) -> None:
    """All requests are aborted, their blocks free within two steps of the last hearing of it, and told as such."""
    client = server.engine.client
    server.wait_until(lambda: client.num_unfinished == 0)
    server.wait_until(lambda: len(server.records) == count)
    assert all(record.client_gone for record in server.records)
    assert client.stats().requests_aborted == count
    server.assert_no_block_lost()


def test_A18_a_stream_that_is_left_ends_its_request(caplog: pytest.LogCaptureFixture) -> None:
    with slow_server() as server:
        connection = open_request(
            server, "/v1/completions", {"prompt": "a", "max_tokens": 1900, "stream": True}
        )
        received = b""
        while received.count(b"data: ") < 3:
            received += connection.recv(4096)
        steps = steps_at_aborts(server)
        connection.close()
        assert_abandoned(server, 1)
        # from when the server hears of it; how long the system takes to tell is not ours
        assert server.engine.client.stats().num_steps - steps[0] <= 2
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("stream", [False, True])
def test_A18_a_request_that_is_left_during_prefill_ends(stream: bool) -> None:
    with slow_server() as server:
        body = {"prompt": "x" * 1900, "max_tokens": 50, "stream": stream}
        connection = open_request(server, "/v1/completions", body)
        server.wait_until(lambda: server.engine.client.stats().num_running == 1)
        connection.close()
        assert_abandoned(server, 1)
        assert server.engine.client.stats().generated_tokens == 0


def test_A18_a_whole_answer_nobody_waits_for_ends_its_request() -> None:
    with slow_server() as server:
        connection = open_request(server, "/v1/chat/completions", {"messages": CHAT, "n": 3})
        server.wait_until(lambda: server.engine.client.stats().generated_tokens > 10)
        connection.close()
        assert_abandoned(server, 1)


def test_A18_fifty_at_once() -> None:
    with slow_server() as server:
        bodies = [
            {"prompt": "p" * (i + 1) * 7, "max_tokens": 1500, "stream": i % 2 == 0, "n": 1 + i % 3}
            for i in range(50)
        ]
        connections = [open_request(server, "/v1/completions", body) for body in bodies]
        server.wait_until(lambda: server.engine.client.num_unfinished == 50)
        time.sleep(0.1)
        for connection in connections:
            connection.close()
        assert_abandoned(server, 50)


def test_A18_an_abort_by_id_answers_with_what_there_is() -> None:
    with slow_server() as server, ThreadPoolExecutor(2) as pool:
        body = {"prompt": ["a", "b"], "max_tokens": 1900, "request_id": "mine"}
        whole = pool.submit(server.complete, **body)
        server.wait_until(lambda: "cmpl-mine" in server.state.open)
        duplicate = server.refusal("/v1/completions", body)
        assert (duplicate["code"], duplicate["param"]) == ("duplicate_id", "request_id")
        server.wait_until(lambda: server.engine.client.stats().generated_tokens > 5)
        told = server.post("/v1/requests/cmpl-mine/abort", {})
        assert told.json() == {"id": "cmpl-mine", "aborted": True}
        reasons = {choice["finish_reason"] for choice in whole.result(60)["choices"]}
        assert reasons == {"abort"}
        server.assert_no_block_lost()


def test_a_long_prefill_is_kept_alive() -> None:
    executor = FakeExecutor(step_seconds=0.1, threaded=True, max_model_len=2000, num_blocks=256)
    engine = scripted_engine(executor, max_num_batched_tokens=64)
    with served(engine, keep_alive_s=0.1) as server:
        body = {"messages": [{"role": "user", "content": "x" * 500}], "max_tokens": 2, "stream": True}
        with server.http.stream("POST", server.url + "/v1/chat/completions", json=body) as answer:
            data = answer.read()
    assert data.startswith(b'data: {"id"')
    assert data.count(b": keep-alive\n\n") >= 2
    events = events_of(data)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert len(texts_of(events)[0]) == 2


@pytest.mark.parametrize("stop", ["", [""], ["", "x"]])
def test_C1_an_empty_stop_is_refused(server: Served, stop: Any) -> None:
    assert server.refusal("/v1/completions", {"prompt": "a", "stop": stop})["param"] == "stop"


@pytest.mark.parametrize(
    "fields",
    [{"top_p": 0.1}, {"top_k": -1}, {"top_k": 0}, {"top_k": 1}, {"min_p": 0.1}, {"seed": 11}],
    ids=str,
)
def test_C9_temperature_0_is_always_argmax(tiny: Served, fields: dict[str, Any]) -> None:
    asked = {"prompt": prompt_of(12), "max_tokens": 12, "temperature": 0}
    expected = tiny.complete(**asked)["choices"][0]["text"]
    for together in (fields, {"top_p": 1, **fields}):
        assert tiny.complete(**asked, **together)["choices"][0]["text"] == expected


def test_C11_penalties_count_what_they_should(tiny: Served) -> None:
    """A prompt full of token 7, and a choice between 7 and 9."""
    asked = {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "allowed_token_ids": [7, 9]}
    first: dict[str, list[int]] = {"": [], "presence": [], "frequency": [], "repetition": []}
    for seed in range(12):
        prompt = [*prompt_of(10, 5 + seed), *[7] * 12, seed + 20]
        for name, chosen in first.items():
            penalty = {f"{name}_penalty": 2.0} if name else {}
            body = tiny.complete(prompt=prompt, return_token_ids=True, **asked, **penalty)
            chosen += body["choices"][0]["token_ids"]
    assert 7 in first[""], "else there is nothing to penalize"
    assert first["presence"] == first["frequency"] == first[""], "these count the output only"
    assert first["repetition"] != first[""], "this one counts the prompt"


def test_C11_output_penalties_forbid_repetition_in_the_output(tiny: Served) -> None:
    asked = {"prompt": prompt_of(6), "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    asked["ignore_eos"] = True
    plain = tiny.complete(**asked)["choices"][0]["token_ids"]
    varied = tiny.complete(**asked, presence_penalty=2.0, frequency_penalty=2.0)["choices"][0]["token_ids"]
    assert len(set(varied)) > len(set(plain))


def test_P2_answers_over_http_are_the_same_alone_and_together(tiny: Served) -> None:
    bodies = [{"prompt": prompt_of(5 + i * 3, 5 + i), "max_tokens": 10, "temperature": 0} for i in range(8)]
    alone = [tiny.complete(**body)["choices"] for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda body: tiny.complete(**body)["choices"], bodies))
    assert together == alone
