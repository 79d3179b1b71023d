"""`paged bench report`: declaration of the command. Light: what it does is imported when it runs."""

from __future__ import annotations

from pagedcli.errors import ConfigError


def report() -> None:
    """Filled in by its owner."""
    raise ConfigError("paged bench report is being built")
