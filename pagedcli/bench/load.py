"""A load client: requests at given moments over plain sockets, and when each event of each answer came.

Standard library only. It has to cost little, because it shares the machine with the server: no HTTP library; one
clock reading per piece of data received, before anything else is done with it. Works with any server that speaks
OpenAI's completions over HTTP/1.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagedcli.bench.http_answer import Answer, AnswerReader
from pagedcli.bench.http_reading import BadAnswer, Reader
from pagedcli.bench.http_target import Target

__all__ = ["Answer", "LoadRequest", "Target", "exchange", "run_load", "wait_until"]

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[Any]]
LINGER_S = 1.0
"""How long a connection may stay open after [DONE]; a server that is cut off at once might count a failure."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request.

    Attributes:
        body: A completions request; `stream` should be true.
        arrival_s: Seconds after the start of the run.
    """

    body: dict[str, Any]
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Client:
    """How requests are sent.

    Attributes:
        timeout_s: For each request, from when it is sent; longer ones fail.
        clock: Seconds.
        sleep: Waits.
        on_data: Called with the size of each piece of data that comes.
    """

    timeout_s: float = 600.0
    clock: Clock = time.perf_counter
    sleep: Sleep = asyncio.sleep
    on_data: Callable[[int], None] | None = None


class _Exchange(asyncio.Protocol):
    """One request on one connection."""

    def __init__(self, message: bytes, client: Client, answer: AnswerReader) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reader = Reader()
        self.error: str | None = None
        self.last_s: float | None = None
        self._answer = answer
        self._message = message
        self._client = client
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        moment = self._client.clock()
        if not self.over.done():
            self.last_s = moment
            try:
                is_over = self.reader.feed(moment, data)
                self._answer.take(self.reader)
                if is_over:
                    self._end()
                elif self.reader.events.is_done:  # nothing more can come that matters, should it stay open
                    asyncio.get_running_loop().call_later(LINGER_S, self._end)
            except BadAnswer as error:
                self.error = str(error)
                self._end()
        if self._client.on_data is not None:
            self._client.on_data(len(data))

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def abort(self) -> None:
        """Close the connection now."""
        if self._transport is not None:
            self._transport.abort()


async def wait_until(due_s: float, client: Client) -> None:
    """Return when it is due, never before."""
    while (left := due_s - client.clock()) > 0:
        await client.sleep(left)


async def exchange(
    target: Target,
    message: bytes,
    client: Client,
    *,
    due_s: float | None = None,
    name: str = "",
    max_tokens: int | None = None,
    on_start: Callable[[Answer], None] | None = None,
) -> Answer:
    """Send a request now and read its answer.

    Args:
        target: The server.
        message: All bytes of the request.
        client: How it is sent.
        due_s: From when its latencies count; None: from now.
        name: Of the request.
        max_tokens: That were asked for.
        on_start: Given the answer, which then grows.
    """
    answer = Answer(client.clock(), due_s, name)
    if on_start is not None:
        on_start(answer)
    reading = AnswerReader(answer, max_tokens)
    over = await _read(target, message, client, answer, reading)
    if over is not None:
        over.reader.close(answer.end_s)
        answer.error = answer.error or over.error
        reading.finish(over.reader)
    return answer


async def _read(
    target: Target, message: bytes, client: Client, answer: Answer, reading: AnswerReader
) -> _Exchange | None:
    """What came until the answer was over; None: no connection."""
    loop = asyncio.get_running_loop()
    running: _Exchange | None = None
    try:
        async with asyncio.timeout(client.timeout_s):
            name = target.host if target.tls is not None else None
            _, running = await loop.create_connection(
                lambda: _Exchange(message, client, reading),
                target.address or target.host,
                target.port,
                ssl=target.tls,
                server_hostname=name,
            )
            await running.over
    except TimeoutError:
        answer.error = f"not answered within {client.timeout_s:g} s"
    except (OSError, ssl.SSLError, UnicodeError) as error:
        answer.error = f"cannot connect: {error}"
    finally:
        if running is not None:
            running.abort()
    last = running.last_s if running is not None else None
    answer.end_s = client.clock() if last is None or answer.error is not None else last
    return running


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
    client = Client(timeout_s, clock, sleep, on_data)
    started = clock()

    async def one(request: LoadRequest) -> Answer:
        message = target.message(request.body)
        due = started + request.arrival_s
        await wait_until(due, client)
        limit = request.body.get("max_tokens")
        return await exchange(
            target, message, client, due_s=due, max_tokens=limit if isinstance(limit, int) else None
        )

    return list(await asyncio.gather(*(one(request) for request in requests)))
