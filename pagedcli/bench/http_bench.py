"""`paged bench serve` without its command line: warm-up and a measured run. Standard library only.

The event loop runs the client alone; what a server says of itself is fetched before and after.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pagedcli.bench.goodput import Targets
from pagedcli.bench.http_answer import Answer
from pagedcli.bench.http_drive import LoadState, drive
from pagedcli.bench.http_prompts import Asking, PromptForm
from pagedcli.bench.http_report import LoadRun
from pagedcli.bench.http_server import UnreachableError, counters, engine_figures
from pagedcli.bench.http_target import CHAT, COMPLETIONS, Target
from pagedcli.bench.load import Client
from pagedcli.workloads.requests import WorkloadRequest

Watch = Callable[[LoadState], Coroutine[Any, Any, None]]
_REFUSED = range(400, 500)
_FOR_NOW = (408, 409, 425, 429)


async def _unwatched(state: LoadState) -> None:
    """Nobody looks."""


def raise_file_limit() -> None:
    """Let this process have as many connections as it may: a client without files looks like a server that fails."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@dataclass(frozen=True, slots=True)
class Bench:
    """A server and how it is asked.

    Attributes:
        api: The server's API.
        asking: How requests become bodies.
        settings: For the file.
        server: For the file.
        machine: Of this client, for the file.
        client: How requests are sent.
        targets: For goodput.
        watch: Runs beside the load until it is over, and shows it.
    """

    api: Target
    asking: Asking
    settings: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    client: Client = field(default_factory=Client)
    targets: Targets | None = None
    watch: Watch = _unwatched

    @property
    def target(self) -> Target:
        """The route that is asked."""
        route = CHAT if self.asking.form is PromptForm.CHAT else COMPLETIONS
        return replace(self.api, path=self.api.path + route)

    def warm_up(self, requests: Sequence[WorkloadRequest]) -> list[Answer]:
        """Send requests one after the other; they are not measured.

        Raises:
            UnreachableError: The server refuses such requests, or there is none: nothing was measured.
        """
        answers: list[Answer] = []
        for request in requests:
            state = LoadState(1)
            asyncio.run(drive(self.target, [request], self.asking, self.client, state, concurrency=1))
            [answer] = state.answers
            if answer.error is not None and not answers:
                self._check(answer)
            answers.append(answer)
        return answers

    def _check(self, answer: Answer) -> None:
        if answer.status == 0 and (answer.error or "").startswith("cannot connect"):
            raise UnreachableError(f"{self.target.url}: {answer.error}: is the server running?")
        if 300 <= answer.status < 400:
            raise UnreachableError(f"{self.target.url} answers {answer.error}")
        if answer.status not in _REFUSED or answer.status in _FOR_NOW:
            return
        raise UnreachableError(f"{self.target.url} answers {answer.error}: {self._remedy(answer.status)}")

    def _remedy(self, status: int) -> str:
        if status in (401, 403):
            return "give its key with --api-key-file FILE or PAGED_API_KEY"
        if status in (404, 405):
            return "check the path of the URL and --model, or give --chat"
        if self.asking.form is PromptForm.IDS:
            return "if it takes no token ids give --prompt-text; --vocab-size N draws smaller ones"
        return "--body FIELD=null leaves out a field that it does not know"

    def run(
        self, requests: Sequence[WorkloadRequest], arrivals: Mapping[str, Any], *, concurrency: int | None
    ) -> LoadRun:
        """Measure once; an interruption keeps what was answered."""
        raise_file_limit()
        before = counters(self.api)
        state = LoadState(len(requests))
        started, cpu = time.perf_counter(), time.process_time()
        is_interrupted = False
        try:
            asyncio.run(self._watched(requests, state, concurrency))
        except KeyboardInterrupt:
            is_interrupted = True
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
        engine = engine_figures(before, {} if is_interrupted else counters(self.api))
        return LoadRun(
            state,
            self.settings,
            arrivals,
            self.server,
            cpu,
            wall,
            self.machine,
            engine,
            self.targets,
            is_interrupted,
        )

    async def _watched(
        self, requests: Sequence[WorkloadRequest], state: LoadState, concurrency: int | None
    ) -> None:
        watching = asyncio.create_task(self.watch(state))
        try:
            await drive(self.target, requests, self.asking, self.client, state, concurrency=concurrency)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
