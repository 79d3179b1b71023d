"""`paged serve` as a process: signals, draining, what is said when it cannot start."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagedcli.errors import ConfigError
from pagedcli.serve.lifecycle import bind
from tests.conftest import MakeModel
from tests.serve.support import http_post

ROOT = Path(__file__).parents[2]
# A scripted engine behind the real server: each step takes 50 ms, so that 20 tokens take a second.
SLOW = """
import sys
from pagedcli.cli import engine_access
from tests.fakes import FakeExecutor
from tests.serve.support import scripted_engine

def open_engine(config, messages, limits=None):
    executor = FakeExecutor(num_blocks=256, max_model_len=1024, step_seconds=0.05, threaded=True)
    return scripted_engine(executor)

engine_access.open_engine = open_engine
engine_access.engine_title = lambda engine: "scripted"
from pagedcli.cli.main import run
sys.exit(run(sys.argv[1:]))
"""
HASTY = "from pagedcli.serve import lifecycle; lifecycle.FLUSH_S = 1" + SLOW
REAL = "import sys; from pagedcli.cli.main import run; sys.exit(run(sys.argv[1:]))"


class Process:
    """A server as users start it."""

    def __init__(self, code: str, *arguments: str, streams: str = "") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        shell = ["sh", "-c", f'exec "$@" {streams}', "sh"] if streams else []
        self.process = subprocess.Popen(
            [*shell, sys.executable, "-c", code, "serve", "--port", str(self.port), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
        )

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def post(self, path: str, json: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=json, timeout=60)

    def wait_ready(self, status: int = 200) -> None:
        """Wait until it is ready, or (503) until it has begun to stop."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            assert self.process.poll() is None, self.said()
            with contextlib.suppress(httpx.TransportError):
                if self.get("/ready").status_code == status:
                    return
            time.sleep(0.05)
        raise AssertionError(f"/ready never answered {status}")

    def wait_running(self) -> None:
        """Wait until a request runs."""
        until = time.monotonic() + 60
        while not re.search(r"^vllm:num_requests_running\S* [1-9]", self.get("/metrics").text, re.MULTILINE):
            assert time.monotonic() < until
            time.sleep(0.05)

    def stream(self, tokens: int) -> tuple[threading.Thread, dict[str, Any]]:
        """Read a stream on a thread; what came is filled in."""
        result: dict[str, Any] = {"text": "", "started": threading.Event()}

        def read() -> None:
            body = {"prompt": "hello", "max_tokens": tokens, "stream": True, "ignore_eos": True}
            with (
                contextlib.suppress(httpx.TransportError),
                httpx.stream("POST", self.url + "/v1/completions", json=body, timeout=60) as answer,
            ):
                for line in answer.iter_lines():
                    result["started"].set()
                    if line.startswith("data: {"):
                        choice = json.loads(line[6:])["choices"][0]
                        result["text"] += choice["text"]
                        result["finish_reason"] = choice["finish_reason"]
                    result["done"] = line == "data: [DONE]" or result.get("done", False)

        thread = threading.Thread(target=read)
        thread.start()
        assert result["started"].wait(30)
        return thread, result

    def said(self) -> str:
        return self.process.communicate(timeout=30)[0]


@contextmanager
def slow_server(*arguments: str) -> Iterator[Process]:
    server = Process(SLOW, *arguments)
    try:
        server.wait_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()
        if server.process.stdout is not None:
            server.process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_runs_finish_and_takes_nothing_new(number: signal.Signals) -> None:
    with slow_server() as server:
        thread, result = server.stream(40)
        server.process.send_signal(number)
        server.wait_ready(503)
        assert server.get("/health").json() == {"status": "stopping"}
        refused = server.post("/v1/completions", json={"prompt": "more"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        assert int(refused.headers["retry-after"]) >= 1
        thread.join(60)
        assert (result["done"], result["finish_reason"]) == (True, "length")
        assert len(result["text"]) == 40
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.said()


def test_what_does_not_end_in_time_is_aborted_and_answered() -> None:
    with slow_server("--set", "serve.drain_s=0.5") as server:
        thread, result = server.stream(900)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        thread.join(60)
        assert result["done"]
        assert 0 < len(result["text"]) < 600  # a step takes 50 ms or longer
        said = server.said()
        assert "1 requests are aborted after 0.5 s" in said
        assert "Traceback" not in said


def test_a_second_signal_ends_at_once() -> None:
    with slow_server() as server:
        thread, result = server.stream(900)
        server.process.send_signal(signal.SIGINT)
        server.wait_ready(503)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 130
        thread.join(60)
        assert len(result["text"]) < 600


def test_what_is_half_sent_or_not_read_at_the_end_is_closed_without_a_traceback() -> None:
    server = Process(HASTY, "--set", "serve.drain_s=0.5")
    body = json.dumps({"prompt": "hello", "max_tokens": 900, "n": 8, "logprobs": 20, "stream": True}).encode()
    with contextlib.ExitStack() as stack:
        stack.callback(server.process.kill)
        server.wait_ready()
        half, deaf = (
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(2)
        )
        half.sendall(http_post("/v1/completions", b"{" * 100)[:-50])
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.sendall(http_post("/v1/completions", body))
        server.wait_running()  # connections are taken in their order
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert half.recv(65536).startswith(b"HTTP/1.1 503 ")
        said = server.said()
        assert "Traceback" not in said
        assert " 500 " not in said


@pytest.mark.skipif(os.name == "nt", reason="no such shell on Windows")
@pytest.mark.parametrize("streams", [">&- 2>&-", "<&- >&- 2>&-", "2>&-"])
def test_streams_that_are_closed_from_the_start_are_not_taken_by_sockets(
    tiny_checkpoint: MakeModel, streams: str
) -> None:
    code = "from pagedcli.cli.main import main; main()"
    server = Process(code, str(tiny_checkpoint("llama")), "--num-pages", "64", streams=streams)
    try:
        server.wait_ready()
        answer = server.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert answer.status_code == 200
        if Path("/proc/self/fd").exists():
            files = Path(f"/proc/{server.process.pid}/fd")
            assert not any((files / str(number)).readlink().name.startswith("socket:") for number in range(3))
            assert (files / "2").readlink() == Path(os.devnull)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    finally:
        server.process.kill()
        server.said()


def test_a_server_outlives_whoever_read_what_it_says() -> None:
    server = Process(SLOW)
    assert server.process.stdout is not None
    server.process.stdout.close()
    try:
        server.wait_ready()
        assert server.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert server.get("/metrics").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    finally:
        server.process.kill()
        server.process.wait()


def test_a_taken_port_is_one_line_and_exit_code_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}"):
            bind("127.0.0.1", port)
        server = Process(REAL, "--port", str(port))
        said = server.said()
    assert server.process.returncode == 2
    assert said.count("\n") == 1, said


def test_a_model_that_is_not_there_ends_the_server_with_its_error(tmp_path: Path) -> None:
    server = Process(REAL, str(tmp_path / "nothing"))
    said = server.said()
    assert server.process.returncode == 2
    assert "nothing" in said
    assert "Traceback" not in said


def test_a_real_model_is_served_and_stops(tiny_checkpoint: MakeModel) -> None:
    server = Process(REAL, str(tiny_checkpoint("llama")), "--num-pages", "64")
    try:
        server.wait_ready()
        asked = {"prompt": "secret words", "max_tokens": 4, "ignore_eos": True}
        answer = server.post("/v1/completions", json=asked)
        assert answer.status_code == 200
        metrics = server.get("/metrics").text
        assert "vllm:generation_tokens_total" in metrics
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    finally:
        server.process.kill()
    said = server.said()
    [line] = [line for line in said.splitlines() if "/v1/completions" in line]
    assert "200" in line
    assert answer.json()["id"] in line
    assert "4 tokens" in line
    assert "secret" not in said
