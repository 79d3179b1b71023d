"""Writes quantize_config.json for a quantized folder that came without settings: they are read off the tensors.

Imports `errors` and the readers. What other packages need and cannot infer is then there; nothing is ever overwritten.
"""

from __future__ import annotations

import json
from pathlib import Path

from pagedcli.checkpoint.folder import SafetensorsCheckpoint
from pagedcli.checkpoint.quant_settings import OWN_FILES
from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.errors import CheckpointError


def write_missing_settings(path: Path) -> str | None:
    """Write the file if it is missing.

    Args:
        path: Folder or file that opens.

    Returns:
        What was written and where, for the user; None if nothing was missing.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    checkpoint = open_checkpoint(path)
    if not isinstance(checkpoint, SafetensorsCheckpoint) or checkpoint.quantized_linears is None:
        return None
    settings = checkpoint.quantized_linears.settings_to_write()
    if settings is None:
        return None
    file = path / OWN_FILES[0]
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(json.dumps(settings, indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be written ({error.strerror}): put this into it: {json.dumps(settings)}"
        ) from error
    said = ", ".join(f"{key} {value}" for key, value in settings.items())
    return f"wrote {file}, which was missing: {said}"
