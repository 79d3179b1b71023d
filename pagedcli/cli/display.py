"""What the live display shows, as values in and rich text out: no clock, no engine, no terminal.

May import rich, `engine.outputs` and this package. Everything reads without colour: the map of pages uses four
different characters, and numbers stand beside every bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rich.console import Group
from rich.table import Table
from rich.text import Text

from pagedcli.cli.progress import Progress
from pagedcli.core.snapshot import BlockState
from pagedcli.engine.outputs import EngineStats, GapSeconds

FREE, CACHED, USED, SHARED = range(4)
_GLYPHS = ("·", "░", "█", "▓")
_NAMES = ("free", "cached", "in use", "shared")
_STYLES = ("dim", "blue", "green", "magenta")
_LABEL_WIDTH = 9
MAP_ROWS = 3


class EngineView(Protocol):
    """What every display shows of the engine.

    Attributes:
        stats: Its counters and rates.
        blocks: State of every page: FREE, CACHED, USED or SHARED.
        waiting_for: Why the first waiting request waits, or "".
    """

    @property
    def stats(self) -> EngineStats: ...  # noqa: D102
    @property
    def blocks(self) -> bytes: ...  # noqa: D102
    @property
    def waiting_for(self) -> str: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class ServedView:
    """One moment of a server.

    Attributes:
        title: Model, data type, device, pool; one line.
        address: Where it is served.
        stats: See `EngineView`.
        blocks: See `EngineView`.
        waiting_for: See `EngineView`.
    """

    title: str
    address: str
    stats: EngineStats
    blocks: bytes
    waiting_for: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """One moment of a run.

    Attributes:
        title: Model, data type, device, pool; one line.
        progress: Counts of rows.
        stats: See `EngineView`.
        blocks: See `EngineView`.
        elapsed_s: Since the first row was handed in.
        eta_s: Expected until the last row, or None.
        waiting_for: See `EngineView`.
    """

    title: str
    progress: Progress
    stats: EngineStats
    blocks: bytes
    elapsed_s: float
    eta_s: float | None
    waiting_for: str = ""


_CODES = {
    BlockState.FREE: FREE,
    BlockState.CACHED: CACHED,
    BlockState.USED: USED,
    BlockState.SHARED: SHARED,
}


def block_codes(states: Iterable[BlockState]) -> bytes:
    """States of all pages, one byte each."""
    return bytes(_CODES[state] for state in states)


def duration(seconds: float) -> str:
    """As 0:42 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def percent(part: float) -> str:
    """As 7% or 100%; 100% and 0% only where it is all or nothing."""
    rounded = round(part * 100)
    if rounded == 100 and part < 1:
        return "99%"
    if rounded == 0 and part > 0:
        return "<1%"
    return f"{rounded}%"


def bar(part: float, width: int, style: str) -> Text:
    """A bar that is `part` full."""
    full = min(width, round(part * width))
    return Text.assemble(("█" * full, style), ("─" * (width - full), "dim"))


def idle_causes(gaps: GapSeconds) -> str:
    """Shares of the causes for which the executor idled, the largest first; "" if it never did."""
    causes = {
        "scheduler": gaps.scheduler,
        "tokenizer": gaps.tokenizer,
        "no work": gaps.no_work,
        "http": gaps.http,
    }
    total = sum(causes.values())
    if total <= 0:
        return ""
    order = sorted(causes, key=lambda name: -causes[name])
    return ", ".join(f"{name} {percent(causes[name] / total)}" for name in order if causes[name] > 0)


def cell_states(blocks: bytes, cells: int) -> list[int]:
    """State of each of at most `cells` map cells, a run of pages each: the one that most of its pages have.

    A run with any page in use shows that, so that a small request in a big pool is seen.
    """
    size = pages_per_cell(len(blocks), cells)
    states = []
    for start in range(0, len(blocks), size):
        run = blocks[start : start + size]
        busy = [state for state in (SHARED, USED) if state in run]
        order = busy or (CACHED, FREE)
        states.append(max(order, key=run.count))
    return states


def pages_per_cell(num_blocks: int, cells: int) -> int:
    """Pages that one cell of the map stands for."""
    return max(1, -(-num_blocks // max(1, cells)))


def _label(text: str) -> Text:
    return Text(text.ljust(_LABEL_WIDTH), "bold")


def labelled(label: str, *parts: tuple[str, str] | Text | str) -> Text:
    """A line of the display under its label."""
    text = Text.assemble(_label(label), *parts)
    text.no_wrap = True
    text.overflow = "ellipsis"
    return text


def _rows_line(view: View, width: int) -> Text:
    progress = view.progress
    total = f"/{progress.total:,}" if progress.total is not None else ""
    parts: list[Text | tuple[str, str] | str] = [f"{progress.done:,}{total}"]
    if progress.total:
        part = progress.done / progress.total
        parts += [" ", bar(part, min(30, width // 4), "cyan"), f" {percent(part)}"]
    if progress.failed:
        parts.append((f"   {progress.failed:,} failed", "red"))
    parts.append(f"   {duration(view.elapsed_s)}")
    if view.eta_s is not None:
        parts.append(f"   ETA {duration(view.eta_s)}")
    return labelled("rows", *parts)


def _requests_line(view: EngineView) -> Text:
    stats = view.stats
    waiting = f"{stats.num_waiting:,} waiting"
    why = f" ({view.waiting_for})" if view.waiting_for and stats.num_waiting else ""
    return labelled(
        "requests", f"{stats.num_running:,} running   {waiting}{why}   {stats.num_preemptions:,} preemptions"
    )


def _tokens_line(view: EngineView) -> Text:
    stats = view.stats
    return labelled(
        "tokens/s",
        f"prompt {stats.prompt_tokens_per_s:,.0f}   generation {stats.generated_tokens_per_s:,.0f}"
        f"   prefix hits {percent(stats.prefix_hit_rate)}",
    )


def _use_line(view: EngineView, width: int) -> Text:
    stats = view.stats
    return labelled(
        "pool",
        bar(stats.pool_use, min(30, width // 4), "green"),
        f" {percent(stats.pool_use)} of pages in use   KV use {percent(stats.kv_use)}",
    )


def _executor_line(view: EngineView) -> Text:
    causes = idle_causes(view.stats.gap_seconds)
    idle = f"   of the idle time: {causes}" if causes else ""
    return labelled("executor", f"{percent(view.stats.executor_busy)} busy{idle}")


def _map_lines(view: EngineView, width: int) -> list[Text]:
    columns = max(10, width - _LABEL_WIDTH)
    states = cell_states(view.blocks, columns * MAP_ROWS)
    lines = []
    for start in range(0, len(states), columns):
        cells = [(_GLYPHS[state], _STYLES[state]) for state in states[start : start + columns]]
        lines.append(labelled("pages" if start == 0 else "", *cells))
    return lines


def _legend(view: EngineView, width: int) -> Text:
    parts: list[tuple[str, str] | str] = []
    for state in (USED, SHARED, CACHED, FREE):
        parts += [(_GLYPHS[state], _STYLES[state]), f" {_NAMES[state]} {view.blocks.count(state):,}  "]
    size = pages_per_cell(len(view.blocks), max(10, width - _LABEL_WIDTH) * MAP_ROWS)
    if size > 1:
        parts.append((f"{size:,} a cell", "dim"))
    return labelled("", *parts)


def heading(text: str) -> Text:
    """The first line of a display."""
    return Text(text, "bold cyan", no_wrap=True, overflow="ellipsis")


def engine_lines(view: EngineView, width: int) -> list[Text]:
    """What every display shows of the engine: requests, rates, why it idles, and every page."""
    return [
        _requests_line(view),
        _tokens_line(view),
        _executor_line(view),
        _use_line(view, width),
        *_map_lines(view, width),
        _legend(view, width),
    ]


def render(view: View, width: int) -> Group:
    """The live display of a run, `width` columns wide."""
    return Group(heading(view.title), _rows_line(view, width), *engine_lines(view, width))


def _served_line(view: ServedView) -> Text:
    stats = view.stats
    answered = sum(stats.requests_finished.values())
    refused = sum(stats.requests_rejected.values())
    parts: list[str | tuple[str, str]] = [f"{answered:,} answered   {stats.requests_aborted:,} aborted"]
    if refused:
        parts.append((f"   {refused:,} refused", "red"))
    return labelled("served", *parts, f"   up {duration(stats.uptime_s)}")


def render_served(view: ServedView, width: int) -> Group:
    """The live display of a server, `width` columns wide."""
    address = Text(view.address, no_wrap=True, overflow="ellipsis")
    return Group(heading(view.title), address, _served_line(view), *engine_lines(view, width))


def plain_line(view: View) -> str:
    """The same in one line, for a log."""
    progress, stats = view.progress, view.stats
    total = f"/{progress.total}" if progress.total is not None else ""
    failed = f", {progress.failed} failed" if progress.failed else ""
    eta = f", ETA {duration(view.eta_s)}" if view.eta_s is not None else ""
    return (
        f"{progress.done}{total} rows{failed}, {stats.num_running} running, {stats.num_waiting} waiting, "
        f"prompt {stats.prompt_tokens_per_s:.0f} tokens/s, generation {stats.generated_tokens_per_s:.0f} tokens/s, "
        f"{percent(stats.pool_use)} of pages in use, prefix hits {percent(stats.prefix_hit_rate)}, "
        f"{stats.num_preemptions} preemptions, executor {percent(stats.executor_busy)} busy{eta}"
    )


def two_columns(rows: Sequence[tuple[str, str]]) -> Table:
    """Names and values, for reports."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table
