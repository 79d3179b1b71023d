"""Bodies of requests: bytes within a limit, then JSON without its loopholes, then an object.

May import starlette's types, `strict_json` and `errors`. More nesting than anything here needs is refused too, and half
a surrogate pair, so that what comes after this need not think of them.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import Message, Receive, Scope

from pagedcli.errors import RequestError
from pagedcli.serve import strict_json

PARSE_ASIDE_BYTES = 1 << 16
"""Bodies from this size on are parsed on a worker thread, so that no other request waits for them."""
PIECE_S = 60.0
"""Longest wait for the next piece of a body."""


class ClientGoneError(Exception):
    """The client closed its connection; there is nobody to answer."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """All bytes of a request.

    Raises:
        RequestError: 413, before anything is read if the length was announced, else as soon as it is passed; 408 if the
            rest does not come; 503 if the server ends first.
        ClientGoneError: The connection was closed first.
    """
    announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    if announced.isdigit() and int(announced[:20]) > limit:
        raise _too_large(limit)
    pieces, size = [], 0
    while True:
        message = await _received(receive)
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


async def _received(receive: Receive) -> Message:
    try:
        async with asyncio.timeout(PIECE_S):
            return await receive()
    except TimeoutError:
        raise RequestError(
            f"nothing of the body has come for {PIECE_S:g} seconds: send it at once",
            code="request_timeout",
            status=408,
        ) from None
    except asyncio.CancelledError:
        raise RequestError(
            "the server stops, and the rest of the body has not come", code="stopping", status=503
        ) from None


def _too_large(limit: int) -> RequestError:
    return RequestError(
        f"the body is larger than {limit:,} bytes: shorten it, or start the server with --set serve.max_body_bytes=N",
        code="body_too_large",
        status=413,
    )


def parse_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        RequestError: It is no JSON object in UTF-8, or nested too deeply.
    """
    text = _text(body)
    value = _parse(text)
    if not isinstance(value, dict):
        raise _invalid('the body is not a JSON object: send {"model": ...}')
    _check_depth(value, max_depth)
    if "\\u" in text:
        _check_unicode(value)
    return value


def _text(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(f"the body is not UTF-8 at byte {error.start + 1}") from None


def _parse(text: str) -> Any:
    try:
        return strict_json.parse(text)
    except strict_json.JSONTextError as error:
        raise _invalid(f"the body is {error}") from None


def _check_depth(value: Any, max_depth: int) -> None:
    """Level by level, so that no nesting can be too deep for the check itself."""
    level = [value]
    for _ in range(max_depth):
        inside = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for items in inside for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise _invalid(f"the body is nested more than {max_depth} deep")


def _check_unicode(value: Any) -> None:
    """Refuse half a surrogate pair, which only an escape can bring and no text can contain."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise _invalid(f"the body has {half}, half a surrogate pair, which no text can contain") from None


def _invalid(message: str) -> RequestError:
    return RequestError(message, code="invalid_json")
