"""A server that answers by a script, on a clock that it shares with the client: what is measured is exact.

The clock stands still while anything happens, and then goes to the next moment for which somebody waits. Times of a
script are multiples of 1/64 s, which floats hold exactly.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from pagedcli.bench.http_drive import LoadState, drive
from pagedcli.bench.http_prompts import Asking, PromptForm
from pagedcli.bench.load import Answer, Client, LoadRequest, Target, run_load
from pagedcli.workloads.requests import WorkloadRequest

START = 64.0
CALM = 30
"""Turns of the event loop without any change after which nothing more will happen at this moment."""

Serve = Callable[["FakeServer", asyncio.StreamWriter, dict[str, Any]], Awaitable[None]]


class FakeServer:
    """Clock and server."""

    def __init__(self, serve: Serve) -> None:
        self.now = START
        self.num_read = 0
        self.num_written = 0
        self.num_ended = 0
        self.heads: list[bytes] = []
        self.bodies: list[dict[str, Any]] = []
        self.arrivals: list[float] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._serve = serve
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._number = itertools.count()

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await self.until(self.now + seconds)

    async def until(self, moment: float) -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (moment, next(self._number), over))
        await over

    def read(self, size: int) -> None:
        self.num_read += size

    async def write(self, writer: asyncio.StreamWriter, data: bytes, at: float) -> None:
        """Send a chunk at a moment."""
        await self.until(at)
        await self.send(writer, f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Send bytes as they are, and wait until all that was sent is read."""
        writer.write(data)
        self.num_written += len(data)
        while self.num_read < self.num_written:
            await asyncio.sleep(0)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.heads.append(head)
        self.bodies.append(body)
        self.arrivals.append(self.now - START)
        await self._serve(self, writer, body)
        writer.close()
        self.num_ended += 1

    async def advance(self) -> None:
        """Move the clock, one sleeper at a time."""
        while True:
            await self._calm()
            if self._sleepers:
                moment, _, over = heapq.heappop(self._sleepers)
                self.now = max(self.now, moment)
                if not over.done():
                    over.set_result(None)

    async def _calm(self) -> None:
        before, calm = None, 0
        while calm < CALM:
            await asyncio.sleep(0)
            now = (self.num_read, self.num_written, len(self._sleepers), len(self.bodies), self.num_ended)
            calm = calm + 1 if now == before and self.num_read == self.num_written else 0
            before = now


def with_server(serve: Serve, act: Callable[[FakeServer, Target], Awaitable[Any]]) -> tuple[Any, FakeServer]:
    """Do something with a server; what it gives, and the server."""

    async def main() -> tuple[Any, FakeServer]:
        fake = FakeServer(serve)
        server = await asyncio.start_server(fake.handle, "127.0.0.1", 0)
        advancing = asyncio.create_task(fake.advance())
        async with server:
            result = await act(fake, Target("127.0.0.1", server.sockets[0].getsockname()[1]))
            await asyncio.gather(*fake.tasks)
            advancing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await advancing
        return result, fake

    return asyncio.run(main())


def run(serve: Serve, requests: Sequence[LoadRequest], **options: Any) -> list[Answer]:
    """Answers to requests."""

    async def act(fake: FakeServer, target: Target) -> list[Answer]:
        return await run_load(
            target, requests, clock=fake.clock, sleep=fake.sleep, on_data=fake.read, **options
        )

    answers: list[Answer] = with_server(serve, act)[0]
    return answers


def run_workload(
    serve: Serve,
    workload: Sequence[WorkloadRequest],
    *,
    form: PromptForm = PromptForm.IDS,
    concurrency: int | None = None,
    more: dict[str, Any] | None = None,
) -> tuple[LoadState, FakeServer]:
    """A whole workload."""
    state = LoadState(len(workload))

    async def act(fake: FakeServer, target: Target) -> None:
        client = Client(600.0, fake.clock, fake.sleep, fake.read)
        await drive(target, workload, Asking(form, "m", more or {}), client, state, concurrency=concurrency)

    return state, with_server(serve, act)[1]


def event(text: str, **rest: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": None} | rest
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 7, "completion_tokens": 5}
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def last_event(usage: dict[str, Any] | None = None) -> bytes:
    said = b'data: {"choices": [], "usage": ' + json.dumps(usage).encode() + b"}\n\n" if usage else b""
    return said + b"data: [DONE]\n\n"


def steady(first_s: float, gap_s: float) -> Serve:
    """As many tokens as were asked for: the first after `first_s`, the others every `gap_s`."""

    async def serve(fake: FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        at = fake.now + first_s
        await fake.send(writer, HEAD)
        num = body["max_tokens"]
        for index in range(num):
            await fake.write(writer, event(f"t{index} "), at + index * gap_s)
        usage = {"prompt_tokens": len(body.get("prompt", "x")), "completion_tokens": num}
        await fake.send(writer, b"%x\r\n" % len(last_event(usage)) + last_event(usage) + b"\r\n0\r\n\r\n")

    return serve


def in_turn(scripts: Sequence[Serve]) -> Serve:
    """The first script for the first request, and so on."""
    waiting: Iterator[Serve] = iter(scripts)

    async def serve(fake: FakeServer, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        await next(waiting)(fake, writer, body)

    return serve
