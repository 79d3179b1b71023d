"""What every source of weights looks like to the models: names, shapes and raw bytes.

Imports numpy, `errors`, and `text` for a type. Names and configuration are always in Hugging Face terms, whatever
the file format; every failure to read is a `CheckpointError` that names the file and the tensor or key.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from pagedcli.errors import CheckpointError

if TYPE_CHECKING:
    from pagedcli.checkpoint.quant_tensor import Quantization, QuantTensor
    from pagedcli.text.tokenizer import Tokenizer

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# safetensors name -> bytes of one element
ITEM_SIZES: dict[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
FLOAT_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """One tensor as bytes, little-endian and row-major; a `StoredTensor` that needs no work.

    Args:
        name: Hugging Face name.
        dtype: safetensors name: F32, BF16, F16 ...
        shape: As in PyTorch: a linear layer is (out, in).
        data: 1-D uint8 over the elements, where possible a view of the mapped file. It need not be aligned. Writing
            to it never reaches the file (private mapping).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    def __post_init__(self) -> None:
        assert self.data.nbytes == math.prod(self.shape) * ITEM_SIZES[self.dtype], self.name

    def rows(self, first: int, last: int) -> RawTensor:
        """Rows `first` to `last` - 1 of the first dimension, a view."""
        row_bytes = self.data.nbytes // self.shape[0]
        part = self.data[first * row_bytes : last * row_bytes]
        return RawTensor(self.name, self.dtype, (last - first, *self.shape[1:]), part)

    def release(self) -> None:
        """See `StoredTensor`."""
        release_pages(self.data)


class StoredTensor(Protocol):
    """One tensor, whose bytes may have to be computed when they are asked for (dequantized)."""

    @property
    def name(self) -> str:
        """Hugging Face name."""

    @property
    def dtype(self) -> str:
        """Of `data`, a safetensors name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As in PyTorch."""

    @property
    def data(self) -> Bytes:
        """1-D uint8 over all elements; computed anew each time, where it is computed."""

    def rows(self, first: int, last: int) -> RawTensor:
        """Rows `first` to `last` - 1 of the first dimension: what a loader asks for that wants no whole copy."""

    def release(self) -> None:
        """Give back the memory that holds the file's bytes; whoever asks again reads them from the file again."""


class Checkpoint(Protocol):
    """A model's weights, configuration and tokenizer, opened and validated but not yet read."""

    @property
    def path(self) -> Path:
        """The folder or file."""

    @property
    def format(self) -> Literal["safetensors", "gguf"]:
        """Kind of source."""

    @property
    def config(self) -> dict[str, Any]:
        """`config.json`; for other formats, the same in its terms."""

    @property
    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json`, with `eos_token_id` filled in where it is known elsewhere."""

    @property
    def quantization(self) -> Quantization | None:
        """How linears are quantized; None: none is."""

    def names(self) -> Collection[str]:
        """Names of all tensors; a quantized linear has its "X.weight" here, whatever it is stored as."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""

    def tensor(self, name: str) -> StoredTensor:
        """One tensor, dequantized to float32 if it is quantized; CheckpointError when it is not there."""

    def quantized(self, linear: str) -> QuantTensor | None:
        """The linear of that name (without ".weight") as codes; None if it is not stored as codes that can run."""

    def stored_bytes(self) -> int:
        """Bytes that the tensors take in the files."""

    def load_tokenizer(self) -> Tokenizer:
        """The model's own tokenizer and chat template."""


def read_bytes(path: Path) -> bytes:
    """The whole file; CheckpointError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object; CheckpointError names the file otherwise."""
    try:
        value = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {type(value).__name__}, not a JSON object: download it again")
    return value


def release_pages(data: Bytes) -> None:
    """Give back the memory behind a view of a mapped file, if it is one; the next access reads the file again.

    So a file that is converted piece by piece is never resident as a whole beside its result. Whole system pages only:
    what a view shares with its neighbours stays.
    """
    mapped = getattr(data, "_mmap", None)  # numpy's memmap keeps its mapping there, also in views
    if mapped is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = data.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (first + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        mapped.madvise(mmap.MADV_DONTNEED, start, end - start)


def map_file(path: Path) -> Bytes:
    """The file as bytes, mapped privately: nothing is read until it is used, nothing is ever written.

    Copy-on-write, not read-only, because torch warns about arrays that cannot be written.
    """
    try:
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path}: is empty: download it again")
        return np.memmap(path, dtype=np.uint8, mode="c")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
