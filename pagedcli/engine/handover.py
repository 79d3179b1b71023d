"""From the engine's thread to an asyncio event loop: all deltas of a step in one hand-over.

May import `engine.outputs` and `engine.client`. Waking an event loop costs a system call and a change of the
interpreter's lock, so it happens once a turn of the engine and not once a token. Invariants: each delta arrives once
and in order; a stream that is left before its end aborts its request, whose pages are then free within two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from pagedcli.engine.client import EngineThread
from pagedcli.engine.loop import Sink
from pagedcli.engine.outputs import Delta
from pagedcli.engine.prompt import RequestSpec

Receiver = Callable[[Delta], None]


class Handover:
    """Carries deltas from an engine to one event loop. Made on that loop.

    Attributes:
        loop: The event loop.
    """

    def __init__(self, client: EngineThread) -> None:
        self._client = client
        self.loop = asyncio.get_running_loop()
        self._box: list[tuple[Receiver, Delta]] = []
        client.on_turn(self._flush)

    @property
    def is_closed(self) -> bool:
        """Whether its event loop is closed."""
        return self.loop.is_closed()

    def sink(self, receiver: Receiver) -> Sink:
        """A sink for `EngineThread.add`; `receiver` is called on the event loop and must be quick."""

        def put(delta: Delta) -> None:
            self._box.append((receiver, delta))

        return put

    def _flush(self) -> None:
        """Hand over what the turn brought (engine thread)."""
        if not self._box:
            return
        box, self._box = self._box, []
        try:
            self.loop.call_soon_threadsafe(_deliver, box)
        except RuntimeError:
            if not self.loop.is_closed():
                raise
            # The loop was closed with requests unfinished: nobody is left to hear of them.
            for _, delta in box:
                self._client.abort(delta.request_id)

    def close(self) -> None:
        """Hand over nothing more."""
        self._client.off_turn(self._flush)


def _deliver(box: list[tuple[Receiver, Delta]]) -> None:
    for receiver, delta in box:
        receiver(delta)


class DeltaStream:
    """The deltas of one request on the event loop: an asynchronous iterator over lists, one for each step or more.

    As a context it aborts the request when it is left before the end.

    Attributes:
        request_id: As the engine knows it; empty until it was added.
    """

    def __init__(self, client: EngineThread, handover: Handover) -> None:
        self.request_id = ""
        self._client = client
        self._sink = handover.sink(self._receive)
        self._deltas: list[Delta] = []
        self._waiter: asyncio.Future[bool] | None = None
        self._is_over = False

    async def start(self, spec: RequestSpec) -> None:
        """Tokenize the request on a worker thread and hand it to the engine.

        Raises:
            RequestError: It is refused.
            EngineDead: The engine is closed or has failed.
        """
        adding = asyncio.ensure_future(asyncio.to_thread(self._client.add, spec, self._sink))
        try:
            self.request_id = await asyncio.shield(adding)
        except asyncio.CancelledError:
            # The worker thread cannot be stopped: abort what it is about to add.
            adding.add_done_callback(self._abort_added)
            raise

    def _abort_added(self, adding: asyncio.Future[str]) -> None:
        if not adding.cancelled() and adding.exception() is None:
            self._client.abort(adding.result())

    def _receive(self, delta: Delta) -> None:
        self._deltas.append(delta)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    @property
    def is_over(self) -> bool:
        """Whether the last delta was taken."""
        return self._is_over

    async def next(self, timeout_s: float | None = None) -> list[Delta]:
        """All deltas since the last call, at least one; none when time is up or after the end."""
        if not self._deltas and not self._is_over:
            await self._wait(timeout_s)
        deltas, self._deltas = self._deltas, []
        self._is_over = self._is_over or any(delta.output is not None for delta in deltas)
        return deltas

    async def _wait(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = loop.call_later(timeout_s, _give_up, waiter) if timeout_s is not None else None
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def abort(self) -> bool:
        """End the request with what it has; False: it has ended."""
        return not self._is_over and self._client.abort(self.request_id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Delta]:
        deltas = await self.next()
        if not deltas:
            raise StopAsyncIteration
        return deltas

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.request_id:
            self.abort()


def _give_up(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
