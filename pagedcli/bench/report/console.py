"""A report on the console: rich tables that are never cut off, however narrow the window is.

May import rich. A table of few rows and many columns is turned round; what is still too wide becomes several tables
that begin with the same column. Plots are left to the HTML file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from pagedcli.bench.report.document import Block, Claims, Column, Document, Section, Table

_STYLES = {"confirmed": "green", "refuted": "red", "no difference shown": "yellow"}
LONGEST_WORDS = 14
"""Characters of a heading's line, where its words allow it."""


def print_document(document: Document, console: Console, *, with_head: bool = True) -> None:
    """The whole report."""
    if with_head:
        console.print(Text(document.title, style="bold"))
        for name, text in document.head:
            console.print(Text.assemble((f"{name}: ", "bold"), text))
    for section in document.sections:
        parts = list(_section(section, console.width))
        if parts:
            console.print()
            console.print(Text(section.title, style="bold"))
        for part in parts:
            console.print(part)


def _section(section: Section, width: int) -> Iterator[RenderableType]:
    for block in section.blocks:
        yield from _block(block, width)


def _block(block: Block, width: int) -> Iterator[RenderableType]:
    if isinstance(block, str):
        yield Text(block)
    elif isinstance(block, Table):
        yield from _tables(block, width)
        if block.note:
            yield Text(block.note, style="dim")
    elif isinstance(block, Claims):
        yield _claims(block)


def _tables(table: Table, width: int) -> Iterator[RenderableType]:
    """The table as it is, or turned round, in as many pieces as the width asks for."""
    headings = [_wrapped(column) for column in table.columns]
    columns = [[row[index] for row in table.rows] for index in range(len(table.columns))]
    numbers = [column.is_number for column in table.columns]
    if sum(_widths(headings, columns)) > width and len(table.rows) < len(table.columns):
        names = [_flat(column) for column in table.columns[1:]]
        headings = [table.columns[0].title, *(_broken(row[0]) for row in table.rows)]
        columns = [names, *(list(row[1:]) for row in table.rows)]
        numbers = [False, *([True] * len(table.rows))]
        yield from _pieces(headings, columns, numbers, frozenset(), width, 1)
        return
    yield from _pieces(headings, columns, numbers, table.strong, width, table.num_keys)


def _pieces(
    headings: Sequence[str],
    columns: Sequence[Sequence[str]],
    numbers: Sequence[bool],
    strong: frozenset[int],
    width: int,
    num_keys: int,
) -> Iterator[RichTable]:
    """Tables no wider than `width`, each beginning with the columns that name its rows."""
    widths = _widths(headings, columns)
    at = num_keys
    while True:
        taken, used = list(range(num_keys)), sum(widths[:num_keys])
        while at < len(headings) and (len(taken) == num_keys or used + widths[at] <= width):
            taken.append(at)
            used += widths[at]
            at += 1
        yield _rich(
            [headings[i] for i in taken], [columns[i] for i in taken], [numbers[i] for i in taken], strong
        )
        if at >= len(headings):
            return


def _rich(
    headings: Sequence[str], columns: Sequence[Sequence[str]], numbers: Sequence[bool], strong: frozenset[int]
) -> RichTable:
    shown = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading, is_number in zip(headings, numbers, strict=True):
        shown.add_column(Text(heading), justify="right" if is_number else "left", no_wrap=is_number)
    for index, row in enumerate(zip(*columns, strict=True)):
        shown.add_row(*map(Text, row), style="bold" if index in strong else "")
    return shown


def _widths(headings: Sequence[str], columns: Sequence[Sequence[str]]) -> list[int]:
    """Of each column, with the two spaces after it."""
    return [
        2 + max(map(len, (*heading.split("\n"), *cells)))
        for heading, cells in zip(headings, columns, strict=True)
    ]


def _wrapped(column: Column) -> str:
    title = "\n".join(_lines(column.title)) if column.is_number else column.title
    return f"{title}\n{column.unit}" if column.unit else title


def _broken(name: str) -> str:
    """A name above a narrow column of figures: a word a line."""
    return name.replace(", ", " ").replace("+ ", "+\N{NO-BREAK SPACE}").replace(" ", "\n")


def _lines(title: str) -> Iterator[str]:
    line = ""
    for word in title.split():
        if line and len(line) + 1 + len(word) > LONGEST_WORDS:
            yield line
            line = word
        else:
            line = f"{line} {word}".strip()
    yield line


def _flat(column: Column) -> str:
    return f"{column.title}, {column.unit}" if column.unit else column.title


def _claims(claims: Claims) -> RichTable:
    shown = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    shown.add_column("claim", ratio=3)
    shown.add_column("measured", ratio=3)
    shown.add_column("verdict", ratio=1, min_width=9)
    for item in claims.items:
        verdict = Text(item.verdict, style=_STYLES.get(item.verdict, "dim"))
        shown.add_row(Group(Text(item.text), Text(item.test, style="dim")), Text(item.measured), verdict)
        shown.add_row()
    return shown
