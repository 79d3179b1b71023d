"""A small server of OpenAI's API in a thread, in real time, that answers as it is told."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class OpenAIServer(ThreadingHTTPServer):
    """Answers `max_tokens` words at once.

    Attributes:
        bodies: Of all requests, as they came.
        keys: Their Authorization headers.
        refuse: Of the n-th request, from 0: status and body instead of an answer.
        models: Body of /v1/models, or a status.
        on_request: Called with the number of each request.
    """

    daemon_threads = True

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scheme = "https" if tls else "http"
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.refuse: Any = lambda number, body: None
        self.models: Any = {"data": [{"id": "tiny", "max_model_len": 99}]}
        self.metrics: list[str] = []
        self.on_request: Any = lambda number: None

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: OpenAIServer

    def log_message(self, *args: Any) -> None:
        """Nothing."""

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/metrics" and self.server.metrics:
            self._answer(200, self.server.metrics.pop(0).encode(), "text/plain")
        elif self.path == "/v1/models" and not isinstance(self.server.models, int):
            self._answer(200, json.dumps(self.server.models).encode())
        else:
            self._answer(self.server.models if isinstance(self.server.models, int) else 404, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = len(self.server.bodies)
        self.server.bodies.append(body)
        self.server.keys.append(self.headers["Authorization"])
        self.server.paths.append(self.path)
        self.server.on_request(number)
        refused = self.server.refuse(number, body)
        if refused is not None:
            self._answer(*refused)
            return
        chat = "messages" in body
        events = []
        for index in range(body["max_tokens"]):
            part = {"delta": {"content": f"w{index} "}} if chat else {"text": f"w{index} "}
            events.append({"choices": [{"index": 0, "finish_reason": None, **part}]})
        count = {"prompt_tokens": 4, "completion_tokens": body["max_tokens"]}
        events.append({"choices": [], "usage": count})
        texts = [f"data: {json.dumps(item)}\n\n" for item in events]
        self._answer(200, ("".join(texts) + "data: [DONE]\n\n").encode(), "text/event-stream")


@contextmanager
def openai_server(tls: ssl.SSLContext | None = None) -> Iterator[OpenAIServer]:
    """Runs while the context does."""
    server = OpenAIServer(tls)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
