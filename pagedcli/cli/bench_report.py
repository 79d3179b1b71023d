"""`paged bench report`: declaration of the command. Light: what it does is imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from pagedcli.cli.bench_options import HtmlFile, MarkdownFile
from pagedcli.cli.options import Quiet


def report(
    *,
    file: Annotated[str, typer.Argument(metavar="FILE", help="What --json wrote", show_default=False)],
    markdown_file: MarkdownFile = None,
    html_file: HtmlFile = None,
    quiet: Quiet = False,
) -> None:
    """Make the reports of FILE again, which a benchmark wrote with --json: tables here, Markdown, a page with plots."""
    from pagedcli.cli.bench_report_run import run_report

    raise typer.Exit(run_report(file, markdown_file=markdown_file, html_file=html_file, quiet=quiet))
