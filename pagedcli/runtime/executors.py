"""Executors of one process: inline, and on a thread of their own joined by a queue. Imports no torch by itself.

Both run plans in the order of submission (I10). A plan that fails leaves the batch state behind what the scheduler
believes, so that every later one is refused with `EngineDead`, the first failure chained.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.engine.executor import ExecutorInfo, StepHandle
from pagedcli.errors import EngineDead


class Pending(Protocol):
    """A plan that was launched."""

    def done(self) -> bool:
        """Whether `read` would return at once."""

    def read(self) -> StepResult:
        """Wait for the device; raises what it raised."""


class Launches(Protocol):
    """The part of a worker that executors need."""

    @property
    def info(self) -> ExecutorInfo:
        """Facts about the device."""

    def launch(self, plan: StepPlan) -> Pending:
        """Issue all work of a plan."""

    def run(self, plan: StepPlan) -> StepResult:
        """Launch a plan and wait for its result."""


@dataclass(slots=True)
class _Handle:
    """A result or an exception, once `ready` is set."""

    ready: threading.Event = field(default_factory=threading.Event)
    value: StepResult | None = None
    error: BaseException | None = None

    def done(self) -> bool:
        return self.ready.is_set()

    def result(self) -> StepResult:
        self.ready.wait()
        if self.error is not None:
            raise self.error
        assert self.value is not None
        return self.value

    def fulfil(self, value: StepResult) -> None:
        self.value = value
        self.ready.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.ready.set()


@dataclass(slots=True)
class _Failed:
    """A plan that was not carried out."""

    error: BaseException

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        raise self.error


def _dead(cause: BaseException) -> EngineDead:
    error = EngineDead(
        f"the executor failed in an earlier step ({type(cause).__name__}: {cause}): start a new engine"
    )
    error.__cause__ = cause
    return error


def _closed() -> EngineDead:
    return EngineDead("the executor is closed: start a new engine")


class InlineExecutor:
    """Computes in `submit`, in the caller's thread."""

    def __init__(self, worker: Launches) -> None:
        self._worker: Launches | None = worker
        self._info = worker.info
        self._failure: BaseException | None = None

    @property
    def info(self) -> ExecutorInfo:
        """Facts about the device."""
        return self._info

    def submit(self, plan: StepPlan) -> StepHandle:
        """Run the plan; what the device raises comes out of the handle."""
        if self._worker is None:
            raise _closed()
        if self._failure is not None:
            return _Failed(_dead(self._failure))
        try:
            return self._worker.run(plan)
        except BaseException as error:
            # Whatever it is, it belongs to whoever asks for the result, save for an interrupt of this thread.
            self._failure = error
            if not isinstance(error, Exception):
                raise
            return _Failed(error)

    def close(self) -> None:
        """Let go of the worker; later calls do nothing."""
        self._worker = None


class _Signal(Enum):
    END = "no more plans"
    NONE_YET = "no plan is waiting"


_Item = tuple[StepPlan, _Handle] | _Signal


class ThreadExecutor:
    """Computes on a thread of its own, so that the caller can schedule the next step meanwhile.

    The thread is a daemon that an exit handler stops and joins: an interpreter that exits without `close` waits for
    the plan under way at most, and drops the others. So does an executor that nothing refers to any more.
    """

    def __init__(self, worker: Launches) -> None:
        self._info = worker.info
        self._line = _Line(worker)
        self._lock = threading.Lock()
        self._closed = False
        atexit.register(self._line.drop_and_join)
        weakref.finalize(self, self._line.drop).atexit = False

    @property
    def info(self) -> ExecutorInfo:
        """Facts about the device."""
        return self._info

    def submit(self, plan: StepPlan) -> StepHandle:
        """Queue the plan."""
        handle = _Handle()
        with self._lock:
            if self._closed:
                raise _closed()
            self._line.queue.put((plan, handle))
        return handle

    def close(self) -> None:
        """Finish what was submitted and end the thread; later calls do nothing but wait for the same."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._line.queue.put(_Signal.END)
        self._line.join()
        atexit.unregister(self._line.drop_and_join)


class _Line:
    """The queue and the thread at its end. The thread knows of no executor, so that those can be collected."""

    def __init__(self, worker: Launches) -> None:
        self.queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        dropping = threading.Event()
        self._dropping = dropping
        server = _Server(worker, self.queue, dropping)
        self._thread = threading.Thread(target=server.serve, name="paged-executor", daemon=True)
        self._thread.start()

    def drop(self) -> None:
        """Let the thread end after the plan under way. Does not wait: a garbage collection may call it."""
        self._dropping.set()
        self.queue.put(_Signal.END)
        atexit.unregister(self.drop_and_join)

    def join(self) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def drop_and_join(self) -> None:
        self._dropping.set()
        self.queue.put(_Signal.END)
        self.join()


class _Server:
    """What the thread does: launch plans in order and hand each result to its handle.

    Where the device works by itself (CUDA), a waiting plan is launched before the previous one's result is read.
    """

    def __init__(self, worker: Launches, work: queue.SimpleQueue[_Item], dropping: threading.Event) -> None:
        self._worker = worker
        self._work = work
        self._dropping = dropping
        self._launched: deque[tuple[Pending, _Handle]] = deque()
        self._failure: BaseException | None = None

    def serve(self) -> None:
        """Until the end is signalled and all is read."""
        while (item := self._next()) is not _Signal.END:
            if item is not _Signal.NONE_YET:
                self._launch(*item)
            # No local name may keep the last plan and its result alive while the thread waits.
            del item
            self._read_ready()
        while self._launched:
            self._read_oldest()

    def _next(self) -> tuple[StepPlan, _Handle] | Literal[_Signal.END, _Signal.NONE_YET]:
        """The next plan; waits for one only if no result is due."""
        try:
            return self._work.get(block=not self._launched)
        except queue.Empty:
            return _Signal.NONE_YET

    def _read_ready(self) -> None:
        """Read what is done, and the oldest at any rate if there is nothing else to do or enough is launched."""
        while self._launched and (
            self._launched[0][0].done() or len(self._launched) > 1 or self._work.empty()
        ):
            self._read_oldest()

    def _launch(self, plan: StepPlan, handle: _Handle) -> None:
        if self._failure is not None:
            handle.fail(_dead(self._failure))
        elif self._dropping.is_set():
            handle.fail(_closed())
        else:
            try:
                self._launched.append((self._worker.launch(plan), handle))
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever asks for the result
                self._fail(handle, error)

    def _read_oldest(self) -> None:
        pending, handle = self._launched.popleft()
        try:
            handle.fulfil(pending.read())
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever asks for the result
            self._fail(handle, error)

    def _fail(self, handle: _Handle, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        handle.fail(error)
