"""What `paged bench serve` shows while it runs, as values in and text out, and the task that shows it.

May import rich, `bench` and this package. On a terminal a few lines that are renewed; else a line every few seconds. It
runs on the client's event loop, so it is seldom and cheap.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Group
from rich.live import Live
from rich.text import Text

from pagedcli.bench.goodput import Targets
from pagedcli.bench.http_answer import Answer
from pagedcli.bench.http_drive import LoadState
from pagedcli.bench.latency import percentile
from pagedcli.cli.console import Messages
from pagedcli.cli.display import bar, duration, percent

LIVE_SECONDS = 0.5
PLAIN_SECONDS = 10.0
RECENT = 500
"""Answers of which percentiles are shown while it runs."""


@dataclass(frozen=True, slots=True)
class LoadView:
    """One moment.

    Attributes:
        title: Server and model; one line.
        done: Requests that are over.
        failed: Of them.
        total: Of the workload.
        in_flight: Sent and not answered.
        elapsed_s: Since the run began.
        eta_s: Until its end; None: not known yet.
        requests_per_s: Served so far.
        output_tokens_per_s: Of those, and of the answers that are coming.
        latencies: Name, p50 and p99 in seconds of the last answers.
        good: Part of the answers that met the targets; None: there are none.
        late_s: Latest that a request was sent after it was due.
        asked_per_s: Requests a second that come; None: they come as answers or a trace let them.
    """

    title: str
    done: int
    failed: int
    total: int
    in_flight: int
    elapsed_s: float
    eta_s: float | None
    requests_per_s: float
    output_tokens_per_s: float
    latencies: tuple[tuple[str, float, float], ...]
    good: float | None
    late_s: float
    asked_per_s: float | None = None


def view_of(
    state: LoadState,
    title: str,
    targets: Targets | None,
    now: float,
    last_due_s: float | None,
    asked_per_s: float | None = None,
) -> LoadView:
    """A run as it is `now`; `last_due_s` is the last arrival of an open loop, `asked_per_s` its rate."""
    answers = state.answers
    served = [answer for answer in answers if answer.is_served]
    elapsed = max(1e-9, now - state.started_s)
    return LoadView(
        title,
        len(answers),
        len(answers) - len(served),
        state.total,
        state.num_in_flight,
        elapsed,
        _eta(len(answers), state.total, elapsed, last_due_s),
        len(served) / elapsed,
        _tokens(served, state) / elapsed,
        _latencies(served[-RECENT:]),
        sum(map(targets.are_met, answers)) / len(answers) if targets is not None and answers else None,
        max((answer.late_s for answer in answers), default=0.0),
        asked_per_s,
    )


def _tokens(served: list[Answer], state: LoadState) -> int:
    coming = sum(len(answer.token_times) for answer in state.under_way.values())
    return coming + sum(answer.output_tokens for answer in served)


def _eta(done: int, total: int, elapsed_s: float, last_due_s: float | None) -> float | None:
    if not done:
        return None
    by_answers = elapsed_s * (total - done) / done
    return by_answers if last_due_s is None else max(last_due_s - elapsed_s, min(by_answers, last_due_s))


def _latencies(served: list[Answer]) -> tuple[tuple[str, float, float], ...]:
    measured = (
        ("TTFT", sorted(answer.ttft_s for answer in served)),
        ("TPOT", sorted(answer.tpot_s for answer in served if answer.tpot_s is not None)),
        ("E2E", sorted(answer.e2e_s for answer in served)),
    )
    return tuple(
        (name, percentile(values, 0.5), percentile(values, 0.99)) for name, values in measured if values
    )


def milliseconds(seconds: float) -> str:
    """As 12 ms or 1.5 ms."""
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _line(label: str, *parts: tuple[str, str] | Text | str) -> Text:
    text = Text.assemble((label.ljust(10), "bold"), *parts)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def render(view: LoadView, width: int) -> Group:
    """The live display, `width` columns wide."""
    part = view.done / view.total if view.total else 1.0
    failed = [(f"   {view.failed:,} failed", "red")] if view.failed else []
    eta = f"   ETA {duration(view.eta_s)}" if view.eta_s is not None else ""
    lines = [
        Text(view.title, "bold cyan", no_wrap=True, overflow="ellipsis"),
        _line(
            "requests",
            f"{view.done:,}/{view.total:,} ",
            bar(part, min(30, width // 4), "cyan"),
            f" {percent(part)}",
            *failed,
            f"   {view.in_flight:,} in flight   {duration(view.elapsed_s)}{eta}",
        ),
        _line(
            "rates",
            f"{view.requests_per_s:,.2f}{_asked(view)} requests/s   {view.output_tokens_per_s:,.0f} output tokens/s",
        ),
    ]
    lines += [
        _line(name, f"p50 {milliseconds(half)}   p99 {milliseconds(most)}")
        for name, half, most in view.latencies
    ]
    if view.good is not None:
        lines.append(_line("goodput", f"{percent(view.good)} of requests met the targets"))
    if view.late_s > 0.01:
        lines.append(_line("client", (f"sent up to {milliseconds(view.late_s)} late", "yellow")))
    return Group(*lines)


def _asked(view: LoadView) -> str:
    return "" if view.asked_per_s is None else f" of {view.asked_per_s:,.2f}"


def plain_line(view: LoadView) -> str:
    """The same in one line, for a log."""
    failed = f", {view.failed} failed" if view.failed else ""
    eta = f", ETA {duration(view.eta_s)}" if view.eta_s is not None else ""
    latencies = "".join(
        f", {name} p50 {milliseconds(half)} p99 {milliseconds(most)}" for name, half, most in view.latencies
    )
    good = f", {percent(view.good)} good" if view.good is not None else ""
    return (
        f"{view.done}/{view.total} requests{failed}, {view.in_flight} in flight, "
        f"{view.requests_per_s:.2f}{_asked(view)} requests/s, {view.output_tokens_per_s:.0f} output tokens/s"
        f"{latencies}{good}{eta}"
    )


class LoadDisplay:
    """Shows a run until it is cancelled.

    Args:
        messages: Where.
        title: Server and model.
        targets: For goodput.
        clock: Seconds, as the client's.
    """

    def __init__(
        self,
        messages: Messages,
        title: str,
        targets: Targets | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.title = title
        self.last_due_s: float | None = None
        self.asked_per_s: float | None = None
        self._messages = messages
        self._targets = targets
        self._clock = clock

    async def watch(self, state: LoadState) -> None:
        """Look at it now and then."""
        if self._messages.quiet:
            return
        console = self._messages.console
        if not console.is_terminal:
            while True:
                await asyncio.sleep(PLAIN_SECONDS)
                self._messages.say(plain_line(self._view(state)))
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while True:
                await asyncio.sleep(LIVE_SECONDS)
                live.update(render(self._view(state), console.width), refresh=True)

    def _view(self, state: LoadState) -> LoadView:
        return view_of(state, self.title, self._targets, self._clock(), self.last_due_s, self.asked_per_s)
