"""A server on a port of its own in a thread, over the scripted engine or a loaded model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import uvicorn

from pagedcli.api.async_llm import AsyncLLM
from pagedcli.api.build import Engine
from pagedcli.cli.serve_run import attach
from pagedcli.config import ServeConfig
from pagedcli.serve.app import create_app
from pagedcli.serve.lifecycle import Lifecycle, bind, server_config
from pagedcli.serve.state import RequestRecord, ServerState
from tests.fakes import FakeExecutor, fake_engine

MODEL = "fake-model"


def scripted_engine(
    executor: FakeExecutor | None = None,
    *,
    generation_config: dict[str, Any] | None = None,
    depth: int = 2,
    **settings: Any,
) -> Engine:
    """What a server needs of `api.build.Engine`, over the scripted device."""
    executor = executor or FakeExecutor(num_blocks=256, max_model_len=1024)
    client = fake_engine(executor, depth=depth, **settings)
    resolved = SimpleNamespace(
        model=MODEL,
        path=Path("/models/fake-model"),
        page_size=executor.block_size,
        num_pages=executor.num_blocks,
        max_model_len=executor.max_model_len,
        max_num_seqs=executor.max_num_seqs,
        vocab_size=executor.vocab_size,
        dtype="float32",
        device="cpu",
        prefix_caching=True,
        kv_bytes=0,
    )
    engine = SimpleNamespace(
        client=client,
        resolved=resolved,
        config=None,
        tokenizer=client.codec,
        generation_config=generation_config or {},
        phases=(),
        close=client.close,
    )
    return cast("Engine", engine)


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@dataclass
class Served:
    """A running server.

    Attributes:
        url: Its address.
        engine: What it serves.
        state: Its state.
        records: One for each completions request that is over.
        errors: Codes of the errors that it answered with.
    """

    url: str
    engine: Engine
    state: ServerState
    records: list[RequestRecord] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60))

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        return url.host, url.port or 0

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(self.url + path, json=body, **options)

    def complete(self, **body: Any) -> dict[str, Any]:
        """The body of a completion that must succeed."""
        return self._ok("/v1/completions", body)

    def chat(self, **body: Any) -> dict[str, Any]:
        """The body of a chat completion that must succeed."""
        return self._ok("/v1/chat/completions", body)

    def _ok(self, path: str, body: Any) -> dict[str, Any]:
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return cast("dict[str, Any]", answer.json())

    def refusal(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error object of a request that must be refused."""
        answer = self.post(path, body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return cast("dict[str, Any]", error)

    def events(self, path: str, body: Any) -> list[dict[str, Any]]:
        """The events of a stream that must end with [DONE]."""
        with self.http.stream("POST", self.url + path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            return events_of(answer.read())

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, "it did not come to that in time"
            time.sleep(0.005)

    def assert_no_block_lost(self) -> None:
        """P1: idle, every block is free or cached."""
        client = self.engine.client
        self.wait_until(lambda: client.num_unfinished == 0 and client.stats().num_running == 0)
        counts = client.snapshot().counts
        assert counts.free + counts.cached == self.engine.resolved.num_pages
        assert not self.state.open


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The JSON of all events of a stream; the last one must be [DONE]."""
    parts = [part for part in data.decode().split("\n\n") if part and not part.startswith(":")]
    assert all(part.startswith("data: ") for part in parts)
    assert parts[-1] == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


def texts_of(events: list[dict[str, Any]]) -> dict[int, str]:
    """The text of each choice, put together."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            said = choice.get("text", choice.get("delta", {}).get("content", ""))
            texts[choice["index"]] = texts.get(choice["index"], "") + said
    return texts


@contextmanager
def served(
    engine: Engine | None = None,
    *,
    sampling: dict[str, Any] | None = None,
    keys: tuple[bytes, ...] = (),
    load: Callable[[], Engine] | None = None,
    **config: Any,
) -> Iterator[Served]:
    """Serve an engine; closes it."""
    engine = engine or scripted_engine()
    listener = bind("127.0.0.1", 0)
    lifecycle = Lifecycle(load or (lambda: engine), drain_s=5.0, on_ready=lambda llm: None)
    state = ServerState(ServeConfig(**config), lifecycle, keys=keys)
    server = Served(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, state)

    def ready(llm: AsyncLLM) -> None:
        attach(state, llm.engine, sampling or {})
        count = state.on_error
        state.on_error = lambda code: (server.errors.append(code), count(code))[1]

    lifecycle._on_ready = ready
    state.on_end = server.records.append
    runner = _Uvicorn(server_config(create_app(state), {}))

    async def run() -> None:
        if load is None:
            await lifecycle.load()
            assert lifecycle.failure is None, lifecycle.failure
        await runner.serve(sockets=[listener])
        await lifecycle.stop()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="test-server")
    thread.start()
    try:
        until = time.monotonic() + 60
        while not runner.started:
            assert thread.is_alive()
            assert time.monotonic() < until
            time.sleep(0.005)
        yield server
    finally:
        server.http.close()
        runner.should_exit = True
        thread.join(60)
        engine.close()


def raw_request(address: tuple[str, int], data: bytes, *, close_after: int | None = None) -> bytes:
    """Send bytes as they are and read what comes, or close after so many bytes."""
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(data)
        received = b""
        while close_after is None or len(received) < close_after:
            piece = connection.recv(65536)
            if not piece:
                break
            received += piece
        return received


def http_post(path: str, body: bytes, headers: str = "") -> bytes:
    """The bytes of a request."""
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n{headers}Connection: close\r\n"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
