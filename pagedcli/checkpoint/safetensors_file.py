"""One safetensors file: its header, validated to the last byte, and views of its tensors.

Imports numpy and `errors`. The format: 8 bytes of header length, a JSON header, then the tensors without gaps.
Invariant: after `__init__` every view lies inside the file and no two overlap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedcli.checkpoint.base import ITEM_SIZES, RawTensor, map_file
from pagedcli.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
AGAIN = "the file is truncated or corrupt: download it again"


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the end of the header
    end: int


class SafetensorsFile:
    """A mapped safetensors file.

    Args:
        path: The file; its header is read and checked at once, its tensors when asked for.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = map_file(path)
        self._data_start = 8 + self._header_length()
        self._entries = dict(self._parse(self._header()))
        self._check_layout()

    def names(self) -> Iterable[str]:
        """Names of the tensors in the file."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """Safetensors dtype name of one tensor."""
        return self._entries[name].dtype

    def num_bytes(self, name: str) -> int:
        """Bytes of one tensor."""
        return self._entries[name].end - self._entries[name].start

    def tensor(self, name: str) -> RawTensor:
        """A view of one tensor."""
        entry = self._entries[name]
        data = self._bytes[self._data_start + entry.start : self._data_start + entry.end]
        return RawTensor(name, entry.dtype, entry.shape, data)

    def _fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}: {AGAIN}")

    def _header_length(self) -> int:
        if len(self._bytes) < 8:
            raise self._fail(f"has {len(self._bytes)} bytes, too few for a header")
        length = int.from_bytes(self._bytes[:8].tobytes(), "little")
        if not 2 <= length <= min(len(self._bytes) - 8, MAX_HEADER_BYTES):
            raise self._fail(f"the header claims {length} bytes in a file of {len(self._bytes)}")
        return length

    def _header(self) -> dict[str, Any]:
        try:
            text = self._bytes[8 : self._data_start].tobytes()
            header = json.loads(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise self._fail(f"the header is not valid JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._fail("the header is not a JSON object")
        header.pop("__metadata__", None)
        return header

    def _parse(self, header: dict[str, Any]) -> Iterable[tuple[str, _Entry]]:
        for name, value in header.items():
            if not isinstance(value, dict):
                raise self._fail(f"tensor {name}: its entry is not an object")
            dtype: Any = value.get("dtype")
            shape: Any = value.get("shape")
            if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
                raise CheckpointError(
                    f"{self.path}: tensor {name}: unknown dtype {dtype!r}; known are {', '.join(ITEM_SIZES)}"
                )
            if not _sizes(shape):
                raise self._fail(f"tensor {name}: shape is {shape!r}")
            offsets: Any = value.get("data_offsets")
            if not (_sizes(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1]):
                raise self._fail(f"tensor {name}: data_offsets is {offsets!r}")
            yield name, _Entry(dtype, tuple(shape), offsets[0], offsets[1])

    def _check_layout(self) -> None:
        """Tensors must follow one another without gap or overlap, and fill the file exactly."""
        available = len(self._bytes) - self._data_start
        position = 0
        for name, entry in sorted(self._entries.items(), key=lambda item: (item[1].start, item[1].end)):
            needed = math.prod(entry.shape) * ITEM_SIZES[entry.dtype]
            if entry.end - entry.start != needed:
                raise self._fail(
                    f"tensor {name}: {entry.dtype} {list(entry.shape)} needs {needed} bytes, "
                    f"the header gives it {entry.end - entry.start}"
                )
            if entry.end > available:
                raise self._fail(f"tensor {name}: ends at byte {entry.end}, the file has {available}")
            if entry.start != position:
                kind = "overlaps the tensor before it" if entry.start < position else "leaves a gap before it"
                raise self._fail(f"tensor {name}: {kind} (starts at byte {entry.start}, not {position})")
            position = entry.end
        if position != available:
            raise self._fail(f"the tensors end at byte {position}, the file has {available}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON object without repeated keys: of two tensors of one name, neither can be trusted."""
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name appears twice")
    return names


def _sizes(value: Any) -> bool:
    """Whether the value is a list of integers that are not negative (bool is not an integer here)."""
    return isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)
