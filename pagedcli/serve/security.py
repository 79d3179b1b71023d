"""Who may ask: API keys, compared in constant time, on every route that is not open to everybody; and no web page.

May import starlette's types and `errors`. Middlewares round the whole application, so that a new route, a page of
documentation and an unknown path are closed unless they are named here.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from pagedcli.errors import ConfigError, RequestError
from pagedcli.serve.errors import error_response

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What needs no key: checks of supervisors, which say nothing of anybody's requests."""
KEY_VARIABLE = "PAGED_API_KEY"
_LOCAL = frozenset({"127.0.0.1", "::1", "localhost"})


class KeyGate:
    """Lets a request through that carries one of the keys as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: Iterable[bytes]) -> None:
        self._app = app
        self._keys = tuple(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI call."""
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = RequestError(
            "a key of this server is needed: send it as Authorization: Bearer KEY",
            code="invalid_api_key",
            status=401,
        )
        await error_response(error, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, given = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        # All keys are compared, whichever matches: how long it takes says nothing.
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        return kind.lower() == b"bearer" and any(matches)


class OriginGate:
    """Refuses what a web page posts, unless it is one of those that may ask.

    A page cannot read an answer without our leave, but a browser would still deliver its question, to a server on the
    reader's own machine. Programs that are no browsers send no `Origin`.
    """

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        self._app = app
        self._origins = frozenset(origin.encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI call."""
        if scope["type"] != "http" or scope["method"] != "POST" or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = RequestError(
            "web pages of other origins may not ask: start the server with --set serve.cors_origins='[\"ORIGIN\"]'",
            code="origin_not_allowed",
            status=403,
        )
        await error_response(error)(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        origins = {value for name, value in scope["headers"] if name == b"origin"}
        return b"*" in self._origins or origins <= self._origins


def read_keys(
    key_file: str | None, given: Iterable[str], environment: Mapping[str, str]
) -> tuple[bytes, ...]:
    """The keys of a file (a line each), else those of the command line, else of the environment; none: no keys.

    Raises:
        ConfigError: The file cannot be read, or a key is one that no header can carry.
    """
    if key_file is not None:
        return _checked(_lines(key_file), f"--api-key-file {key_file}")
    listed = list(given)
    if listed:
        return _checked(listed, "--api-key")
    if KEY_VARIABLE in environment:
        return _checked([environment[KEY_VARIABLE]], KEY_VARIABLE)
    return ()


def _lines(key_file: str) -> list[str]:
    try:
        text = Path(key_file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"--api-key-file {key_file}: {reason}: give a file with a key a line") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def _checked(keys: list[str], source: str) -> tuple[bytes, ...]:
    """The keys as bytes; an empty one would let everybody in, one with spaces nobody."""
    if not keys or not all(key.isascii() and key.isprintable() and key and " " not in key for key in keys):
        raise ConfigError(f"{source}: give keys of printable ASCII characters without spaces")
    return tuple(key.encode() for key in keys)


def is_local(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    return host in _LOCAL or host.startswith("127.")


def is_readable_by_others(path: str) -> bool:
    """Whether other users of this machine may read a file."""
    return os.name == "posix" and bool(Path(path).stat().st_mode & 0o077)
