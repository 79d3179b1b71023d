"""`EngineThread`: the engine's loop on a thread of its own, and the safe way to it from all others.

May import `core`, `text` and the engine's other modules. One thread owns scheduler, executor and output stage; every
other thread only puts commands into an inbox. Invariants: the thread sleeps when there is no work; each request that
`add` accepted ends with exactly one delta that carries its output, whatever happens to it or to the executor; what
is wrong with one request never reaches another (P4).
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from pagedcli.core.blocked import Blocked
from pagedcli.core.limits import refuse_if_too_long
from pagedcli.core.request import Request
from pagedcli.core.scheduler import Scheduler
from pagedcli.core.snapshot import Snapshot
from pagedcli.engine.admission import QueueLimits, WaitingRoom
from pagedcli.engine.core import EngineCore
from pagedcli.engine.executor import Executor
from pagedcli.engine.latency import HistogramValue
from pagedcli.engine.loop import EngineLoop, Sink, Submission
from pagedcli.engine.outputs import EngineStats
from pagedcli.engine.prompt import SEED_MASK, Prepared, RequestSpec, TextCodec, mixed_seed, prepare
from pagedcli.engine.stats import StatsBoard
from pagedcli.engine.timing import Timing
from pagedcli.errors import EngineDead, PagedError, RequestError

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine thread needs to know besides its parts.

    Attributes:
        seed: Mixed with a counter for requests that bring none.
        depth: Steps in flight.
        chat_template: Used instead of the model's own; None: the model's.
        limits: What may wait to run; more is refused.
    """

    seed: int = 0
    depth: int = 1
    chat_template: str | None = None
    limits: QueueLimits = field(default_factory=QueueLimits)


@dataclass(frozen=True, slots=True)
class _Command:
    """Something for the engine thread to do, and what to do instead if the engine has died."""

    run: Callable[[], None]
    fail: Callable[[EngineDead], None]


class EngineThread:
    """Runs an engine on a thread of its own. Every method may be called on any thread, sinks included.

    Args:
        scheduler: Used by nobody else from now on.
        executor: The same; closed when the engine stops.
        codec: The model's tokenizer.
        settings: Depth, seed, chat template.
        clock: Monotonic seconds, the same clock for every time that the engine reports.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        codec: TextCodec,
        settings: EngineSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.codec = codec
        self.settings = settings
        self.info = executor.info
        self.timing = Timing(clock)
        self._clock = clock
        self._executor = executor
        self._scheduler = scheduler
        self._board = StatsBoard(lambda: scheduler.stats, self.timing, clock, scheduler.max_model_len)
        core = self._core = EngineCore(scheduler, executor, settings.depth, clock, self.timing.step_done)
        self._loop = EngineLoop(core, codec, self.timing, clock, self._board, self._started, self._closed)
        self._condition = threading.Condition()
        self._inbox: deque[_Command] = deque()
        self._open_ids: set[str] = set()
        self._waiting = WaitingRoom(settings.limits, clock)
        self._turn_hooks: list[Callable[[], None]] = []
        self._num_seeds = 0
        self._has_work = False
        self._stopping = False
        self._ended = False
        self._dead: EngineDead | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="paged-engine", daemon=True)

    def start(self) -> EngineThread:
        """Start the thread."""
        self._thread.start()
        atexit.register(self.close)
        return self

    @property
    def dead(self) -> EngineDead | None:
        """Why nothing is served any more; None while all is well."""
        return self._dead

    @property
    def num_unfinished(self) -> int:
        """Requests that were added and not answered yet."""
        return len(self._open_ids)

    @property
    def is_stopping(self) -> bool:
        """Whether it takes no more requests because it is being closed."""
        return self._stopping

    @property
    def is_full(self) -> bool:
        """Whether requests are refused for now, because as many wait as may."""
        with self._condition:
            return self._waiting.is_full

    def on_turn(self, hook: Callable[[], None]) -> None:
        """Have `hook` called on the engine thread after each turn, when the deltas of a step have gone out."""
        with self._condition:
            self._turn_hooks = [*self._turn_hooks, hook]

    def off_turn(self, hook: Callable[[], None]) -> None:
        """Take back `on_turn`."""
        with self._condition:
            self._turn_hooks = [known for known in self._turn_hooks if known != hook]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Have all requests that are added in this context reach the engine in one turn."""
        with self._condition:
            yield

    def add(self, spec: RequestSpec, sink: Sink) -> str:
        """Tokenize a request here, check it, and hand it to the engine.

        Args:
            spec: The request.
            sink: Gets its deltas on the engine thread; must be quick (`queue.put`). If it raises, the request is
                aborted.

        Returns:
            The request's id.

        Raises:
            RequestError: What is wrong with the request alone, `prompt_too_long` included, or that too many wait
                (429 `queue_full`).
            EngineDead: The engine is closed or has failed.
        """
        arrival = self._clock()
        self._require_alive()
        with self.timing.tokenizing():
            prepared = prepare(
                spec,
                self.codec,
                vocab_size=self.info.vocab_size,
                chat_template=self.settings.chat_template,
            )
        self._require_fits(prepared)
        with self._condition:
            self._require_alive()
            request_id = self._claim_id(spec.request_id, len(prepared.tokens))
            seed = self._seed(prepared.params.seed)
            submission = Submission(request_id, prepared, sink, spec.stream, seed, arrival)
            self._post(lambda: self._loop.add(submission), lambda error: self._loop.refuse(submission, error))
        return request_id

    def _is_forked(self) -> bool:
        """Whether this is a copy of the process that has the thread: its locks may be held for ever."""
        return os.getpid() != self._pid

    def _require_alive(self) -> None:
        if self._is_forked():
            raise EngineDead("the engine runs in the process that this one was forked from: make one here")
        if self._dead is not None:
            raise EngineDead(str(self._dead)) from self._dead.__cause__
        if self._stopping:
            raise EngineDead("the engine is closed: it takes no more requests")

    def _require_fits(self, prepared: Prepared) -> None:
        """Refuse here what the scheduler would refuse there; reads only what never changes."""
        request = Request(-1, list(prepared.tokens), len(prepared.tokens), prepared.params)
        try:
            scheduler = self._scheduler
            refuse_if_too_long(request, scheduler.kv, scheduler.max_model_len, scheduler.model_limit)
        except RequestError as error:
            self._board.refused(error)
            raise

    def _claim_id(self, wanted: str | None, num_tokens: int) -> str:
        request_id = uuid.uuid4().hex if wanted is None else wanted
        if request_id in self._open_ids:
            raise RequestError(
                f"request_id {request_id!r} belongs to a request that is not finished: choose another",
                code="duplicate_id",
                field="request_id",
            )
        try:
            self._waiting.enter(request_id, num_tokens)
        except RequestError as error:
            self._board.refused(error)
            raise
        self._open_ids.add(request_id)
        return request_id

    def _seed(self, wanted: int | None) -> int:
        if wanted is not None:
            return wanted & SEED_MASK
        self._num_seeds += 1
        return mixed_seed(self.settings.seed, self._num_seeds)

    def _post(self, run: Callable[[], None], fail: Callable[[EngineDead], None]) -> None:
        with self._condition:
            self._inbox.append(_Command(run, fail))
            self._condition.notify_all()

    def abort(self, request_id: str) -> bool:
        """End a request with what it has (finish_reason abort); False: there is no such unfinished request."""
        if self._is_forked():
            return False
        with self._condition:
            known = request_id in self._open_ids
            if known:
                self._post(lambda: self._loop.abort(request_id), lambda error: None)
            return known

    def stats(self) -> EngineStats:
        """Counters and rates as of the last answer, or a moment ago (`stats.PUBLISH_S`), at once."""
        return self._board.read(len(self._open_ids))

    def latency(self) -> dict[str, HistogramValue]:
        """Distributions of times and sizes since the start, by name (`engine.latency.LatencyBoard`)."""
        return self._board.latency.values()

    def snapshot(self) -> Snapshot:
        """Every block and who holds it, taken between two steps."""
        return self._call(self._scheduler.snapshot)

    def blocked(self) -> dict[str, Blocked]:
        """Why requests that wait are waiting, by id."""
        return self._call(self._loop.blocked)

    def _call(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine thread between two steps and wait for it."""
        if threading.current_thread() is self._thread:
            return function()
        if self._is_forked():
            self._require_alive()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except PagedError as error:
                future.set_exception(error)

        with self._condition:
            if self._dead is not None or self._ended or not self._thread.is_alive():
                return self._call_dead(function)
            self._post(run, future.set_exception)
        return future.result()

    def _call_dead(self, function: Callable[[], T]) -> T:
        """Nothing changes any more once the thread has ended, so its state can be read from here."""
        if self._dead is not None:
            self._require_alive()
        return function()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until every request is answered; False: time was up first."""
        if self._is_forked():
            self._require_alive()
        with self._condition:
            if not self._condition.wait_for(lambda: not self._open_ids, timeout_s):
                return False
        if self._dead is None:
            self._call(lambda: None)  # The last deltas leave right after their ids do.
        return True

    def close(self, *, drain: bool = False) -> None:
        """Stop: take no more requests, abort the open ones (or serve them first), free the executor."""
        if self._is_forked():
            return
        with self._condition:
            self._stopping = True
            if not drain:
                self._post(self._loop.abort_all, lambda error: None)
            self._condition.notify_all()
        atexit.unregister(self.close)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _started(self, request_ids: Sequence[str]) -> None:
        with self._condition:
            for request_id in request_ids:
                self._waiting.start(request_id)

    def _closed(self, request_ids: Sequence[str]) -> None:
        if self._dead is None:
            self._board.publish()  # who has the answer finds it counted
        with self._condition:
            for request_id in request_ids:
                self._waiting.leave(request_id)
            self._open_ids.difference_update(request_ids)
            self._condition.notify_all()

    def _run(self) -> None:
        try:
            while self._turn():
                for hook in self._turn_hooks:
                    hook()
            self._board.publish()
            self._call_hooks()
            self._end()
        except BaseException as error:  # noqa: BLE001 - whatever it is: every open request must be answered.
            self._die(error)
        finally:
            self._executor.close()

    def _turn(self) -> bool:
        """Do what the inbox says, then one turn of the loop; False: stopping and nothing is left to do."""
        commands: Sequence[_Command] = ()
        if self._inbox or not self._has_work:
            commands = self._wait()
            for command in commands:
                command.run()
            self._has_work = self._core.has_work
        worked, board = self._has_work, self._board
        before, is_late = board.num_published, False
        if worked:
            is_late = self._loop.turn() >= board.next_due
            # All can have ended only if an answer, which publishes, has gone out, or if nothing could be issued.
            if board.num_published != before or self._core.submitted is None:
                self._has_work = self._core.has_work
        is_wanted = is_late or commands or not self._has_work
        if is_wanted and board.num_published == before:
            board.publish()
        if board.num_published != before:
            board.settle_many()  # when the answers have gone out
        return worked or bool(commands) or not self._stopping

    def _wait(self) -> Sequence[_Command]:
        """Sleep until there is something to do; a command that comes in later has its turn after the next step."""
        with self._condition:
            if not self._inbox and not self._has_work and not self._stopping:
                self.timing.mark("no_work")
                self._condition.wait_for(lambda: self._inbox or self._stopping)
                self.timing.mark("scheduler")
            commands = list(self._inbox)
            self._inbox.clear()
            return commands

    def _die(self, cause: BaseException) -> None:
        error = EngineDead(f"the engine failed and serves nothing more: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        logger.error("%s", error, exc_info=cause)
        with self._condition:
            self._dead = error
            commands = list(self._inbox)
            self._inbox.clear()
        self._loop.fail_all(error)
        for command in commands:
            command.fail(error)
        self._call_hooks()

    def _end(self) -> None:
        """Answer what was asked after the last turn; later questions are answered where they are asked."""
        with self._condition:
            self._ended = True
            commands = list(self._inbox)
            self._inbox.clear()
        for command in commands:
            command.run()

    def _call_hooks(self) -> None:
        for hook in self._turn_hooks:
            hook()
