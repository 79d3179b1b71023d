"""Reading a benchmark's JSON and writing its reports. Standard library, `errors` and this package."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagedcli.bench.report.build import build_document
from pagedcli.bench.report.document import Document
from pagedcli.bench.report.html import as_html
from pagedcli.bench.report.markdown import as_markdown
from pagedcli.errors import ConfigError, MissingDependencyError, PagedError, how_to_install


def read_results(path: Path) -> Any:
    """What `--json` wrote.

    Raises:
        ConfigError: There is no such file, or it is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


def check_outputs(*paths: str | None, html: str | None = None) -> None:
    """Before anything is measured: whether the reports can be written afterwards.

    Raises:
        ConfigError: A folder is missing, may not be written to, or is given for a file; two files are one.
        MissingDependencyError: `html` is asked for and matplotlib is not installed.
    """
    given = [path for path in (*paths, html) if path is not None]
    for path in given:
        _check_output(path)
        if sum(Path(other).absolute() == Path(path).absolute() for other in given) > 1:
            raise ConfigError(f"{path} is given for two files: one would replace the other, give two names")
    if html is not None:
        from importlib.util import find_spec

        if find_spec("matplotlib") is None:
            raise MissingDependencyError(
                f"an HTML report has plots, which need matplotlib: {how_to_install('bench')}"
            )


def _check_output(path: str) -> None:
    try:
        target = Path(path).absolute()
        if not path:
            raise ConfigError("the name of a report is empty: give a file")
        if target.is_dir():
            raise ConfigError(f"{path} is a folder: give the name of a file in it, such as {path}/report")
        if not target.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {Path(path).parent}")
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise ConfigError(f"{path}: may not be written: give a file in a folder of yours")
    except (OSError, ValueError) as error:  # too long a name, a null byte
        told = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path[:60]!r}: cannot be the name of a file: {told}") from None


def write_reports(
    data: Any, *, json_file: str | None = None, markdown_file: str | None = None, html_file: str | None = None
) -> Document:
    """Write what is asked for, the others also where one of them fails; the document, to show it.

    Raises:
        ConfigError: The data is no benchmark's.
        PagedError: A file cannot be written.
        MissingDependencyError: See `check_outputs`.
    """
    problems = []
    if json_file is not None:
        problems.append(_write(json_file, lambda: json.dumps(data, indent=1, allow_nan=False) + "\n"))
    document = build_document(data)
    if markdown_file is not None:
        problems.append(_write(markdown_file, lambda: as_markdown(document)))
    if html_file is not None:
        problems.append(_write(html_file, lambda: as_html(document)))
    told = [problem for problem in problems if problem]
    if told:
        raise PagedError("; ".join(told))
    return document


def _write(path: str, make: Callable[[], str]) -> str:
    """What went wrong; empty: nothing."""
    text = make()
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        return f"{path}: cannot write: {error.strerror}"
    return ""
