"""The streams of one API request: a stream of the engine for each of its prompts, read as one.

May import `api`, `engine` and `errors`. Leaving a `Call` before its end aborts what it has in the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self

from pagedcli.api.async_llm import AsyncLLM
from pagedcli.engine.handover import DeltaStream
from pagedcli.engine.outputs import Delta, RequestOutput
from pagedcli.engine.prompt import RequestSpec
from pagedcli.errors import RequestError

Batch = list[tuple[int, list[Delta]]]
"""What is new, by position of the prompt; empty: nothing was for a while."""
OpenCalls = dict[str, tuple[DeltaStream, ...]]
"""Streams of unfinished requests by the id that their answer carries."""


class Call:
    """The requests of one API request; as a context it aborts what is unfinished.

    Args:
        request_id: As its answer carries it.
        calls: Where it is listed while it is unfinished.

    Attributes:
        outputs: Those that have come, by position of the prompt.
    """

    def __init__(self, request_id: str, calls: OpenCalls) -> None:
        self.outputs: dict[int, RequestOutput] = {}
        self._id = request_id
        self._calls = calls
        self._streams: tuple[DeltaStream, ...] = ()
        self._is_listed = False

    async def start(self, llm: AsyncLLM, specs: Sequence[RequestSpec]) -> None:
        """Hand all prompts to the engine, or none of them.

        Raises:
            RequestError: One is refused, or the id belongs to a request that is not finished.
            EngineDead: The engine serves nothing more.
        """
        if self._id in self._calls:
            raise RequestError(
                f"request_id: {self._id} belongs to a request that is not finished: choose another",
                code="duplicate_id",
                field="request_id",
            )
        self._calls[self._id] = ()
        self._is_listed = True
        for spec in specs:
            self._streams = (*self._streams, await llm.submit(spec))
            self._calls[self._id] = self._streams

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams:
            stream.abort()
        if self._is_listed:  # and not another call of the same id, which may have refused this one
            del self._calls[self._id]

    @property
    def ordered(self) -> tuple[RequestOutput, ...]:
        """The outputs in the order of their prompts."""
        return tuple(self.outputs[position] for position in sorted(self.outputs))

    async def batches(self, patience_s: float | None) -> AsyncGenerator[Batch, None]:
        """What is new, until everything has come; an empty batch after `patience_s` without anything.

        Raises:
            RequestError: A request was lost.
            EngineDead: All were.
        """
        if len(self._streams) == 1:
            stream = self._streams[0]
            while not stream.is_over:
                deltas = await stream.next(patience_s)
                self._note(0, deltas)
                yield [(0, deltas)] if deltas else []
            return
        async for batch in self._merged(patience_s):
            yield batch

    async def _merged(self, patience_s: float | None) -> AsyncGenerator[Batch, None]:
        waiting = {asyncio.ensure_future(stream.next()): at for at, stream in enumerate(self._streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                batch = sorted((waiting.pop(future), future.result()) for future in done)
                for position, deltas in batch:
                    self._note(position, deltas)
                    stream = self._streams[position]
                    if not stream.is_over:
                        waiting[asyncio.ensure_future(stream.next())] = position
                yield batch
        finally:
            for future in waiting:
                future.cancel()

    def _note(self, position: int, deltas: list[Delta]) -> None:
        output = deltas[-1].output if deltas else None
        if output is None:
            return
        if output.error is not None:
            raise output.error
        self.outputs[position] = output
