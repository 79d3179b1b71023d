"""A load client: requests at given moments over plain sockets, and when each event of each answer came.

Standard library only. It has to cost little, because it shares the machine with the server: no HTTP library, no JSON
while answers come, one clock reading per piece of data received. Works with any server that speaks OpenAI's
completions over HTTP/1.1 without TLS.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[Any]]
_EVENT_END = b"\n\n"
_HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go.

    Attributes:
        host: Name or address.
        port: TCP port.
        path: Route.
        api_key: Sent as a bearer token, if given.
    """

    host: str
    port: int
    path: str = "/v1/completions"
    api_key: str | None = None

    def head(self, length: int) -> bytes:
        """The head of a POST request with a JSON body of `length` bytes."""
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        return (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
            f"{key}Content-Length: {length}\r\nConnection: close\r\n\r\n"
        ).encode()


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request.

    Attributes:
        body: A completions request; `stream` should be true.
        arrival_s: Seconds after the start of the run.
    """

    body: dict[str, Any]
    arrival_s: float = 0.0


@dataclass(slots=True)
class Answer:
    """What came back, and when, on the client's clock.

    Attributes:
        sent_s: When the request was due and sent.
        status: HTTP status; 0: none came.
        token_times: Of the events that brought text.
        end_s: When the connection was over.
        texts: Text of those events.
        prompt_tokens: As the server counted them; 0 if it did not say.
        output_tokens: As the server counted them, else the events.
        finish_reason: Of the first choice.
        error: Why the request failed; None: it was served.
    """

    sent_s: float
    status: int = 0
    token_times: list[float] = field(default_factory=list)
    end_s: float = 0.0
    texts: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.texts)


class _Chunks:
    """Undoes chunked transfer encoding, piece by piece."""

    def __init__(self) -> None:
        self.is_over = False
        self._data = bytearray()
        self._left = 0

    def feed(self, data: bytes) -> bytes:
        """What of the body is in this piece."""
        self._data += data
        body = bytearray()
        while not self.is_over:
            if self._left == 0:
                line, found, rest = self._data.partition(b"\r\n")
                if not found:
                    break
                self._left = int(line.split(b";")[0], 16) + 2
                self._data = bytearray(rest)
                self.is_over = self._left == 2
            elif len(self._data) < self._left:
                break
            else:
                body += self._data[: self._left - 2]
                del self._data[: self._left]
                self._left = 0
        return bytes(body)


class _Exchange(asyncio.Protocol):
    """One request on one connection; what comes is only put aside, with its time."""

    def __init__(self, message: bytes, clock: Clock, on_data: Callable[[int], None] | None) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pieces: list[tuple[float, bytes]] = []
        self._message = message
        self._clock = clock
        self._on_data = on_data
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((self._clock(), data))
        if self._on_data is not None:
            self._on_data(len(data))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def abort(self) -> None:
        """Close the connection now."""
        if self._transport is not None:
            self._transport.abort()


@dataclass(slots=True)
class _Received:
    """Pieces taken apart: the head, then the events with the time at which each was complete."""

    head: bytes = b""
    events: list[tuple[float, bytes]] = field(default_factory=list)
    rest: bytes = b""

    @classmethod
    def of(cls, pieces: Sequence[tuple[float, bytes]]) -> _Received:
        """From what a connection brought."""
        received = cls()
        chunks: _Chunks | None = None
        for moment, piece in pieces:
            data = piece
            if not received.head:
                head, found, data = (received.rest + piece).partition(_HEAD_END)
                if not found:
                    received.rest = head
                    continue
                received.head, received.rest = head, b""
                chunks = _Chunks() if b"transfer-encoding: chunked" in head.lower() else None
            body = chunks.feed(data) if chunks is not None else data
            *events, received.rest = (received.rest + body).split(_EVENT_END)
            received.events += [(moment, event) for event in events]
        return received


async def run_load(
    target: Target,
    requests: Sequence[LoadRequest],
    *,
    timeout_s: float = 600.0,
    clock: Clock = time.perf_counter,
    sleep: Sleep = asyncio.sleep,
    on_data: Callable[[int], None] | None = None,
) -> list[Answer]:
    """Send each request when it is due, whether or not the earlier ones are answered.

    Args:
        target: The server.
        requests: What is asked, and when.
        timeout_s: For each request, from when it is sent; longer ones fail.
        clock: Seconds.
        sleep: Waits for an arrival.
        on_data: Called with the size of each piece of data that comes.

    Returns:
        One answer per request, in their order.
    """
    started = clock()

    async def one(request: LoadRequest) -> Answer:
        body = json.dumps(request.body).encode()
        message = target.head(len(body)) + body
        delay = started + request.arrival_s - clock()
        if delay > 0:
            await sleep(delay)
        return await _exchange(target, message, timeout_s, clock, on_data)

    return list(await asyncio.gather(*(one(request) for request in requests)))


async def _exchange(
    target: Target,
    message: bytes,
    timeout_s: float,
    clock: Clock,
    on_data: Callable[[int], None] | None,
) -> Answer:
    answer = Answer(clock())
    loop = asyncio.get_running_loop()
    try:
        _, exchange = await loop.create_connection(
            lambda: _Exchange(message, clock, on_data), target.host, target.port
        )
    except OSError as error:
        answer.end_s, answer.error = clock(), f"cannot connect: {error}"
        return answer
    try:
        await asyncio.wait_for(asyncio.shield(exchange.over), timeout_s)
    except TimeoutError:
        answer.error = f"not answered within {timeout_s:g} s"
    finally:
        exchange.abort()
    answer.end_s = exchange.pieces[-1][0] if exchange.pieces else clock()
    _read(_Received.of(exchange.pieces), answer)
    return answer


def _read(exchange: _Received, answer: Answer) -> None:
    """What a connection brought as an answer."""
    if not exchange.head:
        answer.error = answer.error or "the connection was closed without an answer"
        return
    answer.status = int(exchange.head.split(b" ", 2)[1])
    if answer.status != 200:
        events = [event for _, event in exchange.events]
        answer.error = (
            f"{answer.status}: {_EVENT_END.join([*events, exchange.rest]).decode(errors='replace')}"
        )
        return
    is_complete = False
    for moment, event in exchange.events:
        if not event.startswith(b"data:"):
            continue
        data = event[5:].strip()
        if data == b"[DONE]":
            is_complete = True
            continue
        _take(json.loads(data), moment, answer)
    answer.output_tokens = answer.output_tokens or len(answer.token_times)
    if not is_complete:
        answer.error = answer.error or "the stream ended before [DONE]"
    elif answer.finish_reason == "abort":
        answer.error = "aborted by the server"


def _take(event: dict[str, Any], moment: float, answer: Answer) -> None:
    if "error" in event:
        answer.error = str(event["error"])
        return
    usage = event.get("usage")
    if usage:
        answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in event.get("choices", ()):
        text = choice.get("text") or choice.get("delta", {}).get("content")
        if text:
            answer.token_times.append(moment)
            answer.texts.append(text)
        if choice.get("finish_reason") is not None and choice.get("index") == 0:
            answer.finish_reason = choice["finish_reason"]
