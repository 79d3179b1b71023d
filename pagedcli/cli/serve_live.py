"""What `paged serve --live` shows while it serves: requests, rates, why the executor idles, and every page.

May import rich, `engine`, `serve` and this package. It looks at the engine on a thread of its own, as `monitor` does,
and as seldom as it costs little.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Group
from rich.live import Live

from pagedcli.cli.console import Messages
from pagedcli.cli.display import ServedView, block_codes, render_served
from pagedcli.cli.monitor import PICTURE_SECONDS_PER_PAGE, SHOW_SECONDS, Watched
from pagedcli.errors import EngineDead


class ServeMonitor:
    """A context in which a server is shown; nothing is, where stderr is no terminal.

    Args:
        engine: Looked at.
        title: First line of the display.
        address: Second line: where it is served.
        messages: Where it is shown.
    """

    def __init__(self, engine: Watched, title: str, address: str, messages: Messages) -> None:
        self._engine = engine
        self._title = title
        self._address = address
        self._messages = messages
        self._live = Live(console=messages.console, auto_refresh=False, transient=True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paged-live", daemon=True)
        self._picture_due = 0.0
        self._blocks = b""
        self._waiting_for = ""

    def __enter__(self) -> Self:
        if self._messages.console.is_terminal:
            self._live.start()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._live.stop()

    def _watch(self) -> None:
        while not self._stop.wait(SHOW_SECONDS):
            try:
                self._live.update(self._look(), refresh=True)
            except EngineDead:
                return  # /health says it, and the log why

    def _look(self) -> Group:
        if time.monotonic() >= self._picture_due:
            self._take_picture()
        view = ServedView(self._title, self._address, self._engine.stats(), self._blocks, self._waiting_for)
        return render_served(view, self._messages.console.width)

    def _take_picture(self) -> None:
        snapshot = self._engine.snapshot()
        self._blocks = block_codes(block.state for block in snapshot.blocks)
        reason = snapshot.waiting[0].blocked if snapshot.waiting else None
        self._waiting_for = str(reason) if reason is not None else ""
        self._picture_due = time.monotonic() + len(snapshot.blocks) * PICTURE_SECONDS_PER_PAGE
