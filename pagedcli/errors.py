"""Every error that a user can meet. Standard library only; imports nothing of the package.

A message is one line: what is wrong, with the numbers, and the smallest change that mends it.
`exit_code` is what the command line returns for it (`docs/cli.md`): 2 for the user's mistake, 1 for ours.
"""

from __future__ import annotations

from pathlib import Path


def how_to_install(extra: str) -> str:
    """The command that adds an extra to the copy of this package that runs: installed, or a source tree.

    By name where the installed copy offers the extra (nothing is built again), else by the path of the tree.
    """
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if extra in _offered_extras() or not project.is_file():
        return f"pip install 'pagedcli[{extra}]'"
    here = Path(project.name)
    where = "." if here.is_file() and here.samefile(project) else project.parent
    return f"pip install -e '{where}[{extra}]'"


def _offered_extras() -> list[str]:
    from importlib import metadata  # 20 ms, and needed where something is missing only

    try:
        return metadata.metadata("pagedcli").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return []


class PagedError(Exception):
    """Base of all errors raised on purpose; anything else that escapes is a defect."""

    exit_code = 1


class ConfigError(PagedError):
    """A setting, flag or configuration file is wrong: names the field, the value and the remedy."""

    exit_code = 2


class CheckpointError(PagedError):
    """A model folder or file cannot be used: names the file and, where there is one, the tensor or key."""

    exit_code = 2


class MissingDependencyError(PagedError):
    """Something optional is not installed: names the package and the command that installs it."""

    exit_code = 2


class RequestError(PagedError):
    """One request is refused; others are not disturbed.

    Args:
        message: One line with numbers and remedy.
        code: Short stable word for programs, such as `prompt_too_long` or `invalid_value`.
        status: HTTP status that a server answers with (400, 413, 429, 503 ...).
        field: Name of the offending request field, if one is to blame.
        retry_after_s: When the same request may be served, for those that are refused for now (429, 503).
    """

    exit_code = 2

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_request",
        status: int = 400,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.field = field
        self.retry_after_s = retry_after_s


class EngineDead(PagedError):
    """The executor failed; the engine serves nothing more. The cause is chained."""
