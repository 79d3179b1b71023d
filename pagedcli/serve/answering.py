"""A completions request from its bytes to its answer: read, check, run, and write a body or events.

May import `api`, `engine` and this package. A client that leaves cancels the work, and with it the requests in the
engine (A18). Errors that come before anything was sent are JSON errors with their status, later ones are an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedcli.api.async_llm import AsyncLLM
from pagedcli.errors import PagedError
from pagedcli.serve.bodies import Shape, answer_body
from pagedcli.serve.body import PARSE_ASIDE_BYTES, ClientGoneError, parse_object, read_body
from pagedcli.serve.errors import ApiResponse, as_request_error, error_response
from pagedcli.serve.events import DONE, KEEP_ALIVE, EventWriter, error_event
from pagedcli.serve.params import Asked, chat_request, completion_request
from pagedcli.serve.schemas import Body, ChatBody, CompletionBody
from pagedcli.serve.state import RequestRecord, ServerState
from pagedcli.serve.streams import Call
from pagedcli.serve.validation import checked

T = TypeVar("T")
B = TypeVar("B", bound=Body)
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_CLIENT_CLOSED = 499
"""Status in the records of a request whose client left before an answer; nobody receives it."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client closes its connection.

    Raises:
        ClientGoneError: It did.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_checked(scope: Scope, receive: Receive, kind: type[B], state: ServerState) -> B:
    """The body of a request, checked; a large one is parsed on a worker thread.

    Raises:
        RequestError: It is no such body.
        ClientGoneError: It did not come in full.
    """
    data = await read_body(scope, receive, state.config.max_body_bytes)
    with state.receiving():
        if len(data) < PARSE_ASIDE_BYTES:
            return _parse(data, kind, state.config.max_depth)
        return await asyncio.to_thread(_parse, data, kind, state.config.max_depth)


def _parse(data: bytes, kind: type[B], max_depth: int) -> B:
    return checked(kind, parse_object(data, max_depth))


class Answer(Response):
    """Answers one completions request; a response that does its work when it is sent.

    Args:
        state: The server's.
        is_chat: Which endpoint it is.
    """

    def __init__(self, state: ServerState, *, is_chat: bool) -> None:
        super().__init__()
        self._state = state
        self._is_chat = is_chat
        self._id = ""
        self._is_stream = False
        self._status: int | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI call."""
        began = time.monotonic()
        calls: list[Call] = []
        code, gone = None, False
        try:
            kind: type[ChatBody | CompletionBody] = ChatBody if self._is_chat else CompletionBody
            body = await read_checked(scope, receive, kind, self._state)
            await unless_gone(receive, self._answer(body, send, calls))
        except (ClientGoneError, OSError):
            gone = True
        except asyncio.CancelledError:
            # The server ends, and the client was not reading: nothing is left to do but to close the connection.
            gone = True
        except PagedError as error:
            code = as_request_error(error).code
            self._state.on_error(code)
            await self._send_error(error, scope, receive, send)
        finally:
            self._state.on_end(
                RequestRecord(
                    endpoint=scope["path"],
                    request_id=self._id,
                    status=self._status or (_CLIENT_CLOSED if gone else 500),
                    stream=self._is_stream,
                    outputs=calls[0].ordered if calls else (),
                    error_code=code,
                    client=(scope.get("client") or ("",))[0],
                    seconds=time.monotonic() - began,
                    client_gone=gone,
                )
            )

    async def _answer(self, body: CompletionBody | ChatBody, send: Send, calls: list[Call]) -> None:
        model = self._state.check_model(body.model)
        llm = self._state.llm()
        with self._state.receiving():
            asked = self._asked(body, llm.engine.resolved.max_model_len)
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{asked.request_id or uuid.uuid4().hex}"
        self._is_stream = asked.stream
        shape = self._shape(asked, model, llm)
        with Call(self._id, self._state.open) as call:
            calls.append(call)
            await call.start(llm, asked.specs)
            if asked.stream:
                await self._stream(call, asked, shape, send)
            else:
                await self._collect(call, shape, send)

    def _asked(self, body: CompletionBody | ChatBody, max_model_len: int) -> Asked:
        state = self._state
        if isinstance(body, ChatBody):
            return chat_request(body, state.defaults, state.config, max_model_len)
        return completion_request(body, state.defaults, state.config, max_model_len)

    def _shape(self, asked: Asked, model: str, llm: AsyncLLM) -> Shape:
        params = asked.params
        return Shape(
            id=self._id,
            model=model,
            created=int(time.time()),
            is_chat=self._is_chat,
            echo=params.echo,
            logprobs=params.logprobs is not None,
            prompt_logprobs=asked.prompt_logprobs,
            token_ids=asked.return_token_ids,
            n=params.n,
            token_bytes=llm.engine.tokenizer.token_bytes,
        )

    async def _collect(self, call: Call, shape: Shape, send: Send) -> None:
        async for _ in call.batches(None):
            pass
        response = ApiResponse(answer_body(shape, call.ordered))
        await self._begin(200, response.raw_headers, send)
        await send({"type": "http.response.body", "body": response.body})

    async def _stream(self, call: Call, asked: Asked, shape: Shape, send: Send) -> None:
        writer = EventWriter(shape, len(asked.specs), continuous_usage=asked.continuous_usage)
        async for batch in call.batches(self._state.config.keep_alive_s):
            events = b"".join([writer.deltas(position, deltas) for position, deltas in batch])
            if self._status is None:
                # Nothing is said before the first token, or until a client might lose patience.
                await self._begin(200, _STREAM_HEADERS, send)
                events = writer.start() + events
            if events or not batch:
                await _write(send, events or KEEP_ALIVE)
        last = writer.usage(call.ordered) if asked.include_usage else b""
        await _write(send, last + DONE, more=False)

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]], send: Send) -> None:
        self._status = status
        named = [*headers, (b"x-request-id", self._id.encode())]
        await send({"type": "http.response.start", "status": status, "headers": named})

    async def _send_error(self, error: PagedError, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(OSError):
            if self._status is not None:
                await _write(send, error_event(error) + DONE, more=False)
                return
            response = error_response(error, {"X-Request-Id": self._id} if self._id else None)
            self._status = response.status_code
            await response(scope, receive, send)


async def _write(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
