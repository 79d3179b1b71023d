"""Progress of a benchmark of known length or time: a bar with the time left on a terminal, else a line now and then.

May import rich and this package.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.live import Live
from rich.text import Text

from pagedcli.cli.console import Messages
from pagedcli.cli.display import bar, duration

PLAIN_SECONDS = 10.0
SHOWN_PER_SECOND = 4
_WIDTH = 24


class CountedProgress:
    """So many of so many.

    Args:
        messages: Where it is shown.
        total: Number of steps.
        what: Of what.
    """

    def __init__(self, messages: Messages, total: int, what: str) -> None:
        self._messages, self._total, self._what = messages, total, what
        self._done, self._now = 0, ""
        self._start = self._shown_at = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._messages.console.is_terminal and not self._messages.quiet:
            self._live = Live(
                get_renderable=self.render,
                console=self._messages.console,
                refresh_per_second=SHOWN_PER_SECOND,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, now: str) -> None:
        """What is being done now."""
        self._now = now

    def advance(self) -> None:
        """One step more is done."""
        self._done += 1
        self._say_sometimes()

    def _say_sometimes(self) -> None:
        now = time.monotonic()
        if self._live is None and now - self._shown_at >= PLAIN_SECONDS:
            self._shown_at = now
            self._messages.say(self._line())

    def left_s(self) -> float | None:
        """Expected until the end, if all steps take as long as those until now."""
        if not self._done:
            return None
        return (time.monotonic() - self._start) / self._done * (self._total - self._done)

    def render(self) -> Text:
        """The display of this moment."""
        return Text.assemble(
            bar(self._part(), _WIDTH, "cyan"), "  ", self._line(), no_wrap=True, overflow="ellipsis"
        )

    def _line(self) -> str:
        left = self.left_s()
        rest = "" if left is None else f", {duration(left)} left"
        return f"{self._what}{self._count()}{rest}  {self._now}"

    def _part(self) -> float:
        return self._done / self._total if self._total else 1.0

    def _count(self) -> str:
        return f": {self._done} of {self._total}"


class TimedProgress(CountedProgress):
    """Of a job that has so many seconds.

    Args:
        messages: Where it is shown.
        seconds: At most.
    """

    def __init__(self, messages: Messages, seconds: float) -> None:
        super().__init__(messages, 1, "tuning")
        self._seconds = seconds

    def say(self, now: str) -> None:
        """What is being done now; without a terminal a line at most every `PLAIN_SECONDS`."""
        super().say(now)
        self._say_sometimes()

    def left_s(self) -> float | None:
        """Until the time is up; it may end before."""
        return max(0.0, self._seconds - (time.monotonic() - self._start))

    def _part(self) -> float:
        return min(1.0, (time.monotonic() - self._start) / self._seconds)

    def _count(self) -> str:
        return ""
