"""Reads models as they are published: safetensors folders, GGUF files, hub ids, the default model.

Names are looked up lazily, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedcli.checkpoint.base import Checkpoint, RawTensor
    from pagedcli.checkpoint.sources import open_checkpoint, resolve_model

__all__ = ["Checkpoint", "RawTensor", "open_checkpoint", "resolve_model"]


def __getattr__(name: str) -> Any:
    if name in ("Checkpoint", "RawTensor"):
        from pagedcli.checkpoint import base

        return getattr(base, name)
    if name in ("open_checkpoint", "resolve_model"):
        from pagedcli.checkpoint import sources

        return getattr(sources, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
