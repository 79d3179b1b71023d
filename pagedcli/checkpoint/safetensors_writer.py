"""Writes safetensors files of a bounded size, tensor by tensor, with an index where there is more than one.

Imports numpy and `errors`. Nothing but the tensor at hand is in memory: data goes to a body file, and the header, which
comes first in the format, is put before it when the file is full. Names count only after `finish`: until then
everything lies under names that end in ".part", so that a folder left by a killed run is seen to be unfinished.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from pagedcli.checkpoint.base import ITEM_SIZES
from pagedcli.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
"""Where a file ends: what other writers take, so that downloads and file systems cope."""
PART = ".part"
DTYPES = {"float16": "F16", "float32": "F32", "int32": "I32", "int64": "I64", "int8": "I8", "uint8": "U8"}
"""numpy name -> safetensors name, for arrays."""
_ALIGNMENT = 8
_COPY_BYTES = 1 << 22


@dataclass(slots=True)
class _Shard:
    body: Path
    file: IO[bytes]
    header: dict[str, Any] = field(default_factory=dict)
    size: int = 0


class SafetensorsWriter:
    """Files of one model; a context manager that leaves no open file.

    Args:
        folder: Exists.
        shard_bytes: A file is closed before a tensor that would make it larger.
    """

    def __init__(self, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._limit = folder, shard_bytes
        self._shards: list[_Shard] = []
        self._names: set[str] = set()
        for old in folder.glob(f"*{PART}"):
            old.unlink()  # of a run that was killed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        for shard in self._shards:
            shard.file.close()

    @property
    def names(self) -> frozenset[str]:
        """Tensors written so far."""
        return frozenset(self._names)

    def add_array(self, name: str, values: np.ndarray) -> None:
        """A tensor as it is."""
        self.add(name, DTYPES[values.dtype.name], values.shape, [np.ascontiguousarray(values).tobytes()])

    def add(self, name: str, dtype: str, shape: tuple[int, ...], pieces: Iterable[bytes]) -> None:
        """A tensor by its bytes, little-endian and row-major, in pieces."""
        assert name not in self._names, name
        size = math.prod(shape) * ITEM_SIZES[dtype]
        shard = self._shard_for(size)
        written = sum(shard.file.write(piece) for piece in pieces)
        assert written == size, name
        shard.header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [shard.size, shard.size + size],
        }
        shard.size += size
        self._names.add(name)

    def finish(self) -> None:
        """Give the files their names; what an earlier run left under such names goes."""
        count = len(self._shards)
        names = (
            [SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        )
        for old in (*self._folder.glob("*.safetensors"), self._folder / INDEX):
            old.unlink(missing_ok=True)
        for shard, name in zip(self._shards, names, strict=True):
            self._put_together(shard, self._folder / name)
        if count > 1:
            self._write_index(names)

    def _shard_for(self, size: int) -> _Shard:
        if not self._shards or (self._shards[-1].size and self._shards[-1].size + size > self._limit):
            body = self._folder / f"weights-{len(self._shards) + 1:05}{PART}"
            self._shards.append(_Shard(body, body.open("wb")))
        return self._shards[-1]

    def _put_together(self, shard: _Shard, path: Path) -> None:
        shard.file.close()
        text = json.dumps({"__metadata__": {"format": "pt"}, **shard.header}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        new = path.with_name(path.name + PART)
        with new.open("wb") as file, shard.body.open("rb") as body:
            file.write(len(text).to_bytes(8, "little") + text)
            shutil.copyfileobj(body, file, _COPY_BYTES)
        shard.body.unlink()
        new.replace(path)

    def _write_index(self, names: list[str]) -> None:
        pairs = list(zip(self._shards, names, strict=True))
        weight_map = {tensor: name for shard, name in pairs for tensor in shard.header}
        total = sum(shard.size for shard in self._shards)
        write_json(self._folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    new = path.with_name(path.name + PART)
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def as_stored(name: str, values: np.ndarray, dtype: str) -> bytes:
    """float32 numbers as bytes of F32, F16 or BF16.

    Raises:
        CheckpointError: A finite number is too large for float16.
    """
    if dtype == "F32":
        return values.tobytes()
    if dtype == "BF16":
        return _bfloat16(values).tobytes()
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if np.any(np.isinf(half) & np.isfinite(values)):
        raise CheckpointError(
            f"tensor {name}: holds {float(np.abs(values[np.isfinite(values)]).max()):.3g}, float16 ends at 65504: use "
            "bfloat16"
        )
    return half.tobytes()


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32 patterns, rounded to the nearest even; not-a-numbers stay such."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)
