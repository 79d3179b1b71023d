"""What other packages write, made into what every reader understands. Standard library and `errors`.

Names of files, keys that newer readers refuse, keys that are missing, paths of this machine, and settings of generation
that the packages change without being asked.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pagedcli.quant.backends.process import BackendError

# Written by the packages and wrong elsewhere, or private to this machine.
_DROPPED = ("is_marlin_format", "model_name_or_path", "model_file_base_name")
_WEIGHTS = "model.safetensors"
_SETTINGS = ("quantize_config.json", "quant_config.json")


def clean_output(made: Path, source: Path, folder: Path) -> None:
    """Move a package's output into the output folder, with everything else as the source has it.

    Args:
        made: What the package wrote.
        source: The folder that it was given.
        folder: To write.

    Raises:
        BackendError: There are no weights in it.
    """
    settings = _settings(made)
    _move_weights(made, folder)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = settings
    config["torch_dtype"] = "float16"
    _write(folder / "config.json", config)
    _write(folder / "quantize_config.json", settings)
    for file in source.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".gguf") and not _is_ours(file):
            shutil.copyfile(file, folder / file.name)


def _is_ours(file: Path) -> bool:
    return file.name == "config.json" or file.name in _SETTINGS or file.name.endswith(".index.json")


def _settings(made: Path) -> dict[str, Any]:
    """Quantization settings as current readers want them."""
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = dict(config.get("quantization_config") or {})
    for name in _SETTINGS:
        if not found and (made / name).is_file():
            found = json.loads((made / name).read_text(encoding="utf-8"))
    found = {key: value for key, value in found.items() if key not in _DROPPED}
    if found.get("quant_method") == "gptq":
        found.setdefault("checkpoint_format", "gptq")
        found["lm_head"] = False
    elif found.get("quant_method") == "awq":
        found.setdefault("checkpoint_format", "gemm")
        if found.get("modules_to_not_convert") is None:
            found.pop("modules_to_not_convert", None)
    return found


def _move_weights(made: Path, folder: Path) -> None:
    files = sorted(made.glob("*.safetensors"))
    if not files:
        raise BackendError(f"{made}: the package wrote no weights there")
    if len(files) == 1:
        files[0].replace(folder / _WEIGHTS)
        return
    for file in (*files, *made.glob("*.safetensors.index.json")):
        file.replace(folder / file.name)


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
