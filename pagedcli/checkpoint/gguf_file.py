"""One GGUF file: its metadata and its table of tensors, every length checked against the file.

Imports numpy, `gguf` for its constants, and `errors`. The reader of the `gguf` package makes an array of every
string, which takes seconds for a vocabulary, and trusts the lengths in the file; this one does neither.
Invariant: after `__init__` every tensor lies inside the file and no two overlap.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pagedcli.checkpoint.base import Bytes, map_file
from pagedcli.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
AGAIN = "the file is truncated or corrupt: download it again"

_STRING, _ARRAY, _BOOL = 8, 9, 7
_U64 = struct.Struct("<Q")
_SCALARS = {  # GGUF value type -> little-endian numpy dtype
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor is. `shape` is as in PyTorch, the fastest dimension last."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Bits that one element takes, scales included."""
        return 8 * self.num_bytes / math.prod(self.shape)


class _Cursor:
    """Reads values one after another and never past the end. `place` says what is being read, for messages."""

    def __init__(self, path: Path, data: Bytes) -> None:
        self.path, self.size, self.position, self.place = path, len(data), 0, "the header"
        self._view = data.data

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.place}: {what}: {AGAIN}")

    def take(self, count: int) -> memoryview:
        end = self.position + count
        if end > self.size:
            raise self.fail(f"needs {count} bytes at byte {self.position}, the file has {self.size}")
        part = self._view[self.position : end]
        self.position = end
        return part

    def u32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def string(self) -> str:
        try:
            return str(self.take(self.u64()), "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail("is not UTF-8 text") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self._scalars(kind, 1)[0]

    def _array(self) -> list[Any]:
        kind, count = self.u32(), self.u64()
        if kind == _ARRAY:
            raise self.fail("is an array of arrays")
        if kind != _STRING:
            return self._scalars(kind, count)
        if 8 * count > self.size - self.position:
            raise self.fail(f"claims {count} strings in the {self.size - self.position} bytes that are left")
        position = self.position
        try:
            return self._strings(count)
        except (struct.error, UnicodeDecodeError, ValueError):
            self.position = position  # again, one by one, for the message
            return [self.string() for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """As `string`, for the hundred thousand of a vocabulary: without a message of its own."""
        view, position, size, length_at = self._view, self.position, self.size, _U64.unpack_from
        found = []
        for _ in range(count):
            start = position + 8
            position = start + length_at(view, position)[0]
            if position > size:
                raise ValueError
            found.append(str(view[start:position], "utf-8"))
        self.position = position
        return found

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise self.fail(f"has the unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind == _BOOL:
            return [bool(x) for x in values]
        if dtype == np.dtype(
            "<f4"
        ):  # the shortest decimal: 1e-05, where widening gives 9.999999747378752e-06
            return [float(str(x)) for x in values]
        return list(values.tolist())


class GGUFFile:
    """A mapped GGUF file: `metadata` by key, `tensors` by name in the file's order.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = map_file(path)
        cursor = _Cursor(path, self._bytes)
        num_tensors, num_fields = _read_header(cursor)
        self.metadata = _read_metadata(cursor, num_fields)
        self.tensors = _read_tensors(cursor, num_tensors, self.metadata)
        self._check_layout()

    def data(self, tensor: GGUFTensor) -> Bytes:
        """The stored bytes of one tensor, [num_bytes] uint8, a view of the file."""
        return self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]

    def _check_layout(self) -> None:
        end = 0
        for tensor in sorted(self.tensors.values(), key=lambda t: t.offset):
            if tensor.offset < end:
                raise CheckpointError(f"{self.path}: tensor {tensor.name}: overlaps another tensor: {AGAIN}")
            end = tensor.offset + tensor.num_bytes
            if end > len(self._bytes):
                raise CheckpointError(
                    f"{self.path}: tensor {tensor.name}: ends at byte {end}, the file has {len(self._bytes)}: {AGAIN}"
                )


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """Magic and version; returns the numbers of tensors and of metadata fields."""
    if bytes(cursor.take(min(4, cursor.size))) != MAGIC:
        raise CheckpointError(f"{cursor.path}: is not a GGUF file (it does not start with GGUF)")
    version = cursor.u32()
    if version & 0xFFFF == 0:
        raise CheckpointError(
            f"{cursor.path}: is a big-endian GGUF file, which is not supported: use the usual little-endian file"
        )
    if version not in VERSIONS:
        raise CheckpointError(
            f"{cursor.path}: is GGUF version {version}, versions {VERSIONS[0]} to {VERSIONS[-1]} are read: "
            "convert the model again with a current llama.cpp"
        )
    return cursor.u64(), cursor.u64()


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for i in range(count):
        cursor.place = f"metadata field {i}"
        key = cursor.string()
        cursor.place = f"metadata {key}"
        if key in metadata:
            raise cursor.fail("appears twice")
        metadata[key] = cursor.value(cursor.u32())
    return metadata


def _read_tensors(cursor: _Cursor, count: int, metadata: dict[str, Any]) -> dict[str, GGUFTensor]:
    """The table of tensors; their offsets are made absolute."""
    relative = {}
    for i, tensor in enumerate(_tensor_table(cursor, count)):
        if tensor.name in relative:
            raise cursor.fail(f"tensor {i} repeats the name {tensor.name}")
        relative[tensor.name] = tensor
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        cursor.place = "metadata general.alignment"
        raise cursor.fail(f"{alignment!r} is not a power of two")
    start = -(-cursor.position // alignment) * alignment
    for tensor in relative.values():
        if tensor.offset % alignment:
            cursor.place = f"tensor {tensor.name}"
            raise cursor.fail(f"offset {tensor.offset} is not a multiple of {alignment}")
    return {
        name: GGUFTensor(name, t.kind, t.shape, start + t.offset, t.num_bytes) for name, t in relative.items()
    }


def _tensor_table(cursor: _Cursor, count: int) -> Iterator[GGUFTensor]:
    for i in range(count):
        cursor.place = f"tensor {i} of {count}"
        name = cursor.string()
        cursor.place = f"tensor {name}"
        num_dimensions = cursor.u32()
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise cursor.fail(f"has {num_dimensions} dimensions")
        shape = tuple(cursor.u64() for _ in range(num_dimensions))[::-1]
        kind = _kind(cursor, cursor.u32())
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise cursor.fail(
                f"shape {list(shape)} does not fit {kind.name}, whose blocks hold {block} elements"
            )
        yield GGUFTensor(name, kind, shape, cursor.u64(), math.prod(shape) // block * block_bytes)


def _kind(cursor: _Cursor, number: int) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(number)
    except ValueError as error:
        raise CheckpointError(
            f"{cursor.path}: {cursor.place}: has the unknown storage type {number}: the file is corrupt, or newer than "
            "the installed gguf package (pip install -U gguf)"
        ) from error
