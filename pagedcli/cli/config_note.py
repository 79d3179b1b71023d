"""Says on stderr that settings come from this folder's file, and where they do not fit what they were measured for.

May import `config_file`, `runtime.threads` and this package.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pagedcli.cli.console import Messages
from pagedcli.config import EngineConfig
from pagedcli.config_file import FOLDER_FILE, Settings
from pagedcli.runtime.threads import compute_threads

DEFAULT_MODEL = "SmolLM2-135M-Instruct"


def model_name(config: EngineConfig) -> str:
    """The model without its folder, as `[tuned]` tells it."""
    return DEFAULT_MODEL if config.model.model is None else Path(config.model.model).name


def machine_facts(config: EngineConfig) -> dict[str, Any]:
    """What tuned settings depend on, as `[tuned]` tells it."""
    return {
        "model": model_name(config),
        "dtype": config.model.dtype,
        "device": config.device.device,
        "cores": compute_threads(),
        "machine": platform.machine(),
    }


def say_config(settings: Settings, messages: Messages) -> None:
    """A line if the folder's file was read, and one for each thing that it was not tuned for."""
    if settings.folder_file is not None:
        messages.say(f"settings from {FOLDER_FILE} in this folder (--no-config leaves it unread)")
    for warning in misfits(settings.tuned, machine_facts(settings.engine)):
        messages.say(warning)


def misfits(tuned: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """What is other than it was where the settings were measured."""
    for name, value in here.items():
        if name in tuned and tuned[name] != value:
            yield (
                f"warning: the settings were tuned for {name} {tuned[name]}, and this is {value}: "
                "paged bench tune measures anew"
            )
