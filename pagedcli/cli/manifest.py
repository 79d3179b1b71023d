"""`OUT.manifest.json`: what an output was made from, so that a rerun goes on only with the very same.

May import `errors` and this package. Pinned is what can change an answer: input, model, parameters, seed, version.
What only decides when a row runs (pages, threads, policy, batch sizes) may differ between runs of one job.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pagedcli.cli.files import atomic_write
from pagedcli.errors import ConfigError

FORMAT = 1
_PINNED = ("version", "input", "model", "parameters")
_COMPLETE_KEYS = frozenset({"rows", "errors", "bytes"})
_WHOLE_FILE_BYTES = 16 << 20
_EDGE_BYTES = 1 << 20
_MODEL_SUFFIXES = frozenset({".safetensors", ".gguf", ".json", ".jinja", ".model", ".txt"})


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of the file.

    Attributes:
        version: Of pagedcli.
        input: `bytes`, `sha256` and `format` of the input.
        model: `sha256` of the model (`fingerprint`).
        parameters: Sampling defaults, data type and so on: whatever can change an answer or the shape of a row.
        seed: The run's seed.
        seed_drawn: No seed was given; a rerun takes this one.
        created: Unix time of the first run.
        format: Of this file.
        complete: `rows`, `errors` and `bytes` of the finished output, or None.
    """

    version: str
    input: dict[str, Any]
    model: dict[str, Any]
    parameters: dict[str, Any]
    seed: int
    seed_drawn: bool
    created: int
    format: int = FORMAT
    complete: dict[str, int] | None = None


def manifest_path(output: Path) -> Path:
    """Beside the output."""
    return output.with_name(output.name + ".manifest.json")


def load_manifest(output: Path) -> Manifest | None:
    """The manifest of an output; None if there is none."""
    path = manifest_path(output)
    try:
        manifest = Manifest(**json.loads(path.read_bytes()))
        _check_shape(manifest)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, TypeError, RecursionError):
        raise ConfigError(f"{path}: not a manifest of this version: --overwrite starts anew") from None
    return manifest


def _check_shape(manifest: Manifest) -> None:
    """ValueError if somebody wrote something else into the file than `save_manifest` does."""
    complete = {} if manifest.complete is None else manifest.complete
    tables = (manifest.input, manifest.model, manifest.parameters, complete)
    if not all(isinstance(table, dict) for table in tables) or not isinstance(manifest.seed_drawn, bool):
        raise ValueError("a field is of another type")
    if not all(type(number) is int for number in (manifest.seed, manifest.created, *complete.values())):
        raise ValueError("a number is none")
    if manifest.complete is not None and complete.keys() < _COMPLETE_KEYS:
        raise ValueError("complete lacks a number")


def save_manifest(output: Path, manifest: Manifest) -> None:
    """Write it as a whole."""
    text = json.dumps(asdict(manifest), indent=2, ensure_ascii=False) + "\n"
    atomic_write(manifest_path(output), [text.encode()])


def changes(old: Manifest, new: Manifest) -> list[str]:
    """What differs in what is pinned, each as "key was X, now Y"."""
    found: list[str] = []
    before, after = asdict(old), asdict(new)
    for key in _PINNED:
        found += _differences(key, _json_value(before[key]), _json_value(after[key]))
    seeds = (None if old.seed_drawn else old.seed, None if new.seed_drawn else new.seed)
    return found + _differences("seed", *seeds)


def _json_value(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _differences(key: str, old: Any, new: Any) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted(old.keys() | new.keys())
        nested = (_differences(f"{key}.{name}", old.get(name), new.get(name)) for name in names)
        return [item for items in nested for item in items]
    return [] if old == new else [f"{key} was {_shown(old)}, now {_shown(new)}"]


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 24 else text[:21] + "..."


def hash_file(file: BinaryIO) -> str:
    """SHA-256 of all that is left to read."""
    digest = hashlib.sha256()
    while piece := file.read(_EDGE_BYTES):
        digest.update(piece)
    return digest.hexdigest()


def fingerprint(model: Path) -> str:
    """Tells models apart without reading gigabytes: names and sizes, small files whole, large ones at both ends."""
    files = [model]
    if model.is_dir():
        files = sorted(path for path in model.iterdir() if path.suffix in _MODEL_SUFFIXES and path.is_file())
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        name = path.name if model.is_dir() else "model"
        digest.update(f"{name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _WHOLE_FILE_BYTES:
                digest.update(file.read())
            else:
                digest.update(file.read(_EDGE_BYTES))
                file.seek(-_EDGE_BYTES, 2)
                digest.update(file.read())
    return digest.hexdigest()
