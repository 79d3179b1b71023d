"""Shows a run of `paged quantize`: on a terminal a live display, else a line now and then.

May import rich, the plain values of `quant`, and this package. Rendering is a function of a `QuantizeView`, so that it
can be tested without clock and terminal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from rich.console import Group
from rich.live import Live
from rich.text import Text

from pagedcli.cli.console import Messages
from pagedcli.cli.display import bar, duration, percent
from pagedcli.quant.options import QuantizeEvent

PLAIN_SECONDS = 10.0
SHOWN_PER_SECOND = 4
_LABEL = 9
_RECENT = 5
_LEVELS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class QuantizeView:
    """One moment.

    Attributes:
        phase: What is being done, or "".
        done: Part of the phase that is done, 0 to 1; None: not known.
        what: Detail of it, such as "3 of 30 layers".
        elapsed_s: Of the phase.
        eta_s: Expected until its end, or None.
        memory_bytes: Resident, or 0 if not known.
        recent: The linears finished last, with the relative squared error of their output.
        layer_errors: Largest error of each finished layer.
        finished: Phases that have ended, with their seconds.
    """

    phase: str = ""
    done: float | None = None
    what: str = ""
    elapsed_s: float = 0.0
    eta_s: float | None = None
    memory_bytes: int = 0
    recent: tuple[tuple[str, float | None], ...] = ()
    layer_errors: tuple[float, ...] = ()
    finished: tuple[tuple[str, float], ...] = ()


def render(view: QuantizeView, width: int) -> Group:
    """The live display, `width` columns wide."""
    lines = [_line("done", f"{name}  {duration(seconds)}") for name, seconds in view.finished]
    if view.phase:
        lines.append(_phase_line(view, width))
        times = f"{duration(view.elapsed_s)} elapsed"
        eta = f"   ETA {duration(view.eta_s)}" if view.eta_s is not None else ""
        memory = f"   memory {view.memory_bytes / 2**30:.2f} GiB" if view.memory_bytes else ""
        lines.append(_line("time", times + eta + memory))
    if view.layer_errors:
        lines.append(
            _line("loss", f"{sparkline(view.layer_errors, max(10, width - 40))}  largest of each layer")
        )
    for index, (name, error) in enumerate(view.recent):
        shown = "no calibration" if error is None else f"loss {error:.5f}"
        lines.append(_line("layers" if index == 0 else "", f"{shown:<16}{short_name(name)}"))
    return Group(*lines)


def plain_line(view: QuantizeView) -> str:
    """The same in one line, for a log."""
    parts = [view.phase]
    if view.done is not None:
        parts.append(percent(view.done))
    if view.what:
        parts.append(view.what)
    if view.recent and view.recent[-1][1] is not None:
        parts.append(f"loss {view.recent[-1][1]:.5f}")
    if view.eta_s is not None:
        parts.append(f"ETA {duration(view.eta_s)}")
    if view.memory_bytes:
        parts.append(f"memory {view.memory_bytes / 2**30:.2f} GiB")
    return ", ".join(parts)


def short_name(names: str) -> str:
    """Of the parts of a fused linear, the first whole and the ends of the others."""
    first, *others = names.split(" + ")
    return " + ".join([first, *(name.rsplit(".", 1)[-1] for name in others)])


def sparkline(values: tuple[float, ...], width: int) -> str:
    """The last `width` values as bars from 0 to the largest of them."""
    shown = values[-width:]
    top = max(shown) or 1.0
    return "".join(_LEVELS[min(7, int(8 * value / top))] for value in shown)


def _line(label: str, text: str) -> Text:
    line = Text.assemble((label.ljust(_LABEL), "bold"), text)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _phase_line(view: QuantizeView, width: int) -> Text:
    line = Text.assemble(("now".ljust(_LABEL), "bold"), (view.phase, "cyan"))
    if view.done is not None:
        line.append("  ")
        line.append_text(bar(view.done, min(30, width // 4), "cyan"))
        line.append(f" {percent(view.done)}")
    if view.what:
        line.append(f"  {view.what}")
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


class QuantizeDisplay:
    """Implements `quant.request.Watcher`; a context in which the live display is up."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._view = QuantizeView()
        self._live: Live | None = None
        self._phase_started = self._shown_at = 0.0
        self._eta_base: tuple[float, float] | None = None
        self._linears = self._linears_in_layer = 0
        self._resumed = False

    def __enter__(self) -> Self:
        if self._messages.console.is_terminal and not self._messages.quiet:
            # Refreshed by rich's own thread, so that the time goes on in a phase that tells nothing.
            self._live = Live(
                console=self._messages.console,
                get_renderable=self._render,
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

    def say(self, text: str) -> None:
        """A line that stays."""
        self._messages.say(text)

    def fetched(self, name: str, done: int, total: int) -> None:
        """Progress of a download."""
        self._messages.transfer(name, done, total)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show a phase while it lasts; with -v its time at the end."""
        started = self._begin(name)
        if self._live is None:
            self._messages.say(f"{name} ...")
        yield
        seconds = time.monotonic() - started
        finished = (*self._view.finished, (name, seconds))
        self._view = QuantizeView(finished=finished)
        self._messages.detail(f"{name}: {seconds:.1f} s")

    def _begin(self, name: str) -> float:
        self._phase_started = self._shown_at = time.monotonic()
        self._eta_base = None
        self._linears = 0
        self._view = QuantizeView(phase=name, finished=self._view.finished)
        return self._phase_started

    def progress(self, done: float, total: float, what: str = "") -> None:
        """How far the phase is."""
        part = done / total if total else 0.0
        self._view = replace(self._view, done=part, what=what, eta_s=self._eta(part))
        self._show()

    def quantizing(self, event: QuantizeEvent) -> None:
        """How far the quantizer is."""
        view = self._view
        part = self._part(event)
        if event.phase == "check":
            self._view = replace(view, what="looking through the weights", memory_bytes=event.memory_bytes)
            self._show()
            return
        if event.phase == "resume":
            self._eta_base = (time.monotonic(), part)
        elif self._resumed:
            self._messages.say(f"going on with layer {event.layer + 1} of {event.num_layers}")
        self._resumed = event.phase == "resume"
        recent = view.recent
        if event.phase == "linear":
            recent = (*recent, (event.linear, event.error))[-_RECENT:]
        self._view = replace(
            view,
            done=part,
            what=f"layer {event.layer + 1} of {event.num_layers}",
            eta_s=self._eta(part),
            memory_bytes=event.memory_bytes,
            recent=recent,
            layer_errors=_with_error(view.layer_errors, event),
        )
        self._show()

    def _part(self, event: QuantizeEvent) -> float:
        """Layers that are done, and of the one under way as much as of the one before at this point."""
        if event.phase == "linear":
            self._linears += 1
            within = min(1.0, self._linears / self._linears_in_layer) if self._linears_in_layer else 0.0
            return (event.layer + within) / event.num_layers
        if event.phase == "layer":
            self._linears_in_layer, self._linears = self._linears, 0
        return (event.layer + (event.phase != "check")) / event.num_layers

    def _eta(self, part: float) -> float | None:
        """As long as the rest takes at the pace so far; what was read back counts for nothing."""
        started, before = self._eta_base or (self._phase_started, 0.0)
        if part <= before:
            return None
        return (time.monotonic() - started) * (1.0 - part) / (part - before)

    def _now(self) -> QuantizeView:
        return replace(self._view, elapsed_s=time.monotonic() - self._phase_started)

    def _render(self) -> Group:
        return render(self._now(), self._messages.console.width)

    def _show(self) -> None:
        """Without a terminal: a line now and then."""
        now = time.monotonic()
        if self._live is None and now - self._shown_at >= PLAIN_SECONDS:
            self._shown_at = now
            self._messages.say(plain_line(self._now()))


def _with_error(errors: tuple[float, ...], event: QuantizeEvent) -> tuple[float, ...]:
    """The largest error of each layer, with this event's counted."""
    if event.phase != "linear" or event.error is None:
        return errors
    if len(errors) <= event.layer:
        return (*errors, event.error)
    return (*errors[:-1], max(errors[-1], event.error))
