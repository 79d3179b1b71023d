"""`paged bench compare`: declaration of the command. Light: what it does is imported when it runs."""

from __future__ import annotations

from pagedcli.errors import ConfigError


def compare() -> None:
    """Filled in by its owner."""
    raise ConfigError("paged bench compare is being built")
