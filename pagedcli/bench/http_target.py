"""Where requests go, as bytes on a socket. Standard library only and `errors`."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pagedcli.errors import ConfigError

COMPLETIONS, CHAT = "/completions", "/chat/completions"
_ROUTES = (CHAT, COMPLETIONS, "/models")


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go.

    Attributes:
        host: Name or address.
        port: TCP port.
        path: Route.
        api_key: Sent as a bearer token, if given.
        tls: HTTPS; certificates are checked with the system's (SSL_CERT_FILE names others).
        address: That the host's name stands for, so that no request waits for a name; None: not asked yet.
    """

    host: str
    port: int
    path: str = "/v1/completions"
    api_key: str | None = None
    tls: ssl.SSLContext | None = None
    address: str | None = None

    @property
    def authority(self) -> str:
        """Host and port as in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """As a user writes it."""
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.path}"

    def head(self, length: int) -> bytes:
        """The head of a POST request with a JSON body of `length` bytes."""
        return self._head("POST", f"Content-Type: application/json\r\nContent-Length: {length}\r\n")

    def message(self, body: Mapping[str, Any]) -> bytes:
        """A whole POST request."""
        content = json.dumps(body).encode()
        return self.head(len(content)) + content

    def get(self) -> bytes:
        """A whole GET request."""
        return self._head("GET", "Accept: */*\r\n")

    def _head(self, method: str, more: str) -> bytes:
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        start = f"{method} {self.path} HTTP/1.1\r\nHost: {self.authority}\r\n"
        return f"{start}{more}{key}Connection: close\r\n\r\n".encode()


def parse_target(url: str, api_key: str | None = None) -> Target:
    """The server's API at a URL: its scheme (http), host, port and the path before `/completions` (/v1).

    Raises:
        ConfigError: It is no URL of such a server.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
    except ValueError as error:  # brackets without an end
        raise ConfigError(f"URL {url!r}: {error}: give one such as http://127.0.0.1:8000") from None
    try:
        port = parts.port
    except ValueError:
        raise ConfigError(
            f"URL {url!r}: give a port from 1 to 65535, such as http://127.0.0.1:8000"
        ) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"URL {url!r}: give the server's address, such as http://127.0.0.1:8000")
    if parts.username is not None:
        raise ConfigError("URL: give the key with --api-key-file or PAGED_API_KEY, not in the URL")
    path = parts.path.rstrip("/")
    for route in _ROUTES:
        path = path.removesuffix(route)
    if any(ord(character) <= 32 or ord(character) > 126 for character in path + parts.hostname):
        raise ConfigError(f"URL {url!r}: percent-encode its path")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return Target(parts.hostname, port or (443 if tls else 80), path or "/v1", api_key, tls)
