"""Flags that the benchmark's commands share: where figures go, what is run, how often.

Must stay light (`--help`): imports typer only.
"""

from __future__ import annotations

from typing import Annotated

import typer

MEASURING, REPORTS = "Measuring", "Reports"


def option(*names: str, text: str, panel: str, metavar: str | None = None, default: bool = False) -> object:
    """An option of a benchmark in its group; `default`: whether help shows what it is without."""
    return typer.Option(*names, help=text, metavar=metavar, rich_help_panel=panel, show_default=default)


JsonFile = Annotated[
    str | None, option("--json", text="Write all figures to this file", panel=REPORTS, metavar="FILE")
]
MarkdownFile = Annotated[
    str | None, option("--markdown", text="Write the tables as Markdown", panel=REPORTS, metavar="FILE")
]
HtmlFile = Annotated[
    str | None, option("--html", text="Write one page with plots", panel=REPORTS, metavar="FILE")
]
Workload = Annotated[
    str | None,
    option(
        "--workload",
        text="mixed, fixed:512:128, random:32-256:16-256, shared-prefix:512, chats or a file [mixed]",
        panel=MEASURING,
        metavar="WORKLOAD",
    ),
]
Requests = Annotated[
    int | None, option("--requests", text="Requests of the workload", panel=MEASURING, metavar="N")
]
Repeats = Annotated[
    int | None, option("--repeats", text="Rounds [until tight, 3 at least]", panel=MEASURING, metavar="N")
]
Seconds = Annotated[
    float | None,
    option("--seconds", text="Begin no round later [60 for each setting]", panel=MEASURING, metavar="S"),
]
Seed = Annotated[int | None, option("--seed", text="Of the workload [0]", panel=MEASURING, metavar="N")]
