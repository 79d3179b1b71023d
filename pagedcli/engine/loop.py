"""The engine's loop without its thread: requests in, one turn at a time, deltas out.

May import `core`, `text` and the engine's other modules; must run on one thread. It translates a caller's request
into the core's (n samples are n forks with ids of their own), hands events to the output stage and keeps the counts
that the scheduler cannot know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from pagedcli.core.blocked import Blocked
from pagedcli.core.plan import TokenEvent
from pagedcli.core.request import FinishReason, Request
from pagedcli.engine.core import EngineCore
from pagedcli.engine.output import RequestStage
from pagedcli.engine.outputs import Delta
from pagedcli.engine.prompt import Prepared, TextCodec
from pagedcli.engine.stats import StatsBoard
from pagedcli.engine.timing import Timing
from pagedcli.errors import EngineDead, RequestError

logger = logging.getLogger(__name__)
_sample: Callable[[TokenEvent], int] = itemgetter(TokenEvent._fields.index("request_id"))
_finish: Callable[[TokenEvent], FinishReason | None] = itemgetter(TokenEvent._fields.index("finish"))
Sink = Callable[[Delta], None]


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that was checked and waits in the inbox.

    Attributes:
        request_id: Unique among unfinished requests.
        prepared: Tokens and parameters.
        sink: Gets the deltas.
        stream: All of them, or only the last.
        seed: Resolved.
        arrival: Clock when `add` was called.
    """

    request_id: str
    prepared: Prepared
    sink: Sink
    stream: bool
    seed: int
    arrival: float


@dataclass(slots=True)
class _Open:
    """An unfinished request: its stage, how it came, and its samples as the core knows them."""

    stage: RequestStage
    submission: Submission
    requests: list[Request]


def _count_preemptions(entry: _Open) -> None:
    entry.stage.num_preemptions = sum([request.num_preemptions for request in entry.requests])


class EngineLoop:
    """Owns the core and the stages of all unfinished requests.

    Args:
        core: Scheduler and executor.
        codec: The model's tokenizer.
        timing: Told what the thread is doing.
        clock: Monotonic seconds.
        board: Told what was answered, and how.
        on_started: Called with the ids of requests when they run, again after a preemption.
        on_closed: Called with the ids of requests right before their last deltas go out.
    """

    def __init__(
        self,
        core: EngineCore,
        codec: TextCodec,
        timing: Timing,
        clock: Callable[[], float],
        board: StatsBoard,
        on_started: Callable[[Sequence[str]], None],
        on_closed: Callable[[Sequence[str]], None],
    ) -> None:
        self.core = core
        self._codec = codec
        self._timing = timing
        self._clock = clock
        self._board = board
        self._on_started = on_started
        self._on_closed = on_closed
        self._next_id = 0
        self._samples: dict[int, tuple[_Open, int]] = {}
        self._open: dict[str, _Open] = {}
        self._silent: set[int] = set()  # samples that nobody wants to hear of before they end
        self._ended: list[tuple[_Open, Delta]] = []
        self._latency = board.latency

    def add(self, submission: Submission) -> None:
        """Hand a request to the scheduler; if that refuses it, answer with the reason."""
        stage = RequestStage(
            submission.request_id,
            submission.prepared,
            self._codec,
            submission.arrival,
            stream=submission.stream,
        )
        requests = self._requests(submission)
        entry = _Open(stage, submission, requests)
        self._open[submission.request_id] = entry
        for request in requests:
            self._samples[request.id] = (entry, request.sample_index)
        try:
            for request in requests:
                self.core.scheduler.add(request, submission.arrival)
        except RequestError as error:
            self._fail(entry, error)

    def _requests(self, submission: Submission) -> list[Request]:
        """The n samples as the core's requests: the first, and forks of it."""
        prepared = submission.prepared
        first = self._next_id
        self._next_id += prepared.params.n
        return [
            Request(
                id=first + index,
                tokens=list(prepared.tokens),
                num_prompt=len(prepared.tokens),
                params=prepared.params,
                stop_ids=prepared.stop_ids,
                seed=submission.seed,
                sample_index=index,
                fork_of=first if index else None,
                arrival=submission.arrival,
            )
            for index in range(prepared.params.n)
        ]

    def _fail(self, entry: _Open, error: RequestError) -> None:
        """Answer a request, all its samples, with an error."""
        self._board.refused(error)
        self._drop(entry)
        self._send(entry, entry.stage.fail(error, self._clock()))

    def _drop(self, entry: _Open) -> None:
        """Forget a request, whose stage then knows all its tokens; the core frees what its samples hold."""
        self._catch_up(entry)
        for request in entry.requests:
            if request.id in self._samples:
                self._forget(request.id)
                self.core.scheduler.abort(request.id)
        del self._open[entry.stage.request_id]
        self._on_closed([entry.stage.request_id])

    def _catch_up(self, entry: _Open) -> None:
        """Tell a stage what it did not need to hear when it happened."""
        _count_preemptions(entry)
        for request in entry.requests:
            if request.id in self._silent:
                entry.stage.samples[request.sample_index].know(request.tokens[request.num_prompt :])

    def _forget(self, sample: int) -> None:
        del self._samples[sample]
        self._silent.discard(sample)
        self._latency.sample_ended(sample)

    def refuse(self, submission: Submission, error: EngineDead) -> None:
        """Answer a request that never got as far as the scheduler."""
        self._on_closed([submission.request_id])
        stage = RequestStage(submission.request_id, submission.prepared, self._codec, submission.arrival)
        self._send(_Open(stage, submission, []), stage.fail(error, self._clock()))

    def blocked(self) -> dict[str, Blocked]:
        """Why requests wait, by id; of n samples the first that waits."""
        reasons: dict[str, Blocked] = {}
        for request in self.core.scheduler.snapshot().waiting:
            if request.id in self._samples and request.blocked is not None:
                reasons.setdefault(self._samples[request.id][0].stage.request_id, request.blocked)
        return reasons

    def abort(self, request_id: str) -> None:
        """End a request with what it has; its blocks are free at once."""
        entry = self._open.get(request_id)
        if entry is None:
            return
        self._board.aborted()
        self._drop(entry)
        for delta in entry.stage.end_all(FinishReason.ABORT, self._clock()):
            self._send(entry, delta)

    def abort_all(self) -> None:
        """Abort whatever is unfinished."""
        for request_id in list(self._open):
            self.abort(request_id)

    def fail_all(self, error: EngineDead) -> None:
        """Answer every unfinished request with `error`, without touching the core, which may be broken."""
        self._samples.clear()
        for entry in list(self._open.values()):
            self._catch_up(entry)
            del self._open[entry.stage.request_id]
            self._on_closed([entry.stage.request_id])
            self._send(entry, entry.stage.fail(error, self._clock()))

    def turn(self) -> float:
        """Expire deadlines, schedule or await one step, deliver what came of it; the time when that was done."""
        core = self.core
        events = core.step()
        if core.submitted is not None:
            self._latency.step_issued(core.submitted)
            if core.scheduler.started:
                self._note_started(core.scheduler.started)
        now = self._clock()
        if not events:
            return now
        ids = list(map(_sample, events))
        if self._silent.issuperset(ids) and not any(map(_finish, events)):
            # The usual step: a token for each, of which nobody wants to hear.
            self._latency.samples_came((ids, now))
            return now
        self._latency.tokens_came(events, now)
        samples, silent = self._samples, self._silent
        try:
            for event in events:
                if event.finish is None and event.request_id in silent:
                    continue
                # A sample that was ended by a stop text or an abort may still get an event that was on its way.
                found = samples.get(event.request_id)
                if found is not None:
                    self._take_one(*found, event, now)
        finally:
            if self._ended:
                self._answer()
        return self._timing.delivered(now)

    def _note_started(self, started: Sequence[int]) -> None:
        found = [self._samples[sample][0] for sample in started if sample in self._samples]
        self._on_started([entry.stage.request_id for entry in found])

    def _take_one(self, entry: _Open, index: int, event: TokenEvent, now: float) -> None:
        if event.error is not None:
            self._fail(entry, RequestError(event.error, code="step_failed", status=500))
            return
        _count_preemptions(entry)  # before what may be the last delta
        if event.request_id in self._silent:
            request = entry.requests[index]
            known = request.num_prompt + event.index
            entry.stage.samples[index].know(request.tokens[request.num_prompt : known])
        if entry.stage.is_silent and event.finish is None:
            entry.stage.note(index, event, now)
            self._silent.add(event.request_id)  # it has begun: tokens alone tell nothing new
            return
        delta = entry.stage.take(index, event, now)
        if delta is None:
            return
        if delta.finish_reason is not None:
            self._end_sample(event)
        if delta.output is None:
            self._send(entry, delta)
        else:
            del self._open[entry.stage.request_id]
            self._ended.append((entry, delta))

    def _end_sample(self, event: TokenEvent) -> None:
        self._forget(event.request_id)
        if event.finish is None:
            self.core.scheduler.finish(event.request_id, FinishReason.STOP)

    def _answer(self) -> None:
        """Send the last deltas of the requests that have ended in this turn."""
        ended, self._ended = self._ended, []
        for entry, delta in ended:
            assert delta.output is not None
            self._board.finished(entry.submission.prepared.params, delta.output)
        self._on_closed([delta.request_id for _, delta in ended])
        for entry, delta in ended:
            self._send(entry, delta)

    def _send(self, entry: _Open, delta: Delta) -> None:
        if not entry.submission.stream and delta.output is None:
            return
        try:
            entry.submission.sink(delta)
        except Exception:
            # The caller's code: what is wrong with it costs its own request, never the engine.
            logger.exception("the sink of request %s failed; the request is aborted", delta.request_id)
            self.abort(delta.request_id)
