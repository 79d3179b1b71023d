"""Models from the Hugging Face hub, through `huggingface_hub`, which is imported only here and only when used.

`HF_TOKEN`, `HF_HOME` and `HF_HUB_OFFLINE` mean what they mean to that library. Only what a model needs is fetched:
safetensors and the small text files, or one GGUF file; never pickles.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagedcli.errors import CheckpointError

Progress = Callable[[str, int, int], None]

PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
IGNORED = ["*/*", "consolidated*.safetensors"]
_TIMEOUT_S = 15.0


def fetch(repo: str, file: str | None, progress: Progress | None) -> Path:
    """The local copy of a hub model: its folder, or the one GGUF file that was asked for.

    Args:
        repo: `owner/name`.
        file: Name of a GGUF file in it, or None for the repository's safetensors (or its only GGUF file).
        progress: Told how far the download is.
    """
    import huggingface_hub as hub
    import huggingface_hub.errors

    errors: Any = huggingface_hub.errors
    # HTTPError is the base class of whichever HTTP library this version of the hub library uses.
    unreachable = (errors.HTTPError, OSError)
    try:
        siblings = hub.HfApi().model_info(repo, timeout=_TIMEOUT_S).siblings or []
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo}: is gated on the hub: accept its terms on its page and set HF_TOKEN to a token of your account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo}: there is no such model on the hub, or it is private: check the name, or set HF_TOKEN"
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(
            f"{repo}: is neither a file or folder here nor a hub id ({_line(error)})"
        ) from error
    except unreachable as error:
        return _from_cache(hub, repo, file, error)
    chosen = _choose(repo, file, [sibling.rfilename for sibling in siblings])
    try:
        return _download(hub, repo, chosen, progress)
    except unreachable as error:
        raise CheckpointError(
            f"{repo}: the download failed ({_line(error)}): the same command goes on where it stopped"
        ) from error


def _choose(repo: str, file: str | None, files: list[str]) -> str | None:
    """The GGUF file to fetch, or None for the folder."""
    ggufs = sorted(name for name in files if name.endswith(".gguf"))
    if file is not None:
        if file not in ggufs:
            raise CheckpointError(f"{repo}: has no file {file}; its GGUF files: {', '.join(ggufs) or 'none'}")
        return file
    if any(name.endswith(".safetensors") and "/" not in name for name in files):
        return None
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise CheckpointError(
            f"{repo}: has {len(ggufs)} GGUF files: name one, as {repo}:{ggufs[0]} ({', '.join(ggufs)})"
        )
    if any(name.endswith((".bin", ".pt", ".pth")) for name in files):
        raise CheckpointError(
            f"{repo}: has pickled weights only, which are not read, since loading them can run code: convert it once "
            f"with transformers' from_pretrained('{repo}').save_pretrained('FOLDER') and give that folder"
        )
    raise CheckpointError(f"{repo}: has neither safetensors nor GGUF files")


def _download(hub: Any, repo: str, file: str | None, progress: Progress | None) -> Path:
    bar = _progress_bar(repo, progress)
    if file is not None:
        return Path(hub.hf_hub_download(repo, file, tqdm_class=bar))
    return Path(hub.snapshot_download(repo, allow_patterns=PATTERNS, ignore_patterns=IGNORED, tqdm_class=bar))


def _from_cache(hub: Any, repo: str, file: str | None, cause: Exception) -> Path:
    """What an earlier download left, when the hub cannot be reached."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        if file is not None:
            return Path(hub.hf_hub_download(repo, file, local_files_only=True))
        folder = Path(
            hub.snapshot_download(
                repo, allow_patterns=PATTERNS, ignore_patterns=IGNORED, local_files_only=True
            )
        )
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{repo}: is not on this machine and the hub cannot be reached ({_line(cause)}): go online, or give the "
            "path of a model folder or GGUF file"
        ) from error
    return folder


def _line(error: Exception) -> str:
    """The first line of the library's message, which often has many."""
    if type(error).__name__ == "OfflineModeIsEnabled":
        return "HF_HUB_OFFLINE is set"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _progress_bar(repo: str, progress: Progress | None) -> type:
    """A bar for the hub library that draws nothing and tells `progress` the bytes."""
    import huggingface_hub.utils

    library: Any = huggingface_hub.utils

    class Bar(library.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **settings: Any) -> None:
            self.counts_bytes = settings.get("unit") == "B"
            settings["disable"] = progress is None
            super().__init__(*args, **settings)

        def display(self, *args: Any, **settings: Any) -> bool:
            if progress is not None and self.counts_bytes:
                progress(repo, int(self.n), int(self.total or 0))
            return True

    return Bar
