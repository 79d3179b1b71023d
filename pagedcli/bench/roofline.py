"""A roofline plot as SVG: what was reached, under what the machine could do. Standard library only.

operations/s (log)    _________________ products of the variant in use
/    o  prefill
/ o  64 requests
/
o  one stream      the slope is the rate of reading memory
operations per byte (log)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 880, 440, 70, 150, 40, 50
LABEL_HEIGHT = 14
INK, ROOF, POINT, GRID = "#24292f", "#57606a", "#0969da", "#d0d7de"


@dataclass(frozen=True, slots=True)
class Point:
    """One workload.

    Attributes:
        label: For people.
        flops_per_byte: Operations counted over bytes counted.
        flops_per_s: Operations counted over the time taken.
    """

    label: str
    flops_per_byte: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class _Axes:
    """Logarithmic axes in whole decades."""

    x_low: int
    x_high: int
    y_low: int
    y_high: int

    def x(self, value: float) -> float:
        share = (math.log10(value) - self.x_low) / (self.x_high - self.x_low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (math.log10(value) - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def roofline_svg(
    title: str,
    points: Sequence[Point],
    bytes_per_s: float,
    roofs: Sequence[tuple[str, float]],
    again_bytes_per_s: float,
) -> str:
    """The plot.

    Args:
        title: Above it.
        points: Workloads.
        bytes_per_s: Rate of reading memory.
        roofs: Names and rates of operations, the one in use last.
        again_bytes_per_s: Rate of reading as many bytes as the weights over and over, some of them out of a cache.
    """
    axes = _axes(points, bytes_per_s, roofs)
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, title, INK, size=14),
        *_grid(axes),
        *_roofs(axes, bytes_per_s, roofs),
        *_again(axes, again_bytes_per_s, roofs),
    ]
    circles = []  # over the labels: those of near points may meet
    label_y = -math.inf
    for point in sorted(points, key=lambda point: -point.flops_per_s):
        x, y = axes.x(point.flops_per_byte), axes.y(point.flops_per_s)
        label_y = max(y + 4, label_y + LABEL_HEIGHT)  # below the one above it
        circles.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{POINT}"/>')
        parts.append(_text(x + 9, label_y, point.label, INK))
    return "\n".join([*parts, *circles, "</svg>"]) + "\n"


def _axes(points: Sequence[Point], bytes_per_s: float, roofs: Sequence[tuple[str, float]]) -> _Axes:
    ridge = max(rate for _, rate in roofs) / bytes_per_s
    reached = [point.flops_per_s for point in points]
    return _Axes(
        x_low=math.floor(math.log10(min(point.flops_per_byte for point in points) / 1.5)),
        x_high=math.ceil(math.log10(max(ridge * 2, *(point.flops_per_byte * 3 for point in points)))),
        y_low=math.floor(math.log10(min(reached) / 1.5)),
        y_high=math.ceil(math.log10(max(rate for _, rate in roofs) * 1.3)),
    )


def _grid(axes: _Axes) -> list[str]:
    parts = []
    for decade in range(axes.x_low, axes.x_high + 1):
        x = axes.x(10.0**decade)
        parts.append(_line(x, TOP, x, HEIGHT - BOTTOM, GRID))
        parts.append(_text(x, HEIGHT - BOTTOM + 18, f"{10.0**decade:g}", INK, anchor="middle"))
    for decade in range(axes.y_low, axes.y_high + 1):
        y = axes.y(10.0**decade)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, GRID))
        parts.append(_text(LEFT - 8, y + 4, f"{10.0 ** (decade - 9):g}", INK, anchor="end"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 10, "operations per byte read", INK, anchor="middle"))
    parts.append(_text(8, TOP - 8, "GFLOP/s", INK))
    return parts


def _roofs(axes: _Axes, bytes_per_s: float, roofs: Sequence[tuple[str, float]]) -> list[str]:
    parts = []
    for index, (_, rate) in enumerate(roofs):
        used = index == len(roofs) - 1
        ridge = rate / bytes_per_s
        y, width = axes.y(rate), 2 if used else 1
        parts.append(
            _line(axes.x(max(ridge, 10.0**axes.x_low)), y, WIDTH - RIGHT, y, ROOF, width, dashed=not used)
        )
    label_y = -math.inf
    for name, rate in sorted(roofs, key=lambda roof: -roof[1]):  # beside the plot, where no point's label is
        label_y = max(axes.y(rate) + 4, label_y + LABEL_HEIGHT)
        parts.append(_text(WIDTH - RIGHT + 5, label_y, f"{name}, {rate / 1e9:,.0f}", ROOF))
    high = max(rate for _, rate in roofs) / bytes_per_s
    low = max(10.0**axes.x_low, 10.0**axes.y_low / bytes_per_s)
    start, end = (axes.x(low), axes.y(low * bytes_per_s)), (axes.x(high), axes.y(high * bytes_per_s))
    parts.append(_line(*start, *end, ROOF, 2))
    parts.append(_text(start[0] + 30, start[1] - 6, f"reading, {bytes_per_s / 1e9:.1f} GB/s", ROOF))
    return parts


def _again(axes: _Axes, bytes_per_s: float, roofs: Sequence[tuple[str, float]]) -> list[str]:
    high, low = roofs[-1][1] / bytes_per_s, max(10.0**axes.x_low, 10.0**axes.y_low / bytes_per_s)
    start, end = (axes.x(low), axes.y(low * bytes_per_s)), (axes.x(high), axes.y(high * bytes_per_s))
    x, y = (0.2 * start[0] + 0.8 * end[0], 0.2 * start[1] + 0.8 * end[1])
    label = f"the weights again, {bytes_per_s / 1e9:.1f} GB/s"
    return [_line(*start, *end, ROOF, dashed=True), _text(x - 8, y - 4, label, ROOF, anchor="end")]


def _line(
    x1: float, y1: float, x2: float, y2: float, color: str, width: int = 1, *, dashed: bool = False
) -> str:
    dashes = ' stroke-dasharray="6 4"' if dashed else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" '
        f'stroke-width="{width}"{dashes}/>'
    )


def _text(x: float, y: float, text: str, color: str, *, anchor: str = "start", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    halo = 'stroke="white" stroke-width="4" paint-order="stroke"'  # lines do not run through letters
    return f'<text {place} {halo} fill="{color}" font-size="{size}">{escape(text)}</text>'
