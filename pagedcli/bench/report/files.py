"""Reading a benchmark's JSON and writing its reports. Standard library, `errors` and this package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagedcli.bench.report.build import build_document
from pagedcli.bench.report.document import Document
from pagedcli.bench.report.html import as_html
from pagedcli.bench.report.markdown import as_markdown
from pagedcli.errors import ConfigError, MissingDependencyError, how_to_install


def read_results(path: Path) -> Any:
    """What `--json` wrote.

    Raises:
        ConfigError: There is no such file, or it is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


def check_outputs(*paths: str | None, html: str | None = None) -> None:
    """Before anything is measured: whether the reports can be written afterwards.

    Raises:
        ConfigError: A folder is missing.
        MissingDependencyError: `html` is asked for and matplotlib is not installed.
    """
    for path in (*paths, html):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {Path(path).parent}")
    if html is not None:
        from importlib.util import find_spec

        if find_spec("matplotlib") is None:
            raise MissingDependencyError(
                f"an HTML report has plots, which need matplotlib: {how_to_install('bench')}"
            )


def write_reports(
    data: Any, *, json_file: str | None = None, markdown_file: str | None = None, html_file: str | None = None
) -> Document:
    """Write what is asked for; the document, to show it.

    Raises:
        ConfigError: The data is no benchmark's, or a file cannot be written.
        MissingDependencyError: See `check_outputs`.
    """
    if json_file is not None:
        _write(json_file, lambda: json.dumps(data, indent=1, allow_nan=False) + "\n")
    document = build_document(data)
    if markdown_file is not None:
        _write(markdown_file, lambda: as_markdown(document))
    if html_file is not None:
        _write(html_file, lambda: as_html(document))
    return document


def _write(path: str, make: Callable[[], str]) -> None:
    text = make()
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot write: {error.strerror}") from None
