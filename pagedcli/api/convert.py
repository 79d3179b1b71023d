"""The one place that uses transformers: a tokenizer without `tokenizer.json` is converted, once, into the cache.

May import `checkpoint`, `text` and `errors`; transformers only inside the function, and only for such a model.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from pagedcli.checkpoint.base import Checkpoint
from pagedcli.checkpoint.sources import cache_folder
from pagedcli.errors import CheckpointError, MissingDependencyError, how_to_install
from pagedcli.text.tokenizer import Tokenizer

TOKENIZER_FILES = (
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
)
"""What a tokenizer is made from: a change of any of them makes the cached conversion stale."""


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint, converted first where its folder has only the slow form.

    Raises:
        MissingDependencyError: It must be converted and transformers is not installed.
        CheckpointError: It cannot be read or converted.
    """
    folder = checkpoint.path
    if checkpoint.format != "safetensors" or (folder / "tokenizer.json").is_file():
        return checkpoint.load_tokenizer()
    if not any((folder / name).is_file() for name in TOKENIZER_FILES[:5]):
        return checkpoint.load_tokenizer()  # says what is missing
    target = cache_folder() / "tokenizers" / _digest(folder)
    if not (target / "tokenizer.json").is_file():
        _convert(folder, target)
    return Tokenizer.from_folder(target)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        file = folder / name
        if file.is_file():
            digest.update(f"{name} {file.stat().st_size}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:24]


def _convert(source: Path, target: Path) -> None:
    """Write into a folder of its own and move that in place, so that a crash leaves nothing half written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="new-") as name:
        new = Path(name) / "tokenizer"
        _save_fast(source, new)
        for file in ("config.json", "generation_config.json"):
            if (source / file).is_file():
                shutil.copyfile(source / file, new / file)
        try:
            new.replace(target)
        except OSError:
            if not (target / "tokenizer.json").is_file():  # else another process was first
                raise


def _save_fast(source: Path, target: Path) -> None:
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{source} has no tokenizer.json and must be converted once, {error.name} is not installed: "
            f"{how_to_install('convert')}"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source), use_fast=True, local_files_only=True)
        tokenizer.save_pretrained(str(target))
    except Exception as error:  # the libraries under it raise bare Exception for broken files
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{source}: its tokenizer cannot be converted: {reason}") from error
    if not (target / "tokenizer.json").is_file():
        raise CheckpointError(f"{source}: transformers has no fast form of its tokenizer")
