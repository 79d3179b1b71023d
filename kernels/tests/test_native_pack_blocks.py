"""Blocks of GGUF files packed by the kernels: the same bits as their values in float32, packed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from native_support import Array, Stored, dtypes, isas, runtime
from paged_kernels.native import NativeError

HALVES = np.array([0.0, 1e-7, -0.0123, 0.5, 65504.0, -3.25], np.float16)


@dataclass
class Blocks:
    """A tensor of blocks as `Runtime.pack` takes it."""

    dtype: str
    shape: tuple[int, int]
    data: Array


def numbers(rows: int, columns: int, kind: str, seed: int) -> tuple[Blocks, Array]:
    """Random blocks and their values in float32, by numpy's arithmetic."""
    draw = np.random.default_rng(seed)
    count = rows * columns // 32
    scale, low = (draw.choice(HALVES, (count, 1)) for _ in range(2))
    if kind == "Q8_0":
        codes = draw.integers(-128, 128, (count, 32)).astype(np.int8)
        values = codes.astype(np.float32) * scale.astype(np.float32)
        stored = np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=1)
    else:
        codes = draw.integers(0, 16, (count, 32)).astype(np.uint8)
        halves = codes[:, :16] | codes[:, 16:] << 4
        if kind == "Q4_0":
            values = (codes.astype(np.int32) - 8).astype(np.float32) * scale.astype(np.float32)
            stored = np.concatenate([scale.view(np.uint8), halves], axis=1)
        else:
            values = codes.astype(np.float32) * scale.astype(np.float32) + low.astype(np.float32)
            stored = np.concatenate([scale.view(np.uint8), low.view(np.uint8), halves], axis=1)
    return Blocks(kind, (rows, columns), stored.reshape(-1)), values.reshape(rows, columns)


@isas
@dtypes
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize(("rows", "columns"), [(48, 64), (37, 96), (5, 32)])
def test_blocks_are_packed_to_the_bits_of_their_values(
    isa: str, dtype: str, kind: str, rows: int, columns: int
) -> None:
    on = runtime(isa)
    blocks, values = numbers(rows, columns, kind, rows)
    order = np.random.default_rng(1).permutation(rows)
    packed = on.pack([blocks, blocks], dtype, [None, order])
    wanted = on.pack([Stored(values, "F32"), Stored(values[order], "F32")], dtype)
    assert bytes(memoryview(packed.buffer)) == bytes(memoryview(wanted.buffer))


def test_blocks_that_do_not_fit_are_refused() -> None:
    on = runtime("portable")
    blocks, _ = numbers(16, 64, "Q4_1", 0)
    with pytest.raises(NativeError, match="48 features are no whole blocks of 32"):
        on.pack([Blocks("Q4_1", (16, 48), blocks.data)], "float32")
    with pytest.raises(NativeError, match="has 640 bytes, expected 544"):
        on.pack([Blocks("Q8_0", (16, 32), blocks.data[: 16 * 40])], "float32")
    with pytest.raises(NativeError, match="an order of rows"):
        on.pack([blocks], "float32", [np.arange(16) + 1])
