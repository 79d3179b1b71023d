"""What `paged bench report` does: read, show, write. May import everything below `cli`."""

from __future__ import annotations

from pathlib import Path

from pagedcli.bench.report.console import print_document
from pagedcli.bench.report.files import check_outputs, read_results, write_reports
from pagedcli.cli.console import result_console
from pagedcli.errors import ConfigError


def run_report(file: str, *, markdown_file: str | None, html_file: str | None, quiet: bool) -> int:
    """Run the command; its exit code.

    Raises:
        ConfigError: FILE is no benchmark's, or a report may not be written.
        MissingDependencyError: `--html` without matplotlib.
    """
    check_outputs(markdown_file, html=html_file)
    if any(
        path is not None and Path(path).absolute() == Path(file).absolute()
        for path in (markdown_file, html_file)
    ):
        raise ConfigError(f"{file} is what is read: give the report another name")
    data = read_results(Path(file))
    try:
        document = write_reports(data, markdown_file=markdown_file, html_file=html_file)
        if not quiet:
            print_document(document, result_console())
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:  # somebody has changed it
        raise ConfigError(
            f"{file}: not as paged bench writes it ({type(error).__name__}: {error}): measure again"
        ) from error
    return 0
