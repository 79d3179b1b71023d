"""The end of every benchmark: its tables on stdout, then the files that were asked for. May import all below `cli`."""

from __future__ import annotations

from typing import Any, Protocol

from pagedcli.bench.report.build import build_document
from pagedcli.bench.report.console import print_document
from pagedcli.bench.report.files import write_reports
from pagedcli.cli.console import result_console


class Wanted(Protocol):
    """What flags say of reports."""

    @property
    def json_file(self) -> str | None:
        """`--json`."""

    @property
    def markdown_file(self) -> str | None:
        """`--markdown`."""

    @property
    def html_file(self) -> str | None:
        """`--html`."""

    @property
    def quiet(self) -> bool:
        """`--quiet`."""


def show_and_write(data: Any, wanted: Wanted) -> None:
    """Both, whichever fails: neither a full disk nor a closed stdout may cost what was measured.

    Raises:
        PagedError: A file cannot be written.
    """
    try:
        if not wanted.quiet:
            print_document(build_document(data), result_console())
    finally:
        write_reports(
            data, json_file=wanted.json_file, markdown_file=wanted.markdown_file, html_file=wanted.html_file
        )
