"""A report as Markdown: headings, tables and claims; plots are named by their captions, since Markdown has none.

Standard library only. Texts are escaped, so that a model's name cannot make markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pagedcli.bench.report.document import Block, Claims, Column, Document, Table

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~&$])")


def as_markdown(document: Document) -> str:
    """The whole report."""
    lines = [f"# {escape(document.title)}", ""]
    lines += [f"- **{escape(name)}**: {escape(text)}" for name, text in document.head]
    for section in document.sections:
        lines += ["", f"## {escape(section.title)}"]
        for block in section.blocks:
            lines += list(_block(block))
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """One line of plain text."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, str):
        yield from ("", escape(block))
    elif isinstance(block, Table):
        yield from ("", *_table(block))
    elif isinstance(block, Claims):
        yield from ("", "| claim | measured | verdict |", "|---|---|---|")
        for item in block.items:
            claim = f"{escape(item.text)} *Test: {escape(item.test)}*"
            yield f"| {claim} | {escape(item.measured)} | **{escape(item.verdict)}** |"
    elif block.caption:
        yield from ("", f"*{escape(block.title)} (in the HTML report)*: {escape(block.caption)}")


def _table(table: Table) -> Iterator[str]:
    yield "| " + " | ".join(_title(column) for column in table.columns) + " |"
    yield "|" + "|".join("---:" if column.is_number else "---" for column in table.columns) + "|"
    for index, row in enumerate(table.rows):
        cells = [f"**{escape(cell)}**" if index in table.strong else escape(cell) for cell in row]
        yield "| " + " | ".join(cells) + " |"
    if table.note:
        yield from ("", f"*{escape(table.note)}*")


def _title(column: Column) -> str:
    return escape(f"{column.title}, {column.unit}" if column.unit else column.title)
