"""Asks a server for a whole workload, open or closed loop, and keeps what came. Standard library only and `workloads`.

Open loop: each request goes out when it is due, whatever has been answered, and its latency counts from then; a client
that is late itself does not hide it. Closed loop: so many conversations at once, the next one when one is over. A later
turn is due when the answer before it is over, and its thinking time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pagedcli.bench.http_answer import Answer
from pagedcli.bench.http_prompts import Asking, Conversation
from pagedcli.bench.http_target import Target
from pagedcli.bench.load import Client, exchange, wait_until
from pagedcli.workloads.requests import WorkloadRequest

NOT_SENT = "not sent: the turn before it failed"


@dataclass(slots=True)
class LoadState:
    """A run as it is now; whoever shows it reads it between two turns of the event loop.

    Attributes:
        total: Requests of the workload.
        started_s: On the client's clock.
        answers: Of the requests that are over, in the order of their end.
        num_in_flight: Requests sent and not answered.
        under_way: The answers that are coming, by request.
        in_flight: (moment, requests in flight) at every change.
    """

    total: int
    started_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    num_in_flight: int = 0
    under_way: dict[str, Answer] = field(default_factory=dict)
    in_flight: list[tuple[float, int]] = field(default_factory=list)

    def begin(self, answer: Answer) -> None:
        """An answer may come."""
        self.under_way[answer.id] = answer

    def change(self, moment: float, by: int) -> None:
        """A request went out or came back."""
        self.num_in_flight += by
        self.in_flight.append((moment, self.num_in_flight))


@dataclass(slots=True)
class _Prepared:
    """A request that only has to be sent."""

    request: WorkloadRequest
    conversation: Conversation
    message: bytes


class Driver:
    """Sends a workload.

    Args:
        target: The server's route.
        requests: In the order of arrival; turns after those that they follow.
        asking: How they become bodies.
        client: How they are sent.
        state: Kept up to date.
    """

    def __init__(
        self,
        target: Target,
        requests: Sequence[WorkloadRequest],
        asking: Asking,
        client: Client,
        state: LoadState,
    ) -> None:
        self._target = target
        self._asking = asking
        self._client = client
        self._state = state
        self._first = [request for request in requests if request.follows is None]
        self._later: dict[str, list[WorkloadRequest]] = {}
        for request in requests:
            if request.follows is not None:
                self._later.setdefault(request.follows, []).append(request)

    async def open_loop(self) -> None:
        """Send each request at its arrival."""
        self._state.started_s = self._client.clock()
        async with asyncio.TaskGroup() as tasks:
            for request in self._first:
                prepared = self._prepare(request, Conversation())
                due = self._state.started_s + request.arrival_s
                await wait_until(due, self._client)
                tasks.create_task(self._converse(prepared, due))

    async def closed_loop(self, concurrency: int) -> None:
        """Keep so many conversations going."""
        self._state.started_s = self._client.clock()
        waiting = iter(self._first)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(concurrency, len(self._first))):
                tasks.create_task(self._work(waiting))

    async def _work(self, waiting: Iterable[WorkloadRequest]) -> None:
        for request in waiting:
            await self._converse(self._prepare(request, Conversation()), None)

    def _prepare(self, request: WorkloadRequest, conversation: Conversation) -> _Prepared:
        conversation.ask(request)
        message = self._target.message(self._asking.body(request, conversation))
        return _Prepared(request, conversation, message)

    async def _converse(self, prepared: _Prepared, due: float | None) -> None:
        """A request and all turns after it."""
        answer = await self._ask(prepared, due)
        later = self._later.get(prepared.request.id, ())
        if not later:
            return
        if not answer.is_served:
            self._give_up(later)
            return
        prepared.conversation.answer(answer.text)
        async with asyncio.TaskGroup() as tasks:
            for turn in later:
                following = self._prepare(turn, prepared.conversation.copy())
                tasks.create_task(self._follow(following, answer.end_s + turn.think_s))

    async def _follow(self, prepared: _Prepared, due: float) -> None:
        await wait_until(due, self._client)
        await self._converse(prepared, due)

    async def _ask(self, prepared: _Prepared, due: float | None) -> Answer:
        self._state.change(self._client.clock(), 1)
        try:
            answer = await exchange(
                self._target,
                prepared.message,
                self._client,
                due_s=due,
                name=prepared.request.id,
                max_tokens=prepared.request.output_tokens,
                on_start=self._state.begin,
            )
        finally:
            self._state.under_way.pop(prepared.request.id, None)
            self._state.change(self._client.clock(), -1)
        self._state.answers.append(answer)
        return answer

    def _give_up(self, turns: Sequence[WorkloadRequest]) -> None:
        """Turns after a failure, which nobody could ask."""
        pending = list(turns)
        moment = self._client.clock()
        while pending:
            turn = pending.pop()
            self._state.answers.append(Answer(moment, None, turn.id, end_s=moment, error=NOT_SENT))
            pending += self._later.get(turn.id, ())


async def drive(
    target: Target,
    requests: Sequence[WorkloadRequest],
    asking: Asking,
    client: Client,
    state: LoadState,
    *,
    concurrency: int | None,
) -> None:
    """Send a workload and wait for all answers; with a `concurrency` in a closed loop, else by arrival."""
    driver = Driver(target, requests, asking, client, state)
    if concurrency is None:
        await driver.open_loop()
    else:
        await driver.closed_loop(concurrency)
