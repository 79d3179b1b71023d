"""What a report consists of, whatever it is shown on. Standard library only; plain frozen values.

All texts are plain text: whoever renders them escapes what means something there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: What it tells.
        unit: Of its numbers, or empty.
        is_number: Whether it is set flush right.
    """

    title: str
    unit: str = ""
    is_number: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    """Figures in rows.

    Attributes:
        columns: The first one names the rows.
        rows: Texts, as many in each as there are columns.
        note: What a reader must know to read it, or empty.
        strong: Numbers of the rows that stand out.
        num_keys: Columns, from the first, that name the rows.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    note: str = ""
    strong: frozenset[int] = frozenset()
    num_keys: int = 1

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), "a row of another length"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot; `x` and `y` are equally long."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class LinePlot:
    """Lines over one axis, each named at its end.

    Attributes:
        title: What is seen, in a few words.
        lines: Few enough to be told apart.
        x_label: With its unit.
        y_label: With its unit.
        caption: What it means; read by those who cannot see the plot, too.
        is_share: `y` is a part of a whole, shown from 0 to 100%.
        is_step: A value holds until the next.
        log_x: The x axis is logarithmic.
        is_distribution: `y` is the part of all values up to `x`: lines rise from 0 to 1.
    """

    title: str
    lines: Sequence[Line]
    x_label: str
    y_label: str
    caption: str = ""
    is_share: bool = False
    is_step: bool = False
    log_x: bool = False
    is_distribution: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar, the text at its end, and the interval of its value (None: not known)."""

    name: str
    value: float
    text: str
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class BarPlot:
    """Horizontal bars, the longest reaching the right edge; `x_label` has the unit."""

    title: str
    bars: Sequence[Bar]
    x_label: str
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Surface:
    """A value over two settings, each cell with its number.

    Attributes:
        title: What is seen.
        x_label: Of the columns.
        y_label: Of the rows.
        x_values: Names of the columns.
        y_values: Names of the rows, the lowest first.
        values: By row and column; None where nothing was measured.
        unit: Of the values.
        caption: What it means.
        more_is_better: Which of the values stand out: the largest, or the smallest.
    """

    title: str
    x_label: str
    y_label: str
    x_values: Sequence[str]
    y_values: Sequence[str]
    values: Sequence[Sequence[float | None]]
    unit: str
    caption: str = ""
    more_is_better: bool = True


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a scatter plot."""

    name: str
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class ParetoPlot:
    """Latency (x, less is better) against throughput (y, more is better); those on the front are joined and named."""

    title: str
    points: Sequence[Point]
    x_label: str
    y_label: str
    caption: str = ""


Plot = LinePlot | BarPlot | Surface | ParetoPlot


@dataclass(frozen=True, slots=True)
class ClaimText:
    """A claim, how it was tested, what was measured, and the verdict.

    Attributes:
        text: The claim.
        test: How it was tested, with the thresholds.
        measured: The figures, or why there are none.
        verdict: confirmed, refuted, no difference shown, or not measured.
    """

    text: str
    test: str
    measured: str
    verdict: str


@dataclass(frozen=True, slots=True)
class Claims:
    """Claims in their order."""

    items: Sequence[ClaimText]


Block = str | Table | Plot | Claims
"""A string is a paragraph."""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Document:
    """A whole report.

    Attributes:
        title: One line.
        head: Names and texts: machine, date, version, settings, other load.
        sections: In their order.
    """

    title: str
    head: Sequence[tuple[str, str]]
    sections: Sequence[Section]


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats, by latency ascending: none has both less `x` and at least as much `y`."""
    front: list[Point] = []
    for point in sorted(points, key=lambda item: (item.x, -item.y)):
        if not front or point.y > front[-1].y:
            front.append(point)
    return front
