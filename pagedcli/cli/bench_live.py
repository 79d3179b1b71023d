"""What is shown while a benchmark runs: progress, rates, percentiles and the map of pages; lines without a terminal.

May import rich, `bench`, `engine` and this package. It looks at the engine from a thread of its own, and seldom: what
is measured must not notice.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rich.console import Group
from rich.live import Live
from rich.text import Text

from pagedcli.bench.latency import percentile
from pagedcli.bench.run import RequestRun
from pagedcli.cli.console import Messages
from pagedcli.cli.display import bar, block_codes, duration, engine_lines, heading, labelled, percent
from pagedcli.engine.outputs import EngineStats
from pagedcli.errors import EngineDead
from pagedcli.workloads.requests import WorkloadRequest

SHOW_SECONDS = 0.5
PLAIN_SECONDS = 10.0
PICTURE_SECONDS_PER_PAGE = 5e-4
"""A picture of the pool costs the engine's thread about 2 us a page: taken so seldom, at most 0.4% of the time."""


@dataclass(slots=True)
class Latencies:
    """Of the requests answered so far, in seconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)

    def add(self, request: RequestRun) -> None:
        """Count an answer."""
        self.ttft.append(request.ttft_s)
        self.itl += request.itl_s
        if request.tpot_s is not None:
            self.tpot.append(request.tpot_s)

    def text(self) -> str:
        """Median and 99th percentile of each."""
        named = (("TTFT", self.ttft), ("TPOT", self.tpot), ("ITL", self.itl))
        return "   ".join(f"{name} {spread(values)}" for name, values in named if values)


def spread(values: Sequence[float]) -> str:
    """As "p50 12 ms, p99 20 ms"."""
    ordered = sorted(values)
    return f"p50 {milliseconds(percentile(ordered, 0.5))}, p99 {milliseconds(percentile(ordered, 0.99))}"


def milliseconds(seconds: float) -> str:
    """As 1.23 s, 45 ms or 1.2 ms."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


@dataclass(frozen=True, slots=True)
class BenchView:
    """One moment of a benchmark.

    Attributes:
        title: Model, data type, device; one line.
        phase: What is being done: a round, a setting.
        total: Requests of the round; 0: none is running.
        done: Of them, answered.
        failed: Of them, failed.
        tokens_part: Part of the round's output tokens that are there, 0 to 1.
        elapsed_s: Of the round.
        eta_s: Until the end of the round, if it goes on like this; None: not known yet.
        left: Until the end of all rounds, in words; "" if it is not known.
        latencies: Of what was answered with this setting.
        stats: Of the engine.
        blocks: State of every page.
        waiting_for: Why the first waiting request waits, or "".
    """

    title: str
    phase: str
    total: int
    done: int
    failed: int
    tokens_part: float
    elapsed_s: float
    eta_s: float | None
    left: str
    latencies: str
    stats: EngineStats
    blocks: bytes
    waiting_for: str = ""


def _round_line(view: BenchView, width: int) -> Text:
    parts: list[Any] = [bar(view.tokens_part, min(30, width // 4), "cyan"), f" {percent(view.tokens_part)}"]
    parts.append(f"   {view.done:,}/{view.total:,} requests")
    if view.failed:
        parts.append((f"   {view.failed:,} failed", "red"))
    parts.append(f"   {duration(view.elapsed_s)}")
    if view.eta_s is not None:
        parts.append(f"   ETA {duration(view.eta_s)}")
    return labelled("round", *parts)


def render_bench(view: BenchView, width: int) -> Group:
    """The live display of a benchmark, `width` columns wide."""
    left = f"   {view.left}" if view.left else ""
    lines = [heading(view.title), labelled("measures", view.phase, left), _round_line(view, width)]
    latency = labelled("latency", view.latencies or "no request is answered yet")
    return Group(*lines, latency, *engine_lines(view, width))


def plain_bench_line(view: BenchView) -> str:
    """The same in one line, for a log."""
    failed = f", {view.failed} failed" if view.failed else ""
    eta = f", ETA {duration(view.eta_s)}" if view.eta_s is not None else ""
    latency = f", {view.latencies}" if view.latencies else ""
    return (
        f"{view.phase}: {view.done}/{view.total} requests{failed}, {view.stats.num_running} running, "
        f"{view.stats.generated_tokens_per_s:.0f} output tokens/s, {percent(view.stats.pool_use)} of pages in use, "
        f"prefix hits {percent(view.stats.prefix_hit_rate)}{latency}{eta}"
    )


@dataclass(slots=True)
class _Round:
    """The run under way."""

    engine: Any
    total: int
    tokens: int
    started: float
    done: int = 0
    failed: int = 0


class BenchLive:
    """A context in which benchmarks are shown; a `bench.run.Watch`.

    Args:
        title: First line.
        messages: Where it is shown, if at all.

    Attributes:
        phase: What is being done; may be set at any time.
        left: Until all is over, in words.
    """

    def __init__(self, title: str, messages: Messages) -> None:
        self.title, self.phase, self.left = title, "", ""
        self._messages = messages
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paged-bench-display", daemon=True)
        self._lock = threading.Lock()
        self._round: _Round | None = None
        self._latencies: dict[str, Latencies] = {}
        self._setting = ""
        self._live: Live | None = None
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

    def set_phase(self, phase: str, setting: str = "", left: str = "") -> None:
        """What is measured now; latencies are those of a setting."""
        with self._lock:
            self.phase, self._setting, self.left = phase, setting, left

    def started(self, engine: Any, workload: Sequence[object]) -> None:
        """A run begins."""
        tokens = sum(item.output_tokens for item in workload if isinstance(item, WorkloadRequest))
        with self._lock:
            self._round = _Round(engine, len(workload), tokens, time.monotonic())
            self._picture_due, self._blocks, self._waiting_for = 0.0, b"", ""

    def answered(self, request: RequestRun) -> None:
        """A request was served or has failed."""
        with self._lock:
            if self._round is None:
                return
            self._round.done += 1
            self._round.failed += request.error is not None
            if request.is_served:
                self._latencies.setdefault(self._setting, Latencies()).add(request)

    def ended(self) -> None:
        """The run is over; its engine is about to be closed."""
        with self._lock:
            self._round = None

    def _watch(self) -> None:
        pause = SHOW_SECONDS if self._live is not None else PLAIN_SECONDS
        while not self._stop.wait(pause):
            try:
                view = self._view()
            except EngineDead:
                continue  # the run meets it too, and says it
            if view is None:
                continue
            if self._live is None:
                self._messages.say(plain_bench_line(view))
            else:
                self._live.update(render_bench(view, self._messages.console.width), refresh=True)

    def _view(self) -> BenchView | None:
        """As of now; None while nothing runs."""
        with self._lock:
            current, phase, left = self._round, self.phase, self.left
            latencies = self._latencies.get(self._setting)
            text = "" if latencies is None else latencies.text()
        if current is None:
            return None
        now = time.monotonic()
        if self._live is not None and now >= self._picture_due:
            self._take_picture(current.engine, now)
        stats: EngineStats = current.engine.stats()
        part = min(1.0, stats.generated_tokens / current.tokens) if current.tokens else 0.0
        elapsed = now - current.started
        eta = elapsed * (1 - part) / part if part > 0.02 else None
        return BenchView(
            self.title, phase, current.total, current.done, current.failed, part, elapsed, eta, left, text, stats,
            self._blocks, self._waiting_for,
        )  # fmt: skip

    def _take_picture(self, engine: Any, now: float) -> None:
        snapshot = engine.snapshot()
        self._blocks = block_codes(block.state for block in snapshot.blocks)
        reasons = [request.blocked for request in itertools.islice(snapshot.waiting, 1)]
        self._waiting_for = str(reasons[0]) if reasons and reasons[0] is not None else ""
        self._picture_due = now + len(snapshot.blocks) * PICTURE_SECONDS_PER_PAGE
