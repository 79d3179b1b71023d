"""Kinds of model files that are recognised and refused, each by name and with the way out.

Imports `errors` only.
"""

from __future__ import annotations

from pathlib import Path

from pagedcli.checkpoint.base import read_json_object
from pagedcli.errors import CheckpointError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def is_pickle(path: Path) -> bool:
    """Whether the file's name says pickled weights (training_args.bin and the like are no weights)."""
    return path.suffix in PICKLE_SUFFIXES and not path.stem.startswith(
        ("training_args", "optimizer", "scheduler")
    )


def refuse_pickle(path: Path) -> None:
    """Refuses pickled weights, which run code when they are read."""
    folder = path if path.is_dir() else path.parent
    name = folder.resolve().name
    raise CheckpointError(
        f"{path}: pickled weights are not read, since loading them can run code: convert them once with "
        'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
        f"M.from_pretrained('{folder}').save_pretrained('{name}-safetensors'); "
        f"T.from_pretrained('{folder}').save_pretrained('{name}-safetensors')\""
    )


def refuse_without_weights(folder: Path) -> None:
    """Says what a folder without safetensors holds instead, where that is known."""
    pickles = sorted(path for path in folder.iterdir() if path.is_file() and is_pickle(path))
    if pickles:
        refuse_pickle(pickles[0])
    others = sorted(folder.glob("*.h5")) + sorted(folder.glob("*.msgpack")) + sorted(folder.glob("*.onnx"))
    if others:
        raise CheckpointError(
            f"{others[0]}: weights of this kind are not read: use the model's safetensors or GGUF files"
        )


def refuse_adapter(folder: Path) -> None:
    """Refuses a LoRA or other PEFT adapter, which is not a model by itself."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return
    base = read_json_object(file).get("base_model_name_or_path")
    raise CheckpointError(
        f"{folder}: is an adapter (adapter_config.json) for {base or 'a base model'}, and adapters are not supported: "
        "merge it into its base with peft's merge_and_unload() and save_pretrained(), then use that folder"
    )
