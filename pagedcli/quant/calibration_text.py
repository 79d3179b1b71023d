"""Where calibration and evaluation texts come from: files and hub data sets. May import `text` and `errors`; no torch.

A JSONL row has `text`, `prompt` (both raw) or `messages` (through the model's chat template); anything else is plain
text. Nothing is dropped in silence: a row that cannot be used is an error that names its line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedcli.errors import ConfigError, RequestError
from pagedcli.text.tokenizer import Tokenizer

_FIELDS = ("text", "messages", "prompt")
_HUB_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(:(?P<file>[\w./ -]+))?")
_READABLE = (".jsonl", ".txt", ".json", ".md")
_CHUNK_CHARACTERS = 4096
_TIMEOUT_S = 15.0
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class SourceText:
    """One text of a source.

    Attributes:
        value: Raw text, or the messages of a conversation.
        where: Such as "calibration.jsonl: line 7", for errors.
    """

    value: str | list[Any]
    where: str

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids, with the start token and template that the model wants.

        Raises:
            ConfigError: The chat template refuses the conversation, or there is none.
        """
        try:
            if isinstance(self.value, str):
                return tokenizer.encode(self.value)
            return tokenizer.encode_chat(self.value, add_generation_prompt=False)
        except RequestError as error:
            raise ConfigError(f"{self.where}: {error}") from error


def find_texts(name: str, *, flag: str) -> list[SourceText]:
    """All texts of a file here or of a data set on the hub.

    Args:
        name: A file, or `owner/name` or `owner/name:FILE` of a hub data set.
        flag: Of the command line, for errors.

    Raises:
        ConfigError: There is no such file, it cannot be read, or it holds no text.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return read_texts(path)
    if path.is_dir():
        raise ConfigError(f"{flag} {name}: is a folder: give a file of it")
    match = _HUB_ID.fullmatch(name)
    if match is None or path.parent.is_dir() or (name.endswith(_READABLE) and ":" not in name):
        raise ConfigError(
            f"{flag} {name}: there is no such file: give a JSONL or text file, or a hub data set as owner/name:FILE"
        )
    return read_texts(_fetch(match["repo"], match["file"], flag))


def read_texts(path: Path) -> list[SourceText]:
    """All texts of a file: rows of JSONL, or plain text in pieces of whole lines.

    Raises:
        ConfigError: Names the file, and the line where one is to blame.
    """
    try:
        data = path.read_bytes().removeprefix(_BOM)
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}: line {line} is not UTF-8: convert the file to UTF-8") from error
    found = list(_rows(path, text) if _is_jsonl(path, text) else _pieces(path, text))
    if not found:
        raise ConfigError(f"{path}: holds no text")
    return found


def _is_jsonl(path: Path, text: str) -> bool:
    return path.suffix == ".jsonl" or (path.suffix != ".txt" and text.lstrip().startswith("{"))


def _rows(path: Path, text: str) -> Iterator[SourceText]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}: line {number}"
            yield SourceText(_row_value(line, where), where)


def _row_value(line: str, where: str) -> str | list[Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    given = [name for name in _FIELDS if isinstance(row, dict) and row.get(name) is not None]
    if len(given) != 1:
        has = f"has {' and '.join(given)}" if given else "has none of them"
        raise ConfigError(f"{where}: a row needs one of text, messages and prompt; this one {has}")
    value = row[given[0]]
    kind = list if given[0] == "messages" else str
    if not isinstance(value, kind) or not value:
        wanted = "a list of messages" if kind is list else "text"
        raise ConfigError(f"{where}: {given[0]} must be {wanted}, and not empty")
    return value


def _pieces(path: Path, text: str) -> Iterator[SourceText]:
    """Plain text in pieces of whole lines, so that a seed can choose among them; nothing is left out."""
    piece: list[str] = []
    start, size = 1, 0
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        piece.append(line)
        size += len(line)
        if size >= _CHUNK_CHARACTERS:
            yield SourceText("".join(piece), f"{path}: line {start}")
            piece, start, size = [], number + 1, 0
    if "".join(piece).strip():
        yield SourceText("".join(piece), f"{path}: line {start}")


def _fetch(repo: str, file: str | None, flag: str) -> Path:
    """A file of a hub data set, fetched if it has to be; ConfigError in one line where that fails."""
    import huggingface_hub as hub
    import huggingface_hub.errors

    errors: Any = huggingface_hub.errors
    unreachable = (errors.HTTPError, OSError)
    try:
        siblings = hub.HfApi().dataset_info(repo, timeout=_TIMEOUT_S).siblings or []
        chosen = _choose(repo, file, [sibling.rfilename for sibling in siblings], flag)
        return Path(hub.hf_hub_download(repo, chosen, repo_type="dataset"))
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{flag} {repo}: there is no such file here and no such data set on the hub"
        ) from error
    except errors.HFValidationError as error:
        raise ConfigError(f"{flag} {repo}: is neither a file here nor a hub data set") from error
    except unreachable as error:
        return _from_cache(hub, repo, file, flag, error)


def _from_cache(hub: Any, repo: str, file: str | None, flag: str, error: Exception) -> Path:
    """What an earlier run fetched, for a machine without the network."""
    if file is not None:
        kept = hub.try_to_load_from_cache(repo, file, repo_type="dataset")
        if isinstance(kept, str):
            return Path(kept)
    reason = " ".join(str(error).split())[:120] or type(error).__name__
    raise ConfigError(
        f"{flag} {repo}: no such file here, and the hub cannot be reached ({reason}): give a file, or leave "
        f"{flag} out for {'text that the model writes itself' if flag == '--calibration' else 'a text of our own'}"
    ) from error


def _choose(repo: str, file: str | None, names: list[str], flag: str) -> str:
    """The file that is asked for, or the only one that can be read."""
    readable = [name for name in names if name.endswith(_READABLE) and not name.lower().startswith("readme")]
    if file is not None and file in names:
        return file
    if file is None and len(readable) == 1:
        return readable[0]
    has = f"has {len(readable)} files of JSONL or text ({', '.join(sorted(readable)[:4])})"
    raise ConfigError(
        f"{flag} {repo}{f': has no {file}' if file else ''}: the data set {has}: name one as {repo}:FILE"
    )
