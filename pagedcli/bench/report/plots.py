"""Plots as SVG text, drawn by matplotlib. May import matplotlib (extra `bench`); imported only for an HTML report.

For print and for the colour-blind: the palette of Okabe and Ito, and beside the colour a line style, a marker and the
name at the line itself. The same plot gives the same bytes. No text is read as mathematics, so a `$` is a `$`.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator, PercentFormatter

from pagedcli.bench.report.document import (
    BarPlot,
    Line,
    LinePlot,
    ParetoPlot,
    Plot,
    Point,
    Surface,
    pareto_front,
)
from pagedcli.bench.report.numbers import number

INK, MUTED, GRID = "#1a1a1a", "#555555", "#dddddd"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)), (0, (1, 2.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH, HEIGHT = 5.4, 3.3  # inches; pages scale it to their own width
LABEL_GAP = 0.08  # of the height of the axes, between the names at two lines' ends
MAX_TICKS = 8  # of settings, each of which then has one on a logarithmic axis
MAX_NAMED_BEATEN = 6
MAX_POINTS = 600  # of a line: what is more cannot be seen, and makes the page slow
_STYLE: dict[Any, Any] = {
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "sans-serif",
    "font.size": 10,
    "svg.fonttype": "none",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


def svg(plot: Plot, name: str) -> str:
    """The plot as an `<svg>` element that can stand in a page beside others.

    Args:
        plot: What is drawn.
        name: Begins every id in it; of letters, digits and dashes.
    """
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH, _height(plot)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        _draw(plot)(axes)
        text = io.StringIO()
        figure.savefig(
            text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    return _embeddable(text.getvalue(), name, plot.title)


def _height(plot: Plot) -> float:
    if isinstance(plot, BarPlot):
        return 0.9 + 0.3 * len(plot.bars)
    if isinstance(plot, Surface):
        return 1.1 + 0.42 * len(plot.y_values)
    return HEIGHT


def _draw(plot: Plot) -> Callable[[Axes], None]:
    if isinstance(plot, LinePlot):
        return lambda axes: _lines(axes, plot)
    if isinstance(plot, BarPlot):
        return lambda axes: _bars(axes, plot)
    if isinstance(plot, Surface):
        return lambda axes: _surface(axes, plot)
    return lambda axes: _pareto(axes, plot)


def _embeddable(text: str, name: str, title: str) -> str:
    """The element alone, with ids of its own and a size that follows the page."""
    from html import escape

    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    head = re.sub(r' (width|height)="[^"]*"', "", text[: text.index(">")])
    return f'{head} role="img" aria-label="{escape(title)}"' + text[text.index(">") :]


def _lines(axes: Axes, plot: LinePlot) -> None:
    lines = [_thinned(line) for line in plot.lines if line.x]
    for index, line in enumerate(lines):
        style = "steps-post" if plot.is_step else "default"
        is_sparse = len(line.x) <= 16
        axes.plot(
            line.x, line.y, color=COLOURS[index % len(COLOURS)], linestyle=DASHES[index % len(DASHES)],
            linewidth=1.8, drawstyle=style, marker=MARKERS[index % len(MARKERS)], markersize=5,
            markevery=1 if is_sparse else (index * 7 % 50, max(1, len(line.x) // 6)),
        )  # fmt: skip
    if plot.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, 1)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        values = sorted({value for line in lines for value in line.x})
        if len(values) <= MAX_TICKS and not plot.is_distribution:
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xticks(values, [number(value, 1) for value in values])
    _share_axis(axes, plot.is_share)
    _finish(axes, plot.x_label, plot.y_label)
    if not plot.log_x:
        axes.set_xlim(left=0)
    if len(lines) > 1 and plot.is_distribution:
        _name_inside(axes, lines)
    elif len(lines) > 1:
        _name_ends(axes, lines)


def _thinned(line: Line) -> Line:
    step = max(1, math.ceil(len(line.x) / MAX_POINTS))
    if step == 1:
        return line
    return Line(line.name, [*line.x[:-1:step], line.x[-1]], [*line.y[:-1:step], line.y[-1]])


def _share_axis(axes: Axes, is_share: bool) -> None:
    if is_share:
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    else:
        axes.set_ylim(bottom=0, top=axes.dataLim.y1 * 1.08 if axes.dataLim.y1 > 0 else None)


def _finish(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(True, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def _name_ends(axes: Axes, lines: Sequence[Line]) -> None:
    """Each line's name to the right of the axes, joined to the line's end, no two on top of each other."""
    low, high = axes.get_ylim()
    ends = sorted(range(len(lines)), key=lambda index: (lines[index].y[-1], -index))
    heights = spread([(lines[index].y[-1] - low) / (high - low) for index in ends], LABEL_GAP)
    for index, height in zip(ends, heights, strict=True):
        line = lines[index]
        axes.annotate(
            line.name, xy=(line.x[-1], line.y[-1]), xytext=(1.04, height), textcoords="axes fraction",
            va="center", ha="left", fontsize=9,
            arrowprops={"arrowstyle": "-", "color": COLOURS[index % len(COLOURS)], "linewidth": 0.9, "linestyle": ":"},
        )  # fmt: skip


def _name_inside(axes: Axes, lines: Sequence[Line]) -> None:
    """Names beside rising lines that all end at the same height: each at a height of its own, to the line's right."""
    order = sorted(range(len(lines)), key=lambda index: lines[index].x[len(lines[index].x) // 2])
    for place, index in enumerate(reversed(order)):
        line, height = lines[index], 0.1 + 0.75 * place / max(1, len(lines) - 1)
        at = next((i for i, value in enumerate(line.y) if value >= height), len(line.y) - 1)
        axes.annotate(
            line.name, xy=(line.x[at], line.y[at]), xytext=(9, 0), textcoords="offset points", va="center",
            fontsize=9, bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
            arrowprops={"arrowstyle": "-", "color": COLOURS[index % len(COLOURS)], "linewidth": 1.2},
        )  # fmt: skip


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending `heights` moved apart by at least `gap`, and down again where the highest would leave 0 to 1."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    top = 1.0
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], top)
        top = placed[index] - gap
    return placed


def _bars(axes: Axes, plot: BarPlot) -> None:
    for place, bar in enumerate(plot.bars):
        value = bar.value if math.isfinite(bar.value) else 0.0
        axes.barh(place, value, height=0.66, color=COLOURS[0], edgecolor=INK, linewidth=0.5)
        end = value
        if bar.interval is not None:
            low, high = bar.interval
            axes.errorbar(
                [value], [place], xerr=[[max(0.0, value - low)], [max(0.0, high - value)]], color=INK,
                capsize=3, linewidth=1.2,
            )  # fmt: skip
            end = max(end, high)
        axes.annotate(
            bar.text, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(range(len(plot.bars)), [bar.name for bar in plot.bars])
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlim(left=0)
    _finish(axes, plot.x_label, "")
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)


def _surface(axes: Axes, plot: Surface) -> None:
    rows = [[math.nan if value is None else value for value in row] for row in plot.values]
    known = [value for row in rows for value in row if math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    best = high if plot.more_is_better else low
    top = high if high > low else low + 1
    axes.pcolormesh(rows, cmap="cividis", vmin=low, vmax=top, edgecolors="white", linewidth=1.5)
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            is_dark = math.isfinite(value) and (value - low) < 0.55 * (high - low)
            weight = "bold" if value == best else "normal"
            colour = "white" if is_dark else INK
            axes.text(x + 0.5, y + 0.5, number(value), ha="center", va="center", color=colour, weight=weight)
    axes.set_xticks([x + 0.5 for x in range(len(plot.x_values))], plot.x_values)
    axes.set_yticks([y + 0.5 for y in range(len(plot.y_values))], plot.y_values)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _pareto(axes: Axes, plot: ParetoPlot) -> None:
    front = pareto_front(plot.points)
    beaten = [point for point in plot.points if point not in front]
    axes.plot(
        [p.x for p in front], [p.y for p in front], color=COLOURS[0], linewidth=1.8, marker="o", markersize=6
    )
    axes.scatter(
        [p.x for p in beaten], [p.y for p in beaten], color="white", edgecolor=COLOURS[1], marker="s", s=30
    )
    axes.margins(x=0.14, y=0.12)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _finish(axes, plot.x_label, plot.y_label)
    _name_points(axes, front, INK)
    if len(beaten) <= MAX_NAMED_BEATEN:
        _name_points(axes, beaten, MUTED)


def _name_points(axes: Axes, points: Sequence[Point], colour: str) -> None:
    """Names to the lower right, where a rising front is not; one that would lie on another is left out."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    taken: list[tuple[float, float]] = []
    for point in reversed(points):
        x, y = (point.x - left) / (right - left), (point.y - low) / (high - low)
        width = 0.018 * len(point.name) + 0.02
        if any(abs(y - other_y) < 0.055 and abs(x - other_x) < width for other_x, other_y in taken):
            continue
        taken.append((x, y))
        axes.annotate(
            point.name, (point.x, point.y), xytext=(6, -4), textcoords="offset points", va="top", fontsize=8.5,
            color=colour,
        )  # fmt: skip
