"""Connections below the requests: what is no HTTP, what never comes in full, and offers of another protocol."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from pagedcli.serve import body as body_module
from pagedcli.serve import connection as connection_module
from tests.fakes import FakeExecutor
from tests.serve.support import Served, http_post, raw_request, scripted_engine, served

BODY = json.dumps({"prompt": "a", "max_tokens": 1, "temperature": 0}).encode()
OFFER = "Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"


def offering(body: bytes, protocol: str = OFFER, connection: str = "Upgrade, HTTP2-Settings, close") -> bytes:
    """A request that offers another protocol, as Java's HTTP client makes its first one on a plain connection."""
    return http_post("/v1/completions", body, protocol).replace(
        b"Connection: close", b"Connection: " + connection.encode()
    )


def error_of(received: bytes, status: int) -> dict[str, str]:
    """The error object of an answer, whose length is the one announced."""
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), received
    assert b"content-length: %d" % len(body) in head.lower()
    error: dict[str, str] = json.loads(body)["error"]
    return error


def texts(received: bytes) -> list[str]:
    """The text of each answer on a connection."""
    assert b"HTTP/1.1 4" not in received, received
    found = [json.JSONDecoder().raw_decode(body)[0] for body in received.decode().split("\r\n\r\n")[1:]]
    return [answer["choices"][0]["text"] for answer in found]


@pytest.mark.parametrize("pieces", [1, 3, 1000], ids=["whole", "in three", "byte by byte"])
def test_an_offer_of_another_protocol_is_passed_over(server: Served, pieces: int) -> None:
    data = offering(BODY)
    step = -(-len(data) // pieces)
    with socket.create_connection(server.address, timeout=60) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), step):
            client.sendall(data[start : start + step])
        received = b"".join(iter(lambda: client.recv(65536), b""))
    assert texts(received) == texts(raw_request(server.address, http_post("/v1/completions", BODY)))
    assert b"200 OK" in received


def test_requests_behind_an_offer_are_answered_too(server: Served) -> None:
    first = offering(BODY, connection="Upgrade, HTTP2-Settings")
    chunked = http_post("/v1/completions", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunked += b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    received = raw_request(server.address, first + first + chunked)
    assert received.count(b"HTTP/1.1 200 OK") == 3
    assert len(set(texts(received))) == 1


def test_an_offer_of_a_web_socket_is_passed_over(server: Served) -> None:
    data = offering(BODY, "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n", "Upgrade, close")
    assert len(texts(raw_request(server.address, data))) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET http://[::1 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
    ids=["tls", "http2", "version", "header", "connect", "target", "lengths"],
)
def test_what_is_no_request_gets_an_error_of_the_usual_shape(server: Served, data: bytes) -> None:
    error = error_of(raw_request(server.address, data), 400)
    assert error["code"] == "invalid_http"
    assert "\n" not in error["message"]
    assert "Traceback" not in error["message"]


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(connection_module, "ARRIVAL_S", 0.3)
    monkeypatch.setattr(body_module, "PIECE_S", 0.3)
    with served() as server:
        yield server


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"])
def test_a_request_that_never_comes_ends_its_connection(hurried: Served, sent: bytes) -> None:
    assert error_of(raw_request(hurried.address, sent), 408)["code"] == "request_timeout"


def test_a_second_request_that_never_comes_ends_its_connection(hurried: Served) -> None:
    whole = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    received = raw_request(hurried.address, whole + b"GET /hea")
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert error_of(received[received.index(b"HTTP/1.1 408") :], 408)


def test_a_body_that_never_comes_ends_its_connection(hurried: Served) -> None:
    received = raw_request(hurried.address, http_post("/v1/completions", BODY)[:-5])
    assert error_of(received, 408)["code"] == "request_timeout"
    hurried.wait_until(lambda: bool(hurried.records))  # told after the answer has gone out
    assert hurried.records[-1].status == 408


def test_a_long_answer_is_no_late_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is one of what comes in; the start of another request behind this one changes nothing of its answer."""
    monkeypatch.setattr(connection_module, "ARRIVAL_S", 0.1)
    body = json.dumps({"prompt": "a", "max_tokens": 30, "ignore_eos": True}).encode()
    request = http_post("/v1/completions", body).replace(b"Connection: close\r\n", b"")
    with served(scripted_engine(FakeExecutor(step_seconds=0.02, threaded=True))) as server:
        received = raw_request(server.address, request + b"GET /hea")
    head, _, answers = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert json.JSONDecoder().raw_decode(answers.decode())[0]["usage"]["completion_tokens"] == 30
    assert error_of(received[received.index(b"HTTP/1.1 408") :], 408)


def test_what_is_no_request_behind_one_that_is_answered_only_ends_the_connection() -> None:
    """An error written into the middle of another answer would be taken for a part of it."""
    body = json.dumps({"prompt": "a", "max_tokens": 30, "ignore_eos": True, "stream": True}).encode()
    with served(scripted_engine(FakeExecutor(step_seconds=0.02, threaded=True))) as server:
        received = raw_request(
            server.address, http_post("/v1/completions", body) + b"\x16\x03\x01 nonsense\r\n\r\n"
        )
    assert b"invalid_http" not in received
