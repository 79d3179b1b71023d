"""The work folder: finished layers and the activations after them, so that a killed run goes on where it was.

Imports numpy, safetensors, `checkpoint`, `errors`. A layer counts when its record is there; the record is renamed into
place after everything that it names, and holds their digests. So whenever the process dies, what is read back is
whole.

    manifest.json             model, options and calibration by their digests: anything else is refused
    layer-0007.safetensors    codes, scales, zero points, changed dense tensors
    layer-0007.json           records; digests of the tensors and of the activations
    hidden-0008.bin           what layer 8 reads; older ones are deleted
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from pagedcli.checkpoint.quant_tensor import QuantTensor
from pagedcli.errors import ConfigError
from pagedcli.quant.options import Floats, LayerResult, LinearRecord

if sys.platform != "win32":
    import fcntl

_FIELDS = ("codes", "scales", "zeros", "g_idx")


class WorkFolder:
    """One run's folder; made by `open_work`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def finished(self) -> int:
        """Layers that are whole, from the first on."""
        count = 0
        while self._is_whole(count):
            count += 1
        # The activations after the last of them are needed; without them the layer is done again.
        while count and not self._hidden_is_whole(count):
            count -= 1
        return count

    def save(self, result: LayerResult, hidden: Sequence[Floats]) -> None:
        """Keep a layer and the activations [rows, hidden_size] of each sample after it."""
        layer = result.layer
        tensors = save(_to_arrays(result))
        activations = b"".join(sample.tobytes() for sample in hidden)
        _write(self._tensors(layer), tensors)
        _write(self._hidden(layer + 1), activations)
        record = {
            "records": [asdict(record) for record in result.records],
            "tensors": [_settings(tensor) for tensor in result.tensors],
            "digests": [_digest(tensors), _digest(activations)],
        }
        _write(self._record(layer), json.dumps(record, indent=1).encode())
        self._hidden(layer).unlink(missing_ok=True)

    def read(self, layer: int) -> LayerResult:
        """A finished layer."""
        record = json.loads(self._record(layer).read_bytes())
        arrays = load(self._tensors(layer).read_bytes())
        tensors = tuple(_to_tensor(settings, arrays) for settings in record["tensors"])
        dense = {
            name.removeprefix("dense:"): arrays[name] for name in sorted(arrays) if name.startswith("dense:")
        }
        records = tuple(LinearRecord(**values) for values in record["records"])
        return LayerResult(layer, tensors, dense, records, resumed=True)

    def hidden(self, layer: int, lengths: Sequence[int]) -> list[Floats]:
        """What a layer reads, [rows, hidden_size] of each sample."""
        values = np.fromfile(self._hidden(layer), dtype=np.float32)
        parts = np.split(values.reshape(sum(lengths), -1), np.cumsum(lengths)[:-1]) if lengths else []
        return [np.ascontiguousarray(part) for part in parts]

    def _is_whole(self, layer: int) -> bool:
        digests = self._digests(layer)
        return digests is not None and _file_digest(self._tensors(layer)) == digests[0]

    def _hidden_is_whole(self, layer: int) -> bool:
        digests = self._digests(layer - 1)
        return digests is not None and _file_digest(self._hidden(layer)) == digests[1]

    def _digests(self, layer: int) -> list[str] | None:
        try:
            digests: list[str] = json.loads(self._record(layer).read_bytes())["digests"]
        except (FileNotFoundError, ValueError, KeyError):
            return None
        return digests

    def _tensors(self, layer: int) -> Path:
        return self.path / f"layer-{layer:04d}.safetensors"

    def _record(self, layer: int) -> Path:
        return self.path / f"layer-{layer:04d}.json"

    def _hidden(self, layer: int) -> Path:
        return self.path / f"hidden-{layer:04d}.bin"


@contextlib.contextmanager
def open_work(path: Path, manifest: Mapping[str, Any]) -> Iterator[WorkFolder]:
    """A folder for this run alone, new or of an earlier run with the same manifest.

    Raises:
        ConfigError: It is of a run with other settings, another process works in it, or it cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error
    with locked(path):
        _check_manifest(path, json.loads(json.dumps(manifest)))
        yield WorkFolder(path)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """A folder for this process alone while the context lasts.

    Raises:
        ConfigError: Another process works in it, or it cannot be written.
    """
    try:
        lock = (path / "lock").open("a")
    except OSError as error:
        raise _unusable(path, error) from error
    with lock:
        _lock(lock.fileno(), path)
        yield


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path}: cannot be written ({error.strerror or error}): choose another --output")


def _lock(descriptor: int, path: Path) -> None:
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"{path}: another process is quantizing there: wait for it, or end it") from error


_DIGESTS = {
    "model": "the model's weights were others",
    "calibration": "the calibration text was another, which --calibration, --samples, --seq-len and --seed make",
}
"""What is said of settings that are kept as a digest."""


def _check_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    file = path / "manifest.json"
    if not file.exists():
        _write(file, json.dumps(manifest, indent=1).encode())
        return
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{file}: is damaged ({error}): --overwrite starts anew") from error
    changed = sorted(key for key in {*found, *manifest} if found.get(key) != manifest.get(key))
    if "format" in changed:
        raise ConfigError(
            f"{path}: holds a run that was begun by another version of paged, whose weights differ: finish it with "
            f"that, or --overwrite to start anew"
        )
    if changed:
        key = changed[0]
        what = _DIGESTS.get(key, f"{key} was {found.get(key)!r}, is now {manifest.get(key)!r}")
        raise ConfigError(
            f"{path}: holds a run that was begun with other settings ({what}): use the same, or --overwrite to "
            f"start anew"
        )


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    new = path.with_suffix(path.suffix + ".new")
    try:
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise _unusable(path, error) from error


def _to_arrays(result: LayerResult) -> dict[str, np.ndarray[Any, Any]]:
    arrays = {f"dense:{name}": values for name, values in result.dense.items()}
    for tensor in result.tensors:
        values = {field: getattr(tensor, field) for field in _FIELDS}
        arrays |= {f"{field}:{tensor.name}": array for field, array in values.items() if array is not None}
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def _settings(tensor: QuantTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "bits": tensor.bits,
        "group_size": tensor.group_size,
        "method": tensor.method,
    }


def _to_tensor(settings: dict[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]]) -> QuantTensor:
    name = settings["name"]
    found = {field: arrays.get(f"{field}:{name}") for field in _FIELDS}
    codes, scales = found["codes"], found["scales"]
    assert codes is not None, name
    assert scales is not None, name
    return QuantTensor(
        **settings, codes=codes, scales=scales, zeros=found["zeros"], offsets=None, g_idx=found["g_idx"]
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _file_digest(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None
