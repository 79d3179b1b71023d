"""A server in a process of its own, for as long as a measurement takes. May import `errors`; ours or anybody's.

Ready means that `/health` answers 200, which every server of this kind has; ours is ready when `/ready` does.
"""

from __future__ import annotations

import contextlib
import http.client
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pagedcli.bench.load import Target
from pagedcli.errors import ConfigError, PagedError

POLL_S = 0.5
STOP_S = 20.0
PAGED = (sys.executable, "-c", "from pagedcli.cli.main import main; main()")
"""`paged` of this installation, whatever is first on the path."""


class ServerError(PagedError):
    """A server that was to be measured did not start or has ended."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How a server is started.

    Attributes:
        name: For tables.
        command: Its command line; `{port}` is replaced.
        ready_path: Answers 200 once requests are served.
    """

    name: str
    command: tuple[str, ...]
    ready_path: str = "/health"

    @classmethod
    def parse(cls, text: str) -> ServerCommand:
        """From "NAME=COMMAND LINE WITH {port}".

        Raises:
            ConfigError: It is something else.
        """
        name, found, line = text.partition("=")
        if not found or "{port}" not in line:
            raise ConfigError(
                f'--peer {text!r}: give NAME=COMMAND with {{port}}, such as "x=server --port {{port}}"'
            )
        return cls(name, tuple(shlex.split(line)))


def our_server(arguments: Sequence[str] = (), *, name: str = "paged") -> ServerCommand:
    """`paged serve` of this installation."""
    command = (*PAGED, "serve", "--port", "{port}", "--quiet", *arguments)
    return ServerCommand(name, command, "/ready")


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """Runs a server; as a context it is ready inside and stopped after.

    Args:
        command: What to start.
        timeout_s: Until it must be ready.
    """

    def __init__(self, command: ServerCommand, *, timeout_s: float = 600.0) -> None:
        self.command = command
        self.port = free_port()
        self._timeout_s = timeout_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in _stop
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    def target(self, path: str = "/v1/completions") -> Target:
        """Where it answers."""
        return Target("127.0.0.1", self.port, path)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(self._stop)
            self._start()
            deadline = time.monotonic() + self._timeout_s
            while not self.is_ready():
                self._check(deadline)
                time.sleep(POLL_S)
            stack.pop_all()
        return self

    def _start(self) -> None:
        line = [part.replace("{port}", str(self.port)) for part in self.command.command]
        try:
            self._process = subprocess.Popen(line, stdout=self._log, stderr=subprocess.STDOUT)
        except OSError as error:
            raise ServerError(f"{self.command.name} cannot be started: {error}") from error

    def _check(self, deadline: float) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            raise ServerError(f"{self.command.name} has ended: {self.log()[-500:]}")
        if time.monotonic() > deadline:
            raise ServerError(f"{self.command.name} was not ready within {self._timeout_s:g} s")

    def is_ready(self) -> bool:
        """Whether it serves requests."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", self.command.ready_path)
            return connection.getresponse().status == 200
        return False

    def log(self) -> str:
        """What it has printed."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _stop(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
