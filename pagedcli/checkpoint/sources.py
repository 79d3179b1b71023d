"""From what the user names (a folder, a file, a hub id, nothing) to an open checkpoint.

Imports `errors`, and the kinds of sources only when they are used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from pagedcli.checkpoint.base import Checkpoint
from pagedcli.errors import CheckpointError

Progress = Callable[[str, int, int], None]
"""Called with what is being fetched, bytes so far, and bytes in all (0: not known)."""

_HUB_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(:(?P<file>[\w./-]+\.gguf))?")


def cache_folder() -> Path:
    """Where fetched and derived files are kept: `PAGED_CACHE`, else the platform's user cache folder."""
    named = os.environ.get("PAGED_CACHE")
    if named:
        return Path(named).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("paged", appauthor=False)


def resolve_model(model: str | None, *, progress: Progress | None = None) -> Path:
    """Finds a model, fetching it where that is needed.

    Args:
        model: Folder, GGUF file, hub id `owner/name` or `owner/name:FILE.gguf`; None: SmolLM2-135M-Instruct.
        progress: Told how far a download is.

    Returns:
        A folder or a GGUF file that `open_checkpoint` takes.
    """
    if model is None:
        from pagedcli.checkpoint.default_model import default_model

        return default_model(cache_folder(), progress)
    if not model.strip():
        # Path("") is the current folder, which nobody means by an empty variable.
        raise CheckpointError(
            f"the model's name is {model!r}: give a model folder, a GGUF file or a hub id, or leave it out for "
            "SmolLM2-135M-Instruct"
        )
    path = _existing(model)
    if path is not None:
        return path
    match = _HUB_ID.fullmatch(model)
    if match is None or _is_path(model):
        raise CheckpointError(
            f"{model}: there is no such file or folder: give a model folder, a GGUF file or a hub id such as "
            "HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    from pagedcli.checkpoint.hub import fetch

    return fetch(match["repo"], match["file"], progress)


def _existing(model: str) -> Path | None:
    """The path, if there is such a file or folder."""
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):
        # A name too long or with a NUL byte for a path, or `~user` of an unknown user.
        return None


def _is_path(model: str) -> bool:
    """Whether `a/b` was meant as a path: its ending is a file's, or its folder exists."""
    return (model.endswith((".gguf", ".safetensors", ".bin")) and ":" not in model) or Path(
        model
    ).parent.is_dir()


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a model folder or GGUF file and checks all its headers.

    Raises:
        CheckpointError: The file or folder cannot be used; the message names it and, where one is to blame, the tensor.
    """
    if path.is_dir():
        return _open_folder(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file or folder")
    if path.suffix == ".gguf" or _starts_with_gguf(path):
        from pagedcli.checkpoint.gguf_checkpoint import GGUFCheckpoint

        return GGUFCheckpoint(path)
    from pagedcli.checkpoint.refusals import is_pickle, refuse_pickle

    if is_pickle(path):
        refuse_pickle(path)
    if path.suffix in (".safetensors", ".json"):
        raise CheckpointError(f"{path}: is one file of a model: give its folder, {path.parent}")
    raise CheckpointError(f"{path}: is neither a model folder nor a GGUF file")


def _open_folder(path: Path) -> Checkpoint:
    """A folder of safetensors, or one that holds a single GGUF file."""
    if not (path / "config.json").is_file() and (ggufs := sorted(path.glob("*.gguf"))):
        if len(ggufs) > 1:
            names = ", ".join(file.name for file in ggufs)
            raise CheckpointError(f"{path}: holds {len(ggufs)} GGUF files: name one of {names}")
        return open_checkpoint(ggufs[0])
    from pagedcli.checkpoint.folder import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path)


def _starts_with_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
