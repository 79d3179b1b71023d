"""`paged bench tune`: declaration of the command. Light: what it does is imported when it runs."""

from __future__ import annotations

from pagedcli.errors import ConfigError


def tune() -> None:
    """Filled in by its owner."""
    raise ConfigError("paged bench tune is being built")
