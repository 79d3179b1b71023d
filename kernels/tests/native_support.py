"""What the kernel tests share: parameter structs read from the C header, guarded arrays, float64 oracles.

Needs numpy and the built kernels, never torch. Arrays of bfloat16 are float32 here whose values are exact in bfloat16.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from paged_kernels.native import DTYPES, ITEM_BYTES, PackedWeight, Runtime, available_isas

Array = npt.NDArray[Any]

INCLUDE = Path(__file__).parents[1] / "include" / "paged"
ALL_ISAS = ("portable", "avx2", "avx512", "avx512bf16", "amx", "neon", "neondot")
GUARD = 64
"""Bytes before and after every guarded array."""

isas = pytest.mark.parametrize("isa", ALL_ISAS)
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])

_C_TYPES: dict[str, Any] = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


@cache
def struct(name: str) -> type[ctypes.Structure]:
    """A parameter struct by its name in kernels.h or quantized.h."""
    both = "".join((INCLUDE / name).read_text() for name in ("kernels.h", "quantized.h"))
    text = re.sub(r"/\*.*?\*/", "", both, flags=re.DOTALL)
    body = re.search(rf"typedef struct {name} \{{(.*?)\}}", text, flags=re.DOTALL)
    assert body is not None, name
    fields: list[tuple[str, Any]] = []
    for line in body[1].split(";"):
        if not line.strip():
            continue
        kind, names = re.fullmatch(r"(?:const )?(\w+)\b\s*(.*)", line.strip(), flags=re.DOTALL).groups()  # type: ignore[union-attr]
        for part in names.split(","):
            pointer = "*" in part
            fields.append((part.strip(" *\n"), ctypes.c_void_p if pointer else _C_TYPES[kind]))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


@cache
def runtime(isa: str, threads: int = 2) -> Runtime:
    """One runtime per variant and number of threads; skips what this machine or build does not run."""
    if isa not in available_isas():
        pytest.skip(f"{isa} is not built, or not for this machine")
    return Runtime(threads, isa=isa)


def call(isa: str, kernel: str, struct_name: str, threads: int = 2, **fields: Any) -> None:
    """One kernel; arrays among the fields are passed by address."""
    params = struct(struct_name)()
    kept = []
    for name, value in fields.items():
        if isinstance(value, Guarded):
            value = value.address
        elif isinstance(value, np.ndarray):
            assert value.flags.c_contiguous
            kept.append(value)
            value = value.ctypes.data
        elif isinstance(value, PackedWeight):
            kept.append(value)
            value = value.buffer.address
        setattr(params, name, value)
    runtime(isa, threads)._native.call(kernel, memoryview(params))


class Guarded:
    """[rows, stride] elements of which the first `columns` of a row are used, between guard bytes."""

    def __init__(self, rows: int, columns: int, dtype: str, stride: int | None = None) -> None:
        self.columns, self.stride = columns, stride or columns
        size = ITEM_BYTES[dtype]
        self._bytes = np.full(rows * self.stride * size + 2 * GUARD, 0xA5, np.uint8)
        inner = self._bytes[GUARD : len(self._bytes) - GUARD]
        self._cells = inner.view(np.float32 if size == 4 else np.uint16).reshape(rows, self.stride)

    @property
    def address(self) -> int:
        return int(self._cells.ctypes.data)

    def write(self, values: Array) -> Guarded:
        self._cells[:, : self.columns] = values if self._cells.itemsize == 4 else bfloat16_bits(values)
        return self

    def read(self) -> Array:
        """The used cells as float32; asserts that nothing else was written."""
        assert (self._bytes[:GUARD] == 0xA5).all(), "bytes before the array were overwritten"
        assert (self._bytes[-GUARD:] == 0xA5).all(), "bytes behind the array were overwritten"
        gaps = np.ascontiguousarray(self._cells[:, self.columns :]).view(np.uint8)
        assert (gaps == 0xA5).all(), "bytes between rows were overwritten"
        used = self._cells[:, : self.columns]
        return used.copy() if used.itemsize == 4 else floats(used)


def bfloat16_bits(values: Array) -> npt.NDArray[np.uint16]:
    """To nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def floats(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def exact(values: Array, dtype: str) -> Array:
    """float32 values that `dtype` holds exactly."""
    values = np.asarray(values, np.float32)
    return values if dtype == "float32" else floats(bfloat16_bits(values))


def random(shape: tuple[int, ...], dtype: str, seed: int = 0, scale: float = 1.0) -> Array:
    return exact(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


class Stored:
    """A tensor as a checkpoint has it."""

    def __init__(self, values: Array, dtype: str = "F32") -> None:
        self.dtype, self.shape = dtype, values.shape
        kinds = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
        stored = bfloat16_bits(values) if dtype == "BF16" else np.ascontiguousarray(values, kinds[dtype])
        self.data = stored.reshape(-1).view(np.uint8)


def packed(isa: str, weight: Array, dtype: str) -> PackedWeight:
    return runtime(isa).pack([Stored(weight)], dtype)


def assert_close(got: Array, want: Array, dtype: str, terms: Array | float, steps: float = 1.0) -> None:
    """Within rounding: half a unit of the result's last place, and `steps` float32 roundings of `terms`.

    Args:
        got: Results.
        want: float64.
        dtype: Of the result.
        terms: Sum of the absolute values that were added, or a bound of it.
        steps: Roundings that may add up.
    """
    unit = 2.0**-24 if dtype == "float32" else 2.0**-8
    bound = 1.01 * unit * np.abs(want) + steps * 2.0**-24 * np.asarray(terms) + 1e-30
    worst = np.max(np.abs(got - want) / bound)
    assert worst <= 1.0, f"off by {worst:.2f} times the bound"


def dtype_code(dtype: str) -> int:
    return DTYPES[dtype]
