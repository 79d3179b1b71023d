"""The two ways to the engine that commands use; imports `api` and `checkpoint` only when they are called.

Tests put a scripted engine here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pagedcli.cli.console import Messages
from pagedcli.config import EngineConfig

if TYPE_CHECKING:
    from pagedcli.api.build import Engine
    from pagedcli.engine.admission import QueueLimits


def find_model(config: EngineConfig, messages: Messages) -> Path:
    """Folder or file of the model, fetched if it has to be."""
    from pagedcli.checkpoint.sources import resolve_model

    return resolve_model(config.model.model, progress=messages.transfer)


def open_engine(config: EngineConfig, messages: Messages, limits: QueueLimits | None = None) -> Engine:
    """Load the model and start the engine; `limits`: what may wait to run."""
    with messages.phase("engine ready"), messages.waiting("loading the model"):
        from pagedcli.api.build import build_engine  # seconds, on a cold machine

        engine = build_engine(config, progress=messages.transfer, limits=limits)
    for name, seconds in engine.phases:
        messages.detail(f"  {name}: {seconds:.2f} s")
    for note in engine.resolved.notes:
        messages.say(note)
    return engine


def engine_title(engine: Engine) -> str:
    """What runs where, in a line."""
    resolved = engine.resolved
    threads = f", {resolved.threads} threads" if resolved.device == "cpu" else ""
    codes = f" · {resolved.quantization}, {resolved.activation} activations" if resolved.quantization else ""
    return (
        f"{resolved.model} · {resolved.dtype}{codes} · {resolved.device}{threads} · "
        f"{resolved.num_pages:,} pages of {resolved.page_size}"
    )
