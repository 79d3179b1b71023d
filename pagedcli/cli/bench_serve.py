"""`paged bench serve`: declaration of the command. Light: what it does is imported when it runs."""

from __future__ import annotations

from pagedcli.errors import ConfigError


def serve_load() -> None:
    """Filled in by its owner."""
    raise ConfigError("paged bench serve is being built")
