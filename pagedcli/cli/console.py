"""Everything that is not a result goes to stderr through here: messages, phases, logging, progress of downloads.

May import rich and `errors`. stdout carries results only. `Messages` knows how talkative the user wants us to be.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console

from pagedcli.cli.files import OutputError
from pagedcli.errors import ConfigError

_PROGRESS_SECONDS = 1.0


class _MessageConsole(Console):
    """Falls silent when nobody reads it any more; rich would end the program, and send its results nowhere."""

    def on_broken_pipe(self) -> None:
        """What rich calls then."""
        self.quiet = True


def make_console() -> Console:
    """A console on stderr; rich honours NO_COLOR and TERM. Lines are wrapped on a terminal only."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return _MessageConsole(stderr=True, highlight=False, soft_wrap=not is_terminal, emoji=False, markup=False)


class _ConsoleHandler(logging.Handler):
    """Prints records through the console, so that they do not break a live display."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._console.print(self.format(record))


def set_up_logging(console: Console, *, verbose: bool, quiet: bool) -> None:
    """Send our log records to the console, from the level that the user asked for (PAGED_LOG counts most)."""
    level = os.environ.get("PAGED_LOG", "").upper()
    if level and level not in logging.getLevelNamesMapping():
        raise ConfigError(f"PAGED_LOG is {level.lower()!r}: choose debug, info, warning or error")
    handler = _ConsoleHandler(console)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("pagedcli")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level or ("ERROR" if quiet else "INFO" if verbose else "WARNING"))


def set_up_access_log(console: Console, *, is_live: bool, quiet: bool) -> None:
    """A line on stderr for each request of a server, unless only errors are wanted (PAGED_LOG counts most).

    Written plainly, since rich takes a good part of a millisecond for a line; under a live display through the console.
    """
    logger = logging.getLogger("pagedcli.access")
    handler = _ConsoleHandler(console) if is_live else logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.handlers = [handler]
    logger.propagate = False
    if not os.environ.get("PAGED_LOG"):
        logger.setLevel(logging.WARNING if quiet else logging.INFO)


@dataclass(slots=True)
class Messages:
    """Says things on stderr.

    Attributes:
        console: Where.
        verbose: Say phases and timings too.
        quiet: Say errors only.
    """

    console: Console
    verbose: bool = False
    quiet: bool = False
    _reported_at: dict[str, float] = field(default_factory=dict)
    _reported: dict[str, str] = field(default_factory=dict)

    def say(self, text: str) -> None:
        """Something that a user wants to know."""
        if not self.quiet:
            with contextlib.suppress(OSError):  # a full disk behind stderr must not cost an answer
                self.console.print(text)

    def detail(self, text: str) -> None:
        """Something for those who asked for it."""
        if self.verbose:
            with contextlib.suppress(OSError):
                self.console.print(text, style="dim")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Tell how long something took, with -v."""
        started = time.perf_counter()
        yield
        self.detail(f"{name}: {time.perf_counter() - started:.2f} s")

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Show on a terminal that something takes its time."""
        if self.quiet or not self.console.is_terminal:
            yield
            return
        with self.console.status(name, spinner="line"):
            yield

    def transfer(self, name: str, done: int, total: int) -> None:
        """Progress of a download or of loading, at most one line a second for each name."""
        now = time.monotonic()
        last = self._reported_at.get(name, now - _PROGRESS_SECONDS if total > 1 << 24 else now)
        self._reported_at.setdefault(name, last)
        if done < total and now - last < _PROGRESS_SECONDS:
            return
        if done >= total and not self.verbose:
            return
        self._reported_at[name] = now
        size = f" of {total / 1e6:,.0f} MB" if total else ""
        text = f"{name}: {done / 1e6:,.0f}{size}"
        if self._reported.get(name) != text:  # a slow start would say the same line again and again
            self._reported[name] = text
            self.say(text)


def make_messages(*, verbose: bool, quiet: bool) -> Messages:
    """Console, logging and messages as the user wants them."""
    console = make_console()
    set_up_logging(console, verbose=verbose, quiet=quiet)
    return Messages(console, verbose, quiet)


def result_console() -> Console:
    """A console on stdout for tables that are results; 100 characters wide where nobody looks.

    Raises:
        OutputError: There is no stdout.
    """
    if sys.stdout is None:
        raise OutputError("stdout is closed: nothing can be shown there")
    is_terminal = sys.stdout.isatty()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what its encoding lacks becomes a question mark
    return Console(highlight=False, emoji=False, markup=False, width=None if is_terminal else 100)


def write_result(text: str) -> None:
    """Put a result on stdout at once; what its encoding lacks becomes a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        raise OutputError(f"stdout: {error.strerror}") from error


def discard_stdout() -> None:
    """Stdout takes nothing more (its reader has gone, its disk is full): let nothing try again, not even at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
