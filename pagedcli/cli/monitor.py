"""Looks at the engine a few times a second on a thread of its own and shows what it sees.

May import rich, `engine` and this package. On a terminal: the live display; else a line every few seconds. A look
may wait for the step under way, which is why no other thread does it.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Protocol, Self

from rich.live import Live

from pagedcli.cli.console import Messages
from pagedcli.cli.display import View, block_codes, plain_line, render
from pagedcli.cli.progress import Progress, expected_seconds
from pagedcli.cli.summary import KVUseMeter
from pagedcli.core.snapshot import Snapshot
from pagedcli.engine.outputs import EngineStats
from pagedcli.errors import EngineDead

MEASURE_SECONDS = 0.05
SHOW_SECONDS = 0.2
# A picture of the pool costs the engine's thread about 2 us a page: take it so seldom that it costs at most 2%.
PICTURE_SECONDS_PER_PAGE = 1e-4
PLAIN_SECONDS = 10.0


class Watched(Protocol):
    """What a monitor needs of `engine.client.EngineThread`."""

    def stats(self) -> EngineStats:
        """Counters now."""

    def snapshot(self) -> Snapshot:
        """Pages now."""


class Monitor:
    """A context in which a run is watched.

    Args:
        engine: Looked at.
        progress: Counts of rows, updated by the job.
        title: First line of the display.
        messages: Where it is shown, if at all.
    """

    def __init__(self, engine: Watched, progress: Progress, title: str, messages: Messages) -> None:
        self.meter = KVUseMeter()
        self._engine = engine
        self._progress = progress
        self._title = title
        self._messages = messages
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paged-monitor", daemon=True)
        self._live: Live | None = None
        self._started = time.monotonic()
        self._picture_due = 0.0
        self._blocks = b""
        self._waiting_for = ""

    def __enter__(self) -> Self:
        if self._messages.quiet:
            return self
        if self._messages.console.is_terminal:
            self._live = Live(console=self._messages.console, auto_refresh=False, transient=True)
            self._live.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._live is not None:
            self._live.stop()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started

    def kv_use(self) -> float | None:
        """KV use over the run; of its fullest moment, if it was too short to be seen."""
        return self.meter.use(self._engine.stats())

    def _watch(self) -> None:
        shown_at = self._started
        pause = SHOW_SECONDS if self._live is not None else PLAIN_SECONDS
        while not self._stop.wait(MEASURE_SECONDS):
            stats = self._engine.stats()
            self.meter.see(stats)
            if time.monotonic() - shown_at < pause:
                continue
            shown_at = time.monotonic()
            try:
                self._show(stats)
            except EngineDead:
                return  # the job meets it too, and says it

    def _show(self, stats: EngineStats) -> None:
        if self._live is None:
            self._messages.say(plain_line(self._view(stats)))
            return
        if time.monotonic() >= self._picture_due:
            self._take_picture()
        self._live.update(render(self._view(stats), self._messages.console.width), refresh=True)

    def _view(self, stats: EngineStats) -> View:
        return View(
            self._title,
            self._progress,
            stats,
            self._blocks,
            self.elapsed_s,
            self._eta(stats),
            self._waiting_for,
        )

    def _take_picture(self) -> None:
        snapshot = self._engine.snapshot()
        self._blocks = block_codes(block.state for block in snapshot.blocks)
        reason = snapshot.waiting[0].blocked if snapshot.waiting else None
        self._waiting_for = str(reason) if reason is not None else ""
        self._picture_due = time.monotonic() + len(snapshot.blocks) * PICTURE_SECONDS_PER_PAGE

    def _eta(self, stats: EngineStats) -> float | None:
        if stats.num_running > 4 * self._progress.answered:
            return None  # the first to end are the short ones: they say little of the others
        return expected_seconds(self._progress, stats.generated_tokens, self.elapsed_s)
