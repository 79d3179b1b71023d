"""What happens on a connection before there is a request: time limits, bytes that are no HTTP, offers of HTTP/2.

May import uvicorn, httptools, `errors` and `serve.errors`. uvicorn waits for the rest of a request for ever, answers
what it cannot parse in plain text, and loses the body of a request that offers another protocol, as Java's HTTP client
does with every first request; all three are mended here. An offer that is not taken is no error (RFC 9110, 7.8).
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pagedcli.errors import RequestError
from pagedcli.serve.errors import error_response

ARRIVAL_S = 60.0
"""Time for a request line and its headers, from the connection or the first byte on."""
_OFFER = (b"upgrade", b"http2-settings")


class Connection(HttpToolsProtocol):
    """uvicorn's protocol of one connection, with the three repairs."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._wait()

    def on_headers_complete(self) -> None:
        """Headers are whole; what may follow is a body, for which `serve.body` waits."""
        self._stop_waiting()
        if not self._is_offer():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is whole."""
        if not self._is_offer():
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self.refuse(400, "invalid_http", f"this is no HTTP/1.1 request: {error.__context__ or error}")

    def refuse(self, status: int, code: str, message: str) -> None:
        """Answer what no application can, and close; an answer that is under way is only cut off."""
        self._stop_waiting()
        if self._is_answering():
            self.transport.close()
            return
        response = error_response(RequestError(message, code=code, status=status), {"Connection": "close"})
        head = [
            b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode()),
            *(b"\r\n%b: %b" % header for header in response.raw_headers),
        ]
        self.transport.write(b"".join([*head, b"\r\n\r\n", bytes(response.body)]))
        self.transport.close()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if not self._is_offer():  # CONNECT
                raise httptools.HttpParserError("no proxy") from None
            self._feed(self._without_offer() + data[offer.args[0] :])

    def _is_offer(self) -> bool:
        """Whether the parser stops behind these headers."""
        return self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)

    def _without_offer(self) -> bytes:
        """The request so far as a client writes it that offers nothing, for a parser that begins anew."""
        lines = [
            b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        ]
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in _OFFER]
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join([*lines, b"", b""])

    def _wait(self) -> None:
        self._stop_waiting()
        self._waiting = self.loop.call_later(ARRIVAL_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _give_up(self) -> None:
        if (
            self._is_answering()
        ):  # Reading may be paused meanwhile: what has not come is not the client's fault.
            self._wait()
            return
        self.refuse(408, "request_timeout", f"no whole request has come in {ARRIVAL_S:g} seconds")
