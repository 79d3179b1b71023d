"""Malformed bodies, whatever they are: no 500, no traceback, and the next request is served."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from pagedcli.api.build import Engine
from pagedcli.serve.openapi import document
from pagedcli.serve.schemas import ApplyTemplateBody, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.serve.support import Served, http_post, raw_request, served


@pytest.fixture(scope="module")
def server(tiny_engine: Engine) -> Iterator[Served]:
    """A loaded model: its templates and its tokenizer are what must not break."""
    with served(tiny_engine, max_n=2) as running:
        yield running
        running.assert_no_block_lost()


PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/apply-template"]
BODIES = dict(
    zip(PATHS, (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, ApplyTemplateBody), strict=True)
)
QUICK = settings(
    max_examples=15,
    deadline=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
LONG = settings(QUICK, max_examples=1000)
VALID = {
    "prompt": "abc",
    "messages": [{"role": "user", "content": "x"}],
    "tokens": [1, 2, 3],
    "max_tokens": 3,
}
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(st.characters(codec=None), max_size=12)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(codec=None), max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


def check(server: Served, path: str, content: bytes) -> None:
    answer = server.http.post(server.url + path, content=content)
    assert answer.status_code in (200, 400, 404), (answer.status_code, answer.text)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert b"Traceback" not in answer.content


def body_of(path: str, fields: dict[str, Any]) -> bytes:
    """What the endpoint needs, some of it replaced; numbers that are none are written as JSON has no way to."""
    own = {name: value for name, value in VALID.items() if name in BODIES[path].model_fields}
    if path == "/tokenize":
        del own["messages"]
    return json.dumps({**own, **fields}, ensure_ascii=True).encode()


def try_fields(server: Served, path: str, data: st.DataObject) -> None:
    """A body that would be served, with some of its fields anything at all."""
    names = st.sampled_from(sorted(BODIES[path].model_fields)) | st.text(max_size=6)
    fields = data.draw(st.dictionaries(names, values, min_size=1, max_size=3))
    fields.pop("n", None)  # a valid one may ask for a lot
    check(server, path, body_of(path, fields))


def try_any_json(server: Served, path: str, data: st.DataObject) -> None:
    check(server, path, json.dumps(data.draw(values)).encode())


def try_broken_bytes(server: Served, path: str, data: st.DataObject) -> None:
    """A body that would be served, with some of its bytes lost or replaced."""
    whole = bytearray(body_of(path, {}))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    check(server, path, bytes(whole))


TRIES = [try_fields, try_any_json, try_broken_bytes]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("attempt", TRIES)
@QUICK
@given(data=st.data())
def test_no_body_gives_a_500(server: Served, path: str, attempt: Any, data: st.DataObject) -> None:
    attempt(server, path, data)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("attempt", TRIES)
@LONG
@given(data=st.data())
def test_no_body_gives_a_500_at_length(server: Served, path: str, attempt: Any, data: st.DataObject) -> None:
    attempt(server, path, data)


def test_messages_of_any_kind(server: Served) -> None:
    choose = random.Random(5)
    parts: list[Any] = ["x", None, 5, [], {}, [{"type": "text"}], [{"type": "text", "text": 5}], [5], [[]]]
    parts += [[{"type": "image_url", "image_url": {"url": "http://localhost/"}}], {"a": "b"}, True, [None]]
    for _ in range(80):
        messages = [
            {
                choose.choice(["role", "content", "name", "tool_calls", "tool_call_id", "x"]): choose.choice(
                    [*parts, "user", "assistant", "tool"]
                )
                for _ in range(choose.randrange(4))
            }
            for _ in range(choose.randrange(4))
        ]
        answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: abc\r\n\r\n{}",
        b"POST /v1/comple\xfftions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: \xff\xff\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
        b"OPTIONS * HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    ],
    ids=repr,
)
def test_bytes_that_are_no_request(server: Served, data: bytes) -> None:
    received = raw_request(server.address, data)
    assert b" 500 " not in received.split(b"\r\n")[0]
    assert b"Traceback" not in received
    assert server.complete(prompt="a", max_tokens=1)


def test_headers_of_any_kind(server: Served) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    for header in (
        "Content-Type: text/plain\r\n",
        "Content-Encoding: gzip\r\n",
        "X: \x7f\xff\r\n",
        "Accept: */*\r\n",
    ):
        received = raw_request(server.address, http_post("/v1/completions", body, header))
        assert received.split(b" ")[1] in (b"200", b"400", b"415"), received


CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
schema = schemathesis.openapi.from_dict(document())
small = settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@schema.parametrize()
@small
def test_the_openapi_document_is_kept(case: Any, server: Served) -> None:
    if isinstance(case.body, dict):
        # What is valid may ask for more than a test has time for.
        case.body.pop("max_tokens", None)
        case.body.pop("max_completion_tokens", None)
        case.body.pop("min_tokens", None)
    case.call_and_validate(base_url=server.url, checks=CHECKS, timeout=30)


def test_the_openapi_document_is_served(server: Served) -> None:
    assert server.http.get(server.url + "/openapi.json").json() == document()
