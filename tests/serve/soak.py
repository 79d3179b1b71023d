"""A soak: clients that send, read, leave and misbehave for a while, each answer compared with the same one alone.

asyncio.run(Soak(address, jobs, seconds, seed).run())
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CLIENTS = 64
BAD = [
    (b'{"prompt": "x", "max_tokens": -3}', 400),
    (b'{"prompt": "x", "max_token": 3}', 400),
    (b'{"prompt": "x", "stop": [""]}', 400),
    (b'{"prompt": ""}', 400),
    (b"{not json", 400),
    (b"\xff\xfe{}", 400),
    (b'{"prompt": "x", "temperature": -1}', 400),
    (b'{"prompt": "x", "model": "another"}', 404),
    (json.dumps({"prompt": [5] * 5000}).encode(), 400),
]


@dataclass(frozen=True)
class Job:
    """A request and what it gives when it runs alone."""

    body: dict[str, Any]
    text: str
    finish_reason: str
    completion_tokens: int


async def exchange(
    address: tuple[str, int], data: bytes, *, leave_after: int | None = None
) -> tuple[int, bytes]:
    """Status and body of one request; with `leave_after`, the connection is closed after so many bytes."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(data)
        if leave_after is not None:
            await reader.read(leave_after)
            return 0, b""
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.read()
        if b"transfer-encoding: chunked" in head.lower():
            body = _joined(body)
        return int(head.split(b" ", 2)[1]), body
    finally:
        writer.close()


def _joined(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        body, data = body + data[:length], data[length + 2 :]
    return body


def post(path: str, body: bytes) -> bytes:
    """The bytes of a request on a connection of its own."""
    head = f"POST {path} HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def get(path: str) -> bytes:
    """The same for GET."""
    return f"GET {path} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n\r\n".encode()


def answer_of(body: bytes, *, is_stream: bool) -> tuple[str, str, int]:
    """Text, finish reason and completion tokens."""
    if not is_stream:
        whole = json.loads(body)
        choice = whole["choices"][0]
        return choice["text"], choice["finish_reason"], whole["usage"]["completion_tokens"]
    parts = [part for part in body.decode().split("\n\n") if part and not part.startswith(":")]
    assert parts[-1] == "data: [DONE]", body[-200:]
    text, reason, tokens = "", "", 0
    for part in parts[:-1]:
        event = json.loads(part.removeprefix("data: "))
        assert "error" not in event, event
        for choice in event["choices"]:
            text += choice["text"]
            reason = choice["finish_reason"] or reason
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    return text, reason, tokens


@dataclass
class Soak:
    """Runs the clients.

    Attributes:
        done: What was done, by kind.
        faults: What should not have happened; the soak goes on to say how often.
    """

    address: tuple[str, int]
    jobs: list[Job]
    seconds: float
    seed: int = 0
    every: Callable[[float], None] = lambda part: None
    done: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        started = time.monotonic()
        clients = [asyncio.create_task(self._client(number, started)) for number in range(CLIENTS)]
        watch = asyncio.create_task(self._watch(started))
        await asyncio.gather(*clients)
        watch.cancel()

    async def _watch(self, started: float) -> None:
        while True:
            await asyncio.sleep(self.seconds / 20)
            self.every((time.monotonic() - started) / self.seconds)

    async def _client(self, number: int, started: float) -> None:
        rng = random.Random(self.seed * 1000 + number)
        actions = [self._whole, self._leave, self._bad, self._look]
        while time.monotonic() - started < self.seconds:
            action = rng.choices(actions, weights=[12, 4, 3, 1])[0]
            try:
                await action(rng)
            except (OSError, AssertionError, ValueError, KeyError, asyncio.IncompleteReadError) as error:
                self.faults[f"{action.__name__}: {type(error).__name__}: {error}"[:200]] += 1

    async def _whole(self, rng: random.Random) -> None:
        job = rng.choice(self.jobs)
        is_stream = rng.random() < 0.6
        options = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
        body = json.dumps(job.body | options).encode()
        status, data = await exchange(self.address, post("/v1/completions", body))
        assert status == 200, (status, data[:200])
        got = answer_of(data, is_stream=is_stream)
        assert got == (job.text, job.finish_reason, job.completion_tokens), (job.body, got)
        self.done["stream" if is_stream else "whole"] += 1

    async def _leave(self, rng: random.Random) -> None:
        job = rng.choice(self.jobs)
        body = json.dumps(job.body | {"stream": rng.random() < 0.7}).encode()
        if rng.random() < 0.3:
            # Nothing is ever read: the connection closes a moment after the request was sent.
            _, writer = await asyncio.open_connection(*self.address)
            writer.write(post("/v1/completions", body))
            await asyncio.sleep(rng.random() * 0.05)
            writer.close()
        else:
            await exchange(self.address, post("/v1/completions", body), leave_after=rng.randrange(1, 2000))
        self.done["left"] += 1

    async def _bad(self, rng: random.Random) -> None:
        body, wanted = rng.choice(BAD)
        status, data = await exchange(self.address, post("/v1/completions", body))
        assert status == wanted, (body[:60], status, data[:200])
        assert json.loads(data)["error"]["message"]
        self.done["refused"] += 1

    async def _look(self, rng: random.Random) -> None:
        path = rng.choice(["/metrics", "/health", "/ready", "/v1/models"])
        status, _ = await exchange(self.address, get(path))
        assert status == 200, (path, status)
        self.done["looked"] += 1
