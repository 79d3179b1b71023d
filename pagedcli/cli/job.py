"""Runs all rows of an input through the engine: read, answer, write. May import `engine` and this package.

Three threads: one reads, checks and tokenizes rows; the engine's answers them; this one writes. At most `window` rows
are between reading and writing, so an input of any size needs no memory for itself. Every row that is read and not
done yet is put into the sink exactly once, unless the job ends early; then it is not put at all.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from pagedcli.cli.journal import RowSink
from pagedcli.cli.output_rows import RowStyle, error_row, output_row
from pagedcli.cli.progress import Progress
from pagedcli.cli.recovery import Done
from pagedcli.cli.rows import Row
from pagedcli.cli.summary import KVEstimate
from pagedcli.engine.loop import Sink
from pagedcli.engine.outputs import Delta, RequestOutput
from pagedcli.engine.prompt import RequestSpec
from pagedcli.errors import EngineDead, RequestError

_WAIT_SECONDS = 0.25


class EngineClient(Protocol):
    """What a job needs of `engine.client.EngineThread`."""

    def add(self, spec: RequestSpec, sink: Sink) -> str:
        """Hand in a request; the sink gets its deltas on the engine's thread."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    row: Row
    output: RequestOutput | None = None
    error: RequestError | None = None


@dataclass(slots=True)
class _ReaderEnd:
    error: BaseException | None = None


class Job:
    """One run over an input.

    Args:
        rows: Input rows in order; read on another thread.
        client: The engine.
        sink: Where output rows go.
        style: What goes into them.
        window: Rows in flight at most.
        done: Rows that need not run.
        progress: Updated as rows end.
        estimate: Told of every row served.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        client: EngineClient,
        sink: RowSink,
        style: RowStyle,
        window: int,
        done: Done | None,
        progress: Progress,
        estimate: KVEstimate,
    ) -> None:
        self._rows = rows
        self._client = client
        self._sink = sink
        self._style = style
        self._done = done
        self._progress = progress
        self._estimate = estimate
        self._events: queue.SimpleQueue[_Outcome | _ReaderEnd] = queue.SimpleQueue()
        self._window = threading.Semaphore(window)
        self._stop = threading.Event()
        self._interrupted = False
        self._num_read = 0
        self._num_started = 0
        self._num_ended = 0

    def run(self) -> int:
        """Work through the input; the number of its rows.

        Raises:
            KeyboardInterrupt: `interrupt` was called.
            EngineDead: The executor failed.
            OutputError, BrokenPipeError: The output takes nothing more.
            PagedError, OSError: The input cannot be read on, or is not the one the output was made from.
        """
        reader = threading.Thread(target=self._read, name="paged-reader", daemon=True)
        reader.start()
        try:
            ended = False
            while not ended or self._num_ended < self._num_started:
                ended = self._next_event() or ended
                self._sink.sync()
                if self._interrupted:
                    raise KeyboardInterrupt
        finally:
            self._stop.set()
            self._window.release()
        return self._num_read

    def interrupt(self) -> None:
        """Make `run` end between two rows, never within the writing of one; for a signal handler."""
        self._interrupted = True

    def keep_finished(self) -> None:
        """After an interruption: write what was answered and still waits to be written."""
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, _Outcome) and not self._is_lost(event):
                self._write(event)

    def _next_event(self) -> bool:
        """Handle what comes next, if it comes soon; whether the reader has ended."""
        try:
            event = self._events.get(timeout=_WAIT_SECONDS)
        except queue.Empty:
            return False
        if isinstance(event, _ReaderEnd):
            if event.error is not None:
                raise event.error
            return True
        if event.output is not None and isinstance(event.output.error, EngineDead):
            raise event.output.error
        self._num_ended += 1
        self._write(event)
        self._window.release()
        return False

    @staticmethod
    def _is_lost(event: _Outcome) -> bool:
        """Whether the row was given up with the job, so that a rerun must answer it."""
        output = event.output
        if output is None:
            return False
        return isinstance(output.error, EngineDead) or any(
            sample.finish_reason == "abort" for sample in output.samples
        )

    def _write(self, event: _Outcome) -> None:
        progress, output = self._progress, event.output
        error = event.error or (output.error if output is not None else None)
        progress.in_flight = self._num_started - self._num_ended
        if error is not None:
            self._sink.put(event.row.ordinal, error_row(event.row, error))
            progress.failed += 1
            return
        assert output is not None
        self._sink.put(event.row.ordinal, output_row(event.row, output, self._style))
        self._estimate.add(event.row.params, output)
        progress.answered += 1
        progress.prompt_tokens += output.usage.prompt_tokens
        progress.cached_tokens += output.usage.cached_tokens
        progress.generated_tokens += output.usage.completion_tokens
        progress.preemptions += output.num_preemptions

    def _read(self) -> None:
        """The reader thread: whatever ends it goes to the thread that waits."""
        end = _ReaderEnd()
        try:
            for row in self._rows:
                self._num_read += 1
                if self._done is None or not self._done.has(row):
                    self._window.acquire()
                    if self._stop.is_set():
                        return
                    self._num_started += 1
                    self._start(row)
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            end.error = error
        finally:
            self._events.put(end)

    def _start(self, row: Row) -> None:
        if row.error is not None:
            self._events.put(_Outcome(row, error=row.error))
            return
        spec = RequestSpec(
            prompt=row.prompt,
            messages=row.messages,
            params=row.params,
            request_id=str(row.ordinal),
            template_args=row.template_args,
            stream=False,
        )

        def sink(delta: Delta) -> None:
            if delta.output is not None:
                self._events.put(_Outcome(row, delta.output))

        try:
            self._client.add(spec, sink)
        except RequestError as error:
            self._events.put(_Outcome(row, error=error))
