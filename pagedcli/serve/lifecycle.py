"""From binding the socket to the last answer: loading, serving, draining, and what the health checks say meanwhile.

May import uvicorn, `api`, `engine`, `errors` and `serve.connection`. The socket is bound before the model is loaded, so
that a port that is taken is said at once and health checks are answered during a long load. Invariants: a signal lets
what runs finish, for as long as was agreed, and aborts the rest; a second signal ends the process at once; an engine
that died stays visible (`/health` is red) until whoever supervises the process ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator, Mapping
from enum import StrEnum
from typing import Any

import uvicorn

from pagedcli.api.async_llm import AsyncLLM
from pagedcli.api.build import Engine
from pagedcli.errors import ConfigError, EngineDead, RequestError
from pagedcli.serve.connection import Connection

logger = logging.getLogger(__name__)

RETRY_LOADING_S, RETRY_STOPPING_S = 2.0, 5.0
"""`Retry-After` of what cannot be served now: soon, or by another server."""
FLUSH_S = 5
"""Time for connections to take the end of their answers after the last request is over."""
INTERRUPTED = 130
BACKLOG = 4096
"""Connections that the system keeps until they are accepted."""
IDLE_S = 75
"""Time that a connection is kept between two requests: longer than clients keep theirs, or one closes what the other
is about to use."""


class State(StrEnum):
    """What a server is doing."""

    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    DEAD = "dead"


class Lifecycle:
    """A server's state, and the model once there is one.

    Args:
        load: Makes the engine; called on a worker thread.
        drain_s: Seconds that running requests get when the server stops.
        on_ready: Called on the event loop when the model is loaded.

    Attributes:
        llm: None until the model is loaded.
        failure: What loading raised.
    """

    def __init__(
        self, load: Callable[[], Engine], *, drain_s: float, on_ready: Callable[[AsyncLLM], None]
    ) -> None:
        self.llm: AsyncLLM | None = None
        self.failure: Exception | None = None
        self._load = load
        self._drain_s = drain_s
        self._on_ready = on_ready
        self._is_stopping = False

    @property
    def state(self) -> State:
        """What the server is doing."""
        if self.llm is not None and self.llm.engine.client.dead is not None:
            return State.DEAD
        if self._is_stopping:
            return State.STOPPING
        return State.LOADING if self.llm is None else State.READY

    def serving(self) -> AsyncLLM:
        """The model, if it takes requests.

        Raises:
            RequestError: It is being loaded, or the server stops: 503.
            EngineDead: It failed.
        """
        state = self.state
        if state is State.LOADING:
            raise _unavailable("the model is being loaded", "loading", RETRY_LOADING_S)
        if state is State.STOPPING:
            raise _unavailable("the server is stopping", "stopping", RETRY_STOPPING_S)
        assert self.llm is not None
        if state is State.DEAD:
            raise EngineDead(str(self.llm.engine.client.dead))
        return self.llm

    def health(self) -> tuple[int, dict[str, str]]:
        """Status and body of `/health`: red only if the process can serve nothing more."""
        state = self.state
        return (503 if state is State.DEAD else 200), {"status": state.value}

    def ready(self) -> tuple[int, dict[str, str]]:
        """Status and body of `/ready`: green if a request sent now would be taken."""
        state = self.state
        if state is not State.READY:
            return 503, {"status": state.value}
        assert self.llm is not None
        return (
            (503, {"status": "queue full"}) if self.llm.engine.client.is_full else (200, {"status": "ready"})
        )

    async def load(self) -> None:
        """Load the model; what goes wrong is kept in `failure`."""
        try:
            engine = await asyncio.to_thread(self._load)
        except Exception as error:  # noqa: BLE001 - whatever it is, the server ends with it
            self.failure = error
            return
        self.llm = AsyncLLM.from_engine(engine)
        if not self._is_stopping:
            self._on_ready(self.llm)

    async def stop(self) -> None:
        """Take no more requests, wait for those that run, abort those that do not end in time."""
        self._is_stopping = True
        if self.llm is None:
            return
        client = self.llm.engine.client
        with contextlib.suppress(EngineDead):  # Then every request has its answer.
            if not await asyncio.to_thread(client.drain, self._drain_s):
                logger.warning("%d requests are aborted after %g s", client.num_unfinished, self._drain_s)
        await self.llm.close()


def _unavailable(message: str, code: str, retry_after_s: float) -> RequestError:
    return RequestError(message, code=code, status=503, retry_after_s=retry_after_s)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: The address cannot be used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from error
    try:
        if os.name != "nt":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--host {host} --port {port}: {error.strerror}: choose another port") from error
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):
    """Uvicorn's server; signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def serve(
    app: Any, lifecycle: Lifecycle, listener: socket.socket, options: Mapping[str, Any] | None = None
) -> None:
    """Serve until a signal, then drain; in the main thread.

    Args:
        app: The ASGI application.
        lifecycle: Its state.
        listener: From `bind`; closed at the end.
        options: For uvicorn, TLS and so on.

    Raises:
        PagedError: Loading failed.
    """
    config = server_config(app, options or {})
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_serve(_Server(config), lifecycle, listener))
    if lifecycle.failure is not None:
        raise lifecycle.failure


def server_config(app: Any, options: Mapping[str, Any]) -> uvicorn.Config:
    """Uvicorn's settings: what we do ourselves is switched off."""
    return uvicorn.Config(
        app,
        http=Connection,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=FLUSH_S,
        timeout_keep_alive=IDLE_S,
        **options,
    )


async def _serve(server: _Server, lifecycle: Lifecycle, listener: socket.socket) -> None:
    stop = asyncio.Event()
    with _signals(stop):
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        loading = asyncio.create_task(lifecycle.load())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((loading, stopped, serving), return_when=asyncio.FIRST_COMPLETED)
        if lifecycle.failure is None:
            await asyncio.wait((stopped, serving), return_when=asyncio.FIRST_COMPLETED)
        await lifecycle.stop()
        server.should_exit = True
        await serving
        stopped.cancel()
        if not loading.done():
            # A load cannot be interrupted, and nobody waits for it any more.
            _end_now(0)


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Generator[None, None, None]:
    """The first SIGINT or SIGTERM sets `stop`, the second ends the process."""
    loop = asyncio.get_running_loop()

    def handle(number: int, frame: object) -> None:
        if stop.is_set() or loop.is_closed():
            _end_now(INTERRUPTED)
        stop.set()
        loop.call_soon_threadsafe(lambda: None)  # wakes the loop, which may sleep

    handled = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_now(code: int) -> None:
    """End without waiting for anything."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)
