"""P4: what is wrong with a request is said in OpenAI's shape with the right status, and disturbs nobody."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from pagedcli.engine.admission import QueueLimits
from pagedcli.serve.state import ServerState
from tests.fakes import FakeExecutor
from tests.serve.support import Served, http_post, raw_request, scripted_engine, served

CHAT = [{"role": "user", "content": "hi"}]
COMPLETION_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "after"}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"seed": 2**70}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"store": True}, "store"),
    ({"store": 0}, "store"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"guided_json": {}}, "guided_json"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"request_id": "with space"}, "request_id"),
    ({"request_id": ""}, "request_id"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"priority": 2**40}, "priority"),
    ({"user": 5}, "user"),
    ({"model": 5}, "model"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": ["a"] * 257}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
]
CHAT_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages"),
    ({"messages": [{}]}, "messages"),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_tokens"),
    ({"echo": True}, "echo"),
    ({"prompt": "a"}, "prompt"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"continue_final_message": 5}}, "chat_template_kwargs"),
    ({"reasoning_effort": 5}, "reasoning_effort"),
    ({"functions": []}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
]


@pytest.mark.parametrize(("fields", "field"), COMPLETION_REFUSALS, ids=str)
def test_completions_refuse_by_name(server: Served, fields: dict[str, Any], field: str) -> None:
    error = server.refusal("/v1/completions", {"prompt": "a", **fields})
    assert error["param"] == field, error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("fields", "field"), CHAT_REFUSALS, ids=str)
def test_chats_refuse_by_name(server: Served, fields: dict[str, Any], field: str) -> None:
    error = server.refusal("/v1/chat/completions", {"messages": CHAT, **fields})
    assert error["param"] == field, error


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_refused_stream_is_a_json_error(server: Served, path: str) -> None:
    answer = server.post(path, {"prompt": "a", "stream": True, "temperature": 900})
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"


def test_an_unknown_field_is_named_with_what_was_meant(server: Served) -> None:
    error = server.refusal("/v1/completions", {"prompt": "a", "temprature": 1})
    assert (error["code"], error["param"]) == ("unknown_field", "temprature")
    assert "did you mean temperature" in error["message"]
    error = server.refusal("/v1/completions", {"prompt": "a", "max_new_tokens": 1})
    assert "write max_tokens" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "max_tokens": ' + b"9" * 4000 + b"}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"\\ud800": 1, "prompt": "a"}',
        b'{"prompt": "a", "model": "\\ud800"}',
        b'{"prompt": "a", "stop": "\\ud800"}',
        b'{"prompt": "a", "bad_words": ["\\ud800"]}',
        b'{"prompt": "a", "cache_salt": "\\ud800"}',
        b'{"prompt": "a", "logit_bias": {"\\ud800": 1}}',
        b'{"prompt": "a", "request_id": "\\ud800"}',
        b'{"prompt": "a", "metadata": ' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"}",
        b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}",
        b'{"prompt": "a", "metadata": {"a": ' + b"[" * 100000,
        b"\xff\xfe{\x00}\x00",
        b'{"prompt": "a"} {"prompt": "b"}',
        b'\x00{"prompt": "a"}',
    ],
    ids=lambda body: repr(body[:40]),
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_no_body_gives_a_500(server: Served, path: str, body: bytes) -> None:
    answer = server.http.post(server.url + path, content=body)
    assert answer.status_code in (400, 404), answer.text
    assert "Traceback" not in answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_lone_surrogates_in_messages_are_refused(server: Served) -> None:
    body = b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'
    for path in ("/v1/chat/completions", "/tokenize", "/apply-template"):
        assert server.http.post(server.url + path, content=body).status_code == 400
    whole = body.replace(b"\\ud83d", b"\\ud83d\\ude00")
    answer = server.http.post(server.url + "/apply-template", content=whole)
    assert answer.json()["prompt"].startswith("[user]😀")


def test_errors_do_not_disturb_others(server: Served) -> None:
    before = server.complete(prompt="Once", temperature=0)["choices"]
    for fields, _ in COMPLETION_REFUSALS:
        server.post("/v1/completions", {"prompt": "a", **fields})
    assert server.complete(prompt="Once", temperature=0)["choices"] == before
    server.assert_no_block_lost()


def test_a_body_over_the_limit_is_413() -> None:
    with served(max_body_bytes=1000) as server:
        error = server.refusal("/v1/completions", {"prompt": "x" * 1000}, 413)
        assert error["code"] == "body_too_large"
        assert "1,000" in error["message"]
        chunked = b"".join(b"64\r\n" + b"x" * 100 + b"\r\n" for _ in range(20)) + b"0\r\n\r\n"
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        assert raw_request(server.address, head + chunked).startswith(b"HTTP/1.1 413")
        # announced, refused before it is sent
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n"
        assert raw_request(server.address, head, close_after=12).startswith(b"HTTP/1.1 413")
        assert server.complete(prompt="a", max_tokens=1)


def test_unknown_routes_and_methods(server: Served) -> None:
    answer = server.http.get(server.url + "/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    answer = server.http.get(server.url + "/v1/completions")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"
    assert server.http.post(server.url + "/health").status_code == 405
    assert server.http.get(server.url + "/v1/models/").status_code == 404
    assert server.http.get(server.url + "/docs").status_code == 404
    for path in ("/%ff", "/v1/models/%ff%00", "/v1/models/..%2f..%2fetc", "/v1/requests/%0a/abort"):
        assert server.http.get(server.url + path).status_code in (404, 405)


def test_aborting_what_is_not_there_is_404(server: Served) -> None:
    error = server.refusal("/v1/requests/cmpl-none/abort", {}, 404)
    assert error["code"] == "request_not_found"


def test_a_full_queue_is_429_with_retry_after() -> None:
    engine = scripted_engine(
        FakeExecutor(step_seconds=0.05, threaded=True, max_num_seqs=1, max_model_len=900, num_blocks=256),
        limits=QueueLimits(max_requests=1),
    )
    with served(engine) as server:
        bodies = [{"prompt": f"p{i}", "max_tokens": 40, "stream": True} for i in range(4)]
        answers = [raw_start(server, bodies[0])]
        # Until the first one runs it fills the queue itself, and all others would be refused.
        server.wait_until(lambda: engine.client.stats().num_running == 1)
        answers += [raw_start(server, body) for body in bodies[1:]]
        statuses = []
        server.wait_until(lambda: engine.client.num_unfinished >= 2)
        answer = server.post("/v1/completions", {"prompt": "one more", "max_tokens": 1})
        statuses.append(answer.status_code)
        assert answer.status_code == 429
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert int(answer.headers["retry-after"]) >= 1
        ready = server.http.get(server.url + "/ready")
        assert ready.status_code == 503
        assert ready.headers["retry-after"]
        for connection in answers:
            connection.close()
        server.assert_no_block_lost()


def raw_start(server: Served, body: dict[str, Any]) -> Any:
    """Send a request and leave the connection open."""
    connection = socket.create_connection(server.address, timeout=60)
    connection.sendall(http_post("/v1/completions", json.dumps(body).encode()))
    return connection


def test_a_dead_engine_is_503_and_red() -> None:
    engine = scripted_engine(FakeExecutor(fail_at=3))
    with served(engine) as server:
        with server.http.stream(
            "POST", server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 50, "stream": True}
        ) as answer:
            data = answer.read().decode()
        if answer.status_code == 200:
            assert '"error"' in data
            assert data.endswith("data: [DONE]\n\n")
        error = server.refusal("/v1/completions", {"prompt": "a"}, 503)
        assert (error["type"], error["code"]) == ("server_error", "engine_dead")
        assert server.post("/v1/completions", {"prompt": "a"}).headers["retry-after"]
        assert server.http.get(server.url + "/health").status_code == 503
        assert server.http.get(server.url + "/ready").status_code == 503


def test_a_model_that_loads_is_503_until_it_is_there() -> None:
    with served() as server:
        llm, server.state.lifecycle.llm = server.state.lifecycle.llm, None
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("POST", "/tokenize")):
            answer = server.http.request(
                method, server.url + path, json={"prompt": "a"} if method == "POST" else None
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
            assert answer.headers["retry-after"]
        assert server.http.get(server.url + "/health").status_code == 200
        assert server.http.get(server.url + "/ready").status_code == 503
        server.state.lifecycle.llm = llm
        assert server.http.get(server.url + "/ready").status_code == 200


def test_a_defect_tells_no_story(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as server:

        def fail(state: ServerState, name: str | None) -> str:
            raise ValueError("secret detail")

        monkeypatch.setattr(ServerState, "check_model", fail)
        answer = server.post("/v1/completions", {"prompt": "a"})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "secret" not in answer.text
        server.wait_until(lambda: bool(server.records))
        assert server.records[0].status == 500
