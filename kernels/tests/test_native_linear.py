"""Linear and packing of every variant against float64, and the same bits however rows and blocks are shared out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from native_support import (
    Array,
    Guarded,
    Stored,
    assert_close,
    call,
    dtype_code,
    dtypes,
    exact,
    floats,
    isas,
    packed,
    random,
    runtime,
)
from paged_kernels.native import ITEM_BYTES, NativeError, packed_bytes

SHAPES = [
    (1, 1, 1),
    (3, 5, 7),
    (1, 64, 96),
    (2, 31, 33),
    (5, 33, 15),
    (17, 100, 50),
    (33, 96, 160),
    (70, 130, 18),
]


def linear(
    isa: str, dtype: str, x: Array, weight: Array, bias: Array | None = None, threads: int = 2, **fields: Any
) -> Array:
    out_features = weight.shape[0] // 2 if fields.get("gated") else weight.shape[0]
    out_dtype = fields.pop("out_dtype", dtype)
    inputs = Guarded(*x.shape, dtype, stride=x.shape[1] + 3).write(x)
    out = Guarded(x.shape[0], out_features, out_dtype, stride=out_features + 5)
    call(
        isa, "linear", "PagedLinear", threads, x=inputs, weight=packed(isa, weight, dtype), bias=bias, out=out,
        rows=x.shape[0], in_features=x.shape[1], out_features=weight.shape[0], x_stride=inputs.stride,
        out_stride=out.stride, dtype=dtype_code(dtype), out_dtype=dtype_code(out_dtype), **fields,
    )  # fmt: skip
    inputs.read()
    return out.read()


def sums(x: Array, weight: Array, bias: Array | None) -> tuple[Array, Array]:
    """The result in float64 and the sum of absolute values behind it."""
    wide, weight = x.astype(np.float64), weight.astype(np.float64)
    offset = np.zeros(weight.shape[0]) if bias is None else bias.astype(np.float64)
    return wide @ weight.T + offset, np.abs(wide) @ np.abs(weight).T + np.abs(offset)


@isas
@dtypes
@pytest.mark.parametrize(("rows", "depth", "outputs"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(isa: str, dtype: str, rows: int, depth: int, outputs: int, with_bias: bool) -> None:
    x, weight = random((rows, depth), dtype, 1), random((outputs, depth), dtype, 2)
    bias = random((outputs,), "float32", 3) if with_bias else None
    want, terms = sums(x, weight, bias)
    assert_close(linear(isa, dtype, x, weight, bias), want, dtype, terms, steps=depth + 1)
    logits = linear(isa, dtype, x, weight, bias, out_dtype="float32")
    assert_close(logits, want, "float32", terms, steps=depth + 1)


@isas
@dtypes
@pytest.mark.parametrize("outputs", [15, 96])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_residual_is_added_before_the_only_rounding(
    isa: str, dtype: str, outputs: int, in_place: bool
) -> None:
    x, weight = random((37, 50), dtype, 1), random((outputs, 50), dtype, 2)
    added, bias = random((37, outputs), dtype, 3), random((outputs,), "float32", 4)
    want, terms = sums(x, weight, bias)
    residual = Guarded(37, outputs, dtype, stride=outputs + 7).write(added)
    out = residual if in_place else Guarded(37, outputs, dtype, stride=outputs + 2)
    call(
        isa, "linear", "PagedLinear", x=Guarded(*x.shape, dtype).write(x), weight=packed(isa, weight, dtype),
        bias=bias, residual=residual, out=out, rows=37, in_features=50, out_features=outputs, x_stride=50,
        residual_stride=residual.stride, out_stride=out.stride, dtype=dtype_code(dtype),
        out_dtype=dtype_code(dtype),
    )  # fmt: skip
    assert_close(out.read(), want + added, dtype, terms + np.abs(added), steps=52)


@isas
@dtypes
@pytest.mark.parametrize("activation", [0, 1, 2])
def test_gate_and_up_in_one_pass(isa: str, dtype: str, activation: int) -> None:
    x, weight = random((19, 50), dtype, 1), random((96, 50), dtype, 2, scale=0.3)
    bias = random((96,), "float32", 3)
    want, terms = sums(x, weight, bias)
    gate, up = want[:, :48], want[:, 48:]
    acted = gate * activated(gate, activation)
    got = linear(isa, dtype, x, weight, bias, gated=1, activation=activation)
    # The activations' derivatives stay below 1.13.
    slack = 1.2 * (terms[:, :48] * np.abs(up) + terms[:, 48:] * np.abs(acted)) + np.abs(acted * up)
    assert_close(got, acted * up, dtype, slack, steps=60)


def activated(x: Array, activation: int) -> Array:
    """The factor that makes silu, gelu and gelu_tanh of x."""
    if activation == 0:
        return 1.0 / (1.0 + np.exp(-x))
    if activation == 1:
        from math import erf

        return 0.5 * (1.0 + np.vectorize(erf)(x / np.sqrt(2.0)))
    return 0.5 * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


@isas
@dtypes
def test_a_row_has_the_same_bits_whatever_rows_and_threads_share_the_work(isa: str, dtype: str) -> None:
    x, weight = random((300, 70), dtype, 1), random((600, 70), dtype, 2)
    whole = linear(isa, dtype, x, weight)
    for rows in (1, 2, 3, 4, 5, 16, 17, 31, 33, 257):
        for first in (0, 300 - rows):
            part = linear(isa, dtype, np.ascontiguousarray(x[first : first + rows]), weight)
            np.testing.assert_array_equal(part, whole[first : first + rows])
    for threads in (1, 3):
        np.testing.assert_array_equal(linear(isa, dtype, x, weight, threads=threads), whole)


@isas
@dtypes
@pytest.mark.parametrize("powers", [(-60, -60), (-66, -66), (-128, 0), (0, -130), (60, 60)])
def test_few_rows_round_tiny_and_huge_numbers_as_many_do(
    isa: str, dtype: str, powers: tuple[int, int]
) -> None:
    """Few rows and many may use other instructions, whose rules for numbers too small to be normal differ."""
    x, weight = random((40, 160), dtype, 1), random((112, 160), dtype, 2)
    x, weight = np.ldexp(x, powers[0]), np.ldexp(weight, powers[1])
    whole = linear(isa, dtype, x, weight, out_dtype="float32")
    for rows in (1, 2, 3, 4, 7):
        part = linear(isa, dtype, x[:rows], weight, out_dtype="float32")
        np.testing.assert_array_equal(part.view(np.uint32), whole[:rows].view(np.uint32))


@isas
@dtypes
def test_a_nan_stays_in_its_row(isa: str, dtype: str) -> None:
    x, weight = random((40, 64), dtype, 1), random((48, 64), dtype, 2)
    clean = linear(isa, dtype, x, weight)
    x[17, 5] = np.nan
    spoiled = linear(isa, dtype, x, weight)
    assert np.isnan(spoiled[17]).all()
    others = np.arange(40) != 17
    np.testing.assert_array_equal(spoiled[others], clean[others])


@isas
@dtypes
@pytest.mark.parametrize("stored", ["F32", "BF16", "F16", "F64"])
@pytest.mark.parametrize("parts", [(16,), (20, 30), (1, 1, 40), (33,)])
def test_packing(isa: str, dtype: str, stored: str, parts: tuple[int, ...]) -> None:
    depth = 37
    weights = [random((rows, depth), "bfloat16", seed) for seed, rows in enumerate(parts)]
    weight = runtime(isa).pack([Stored(part, stored) for part in weights], dtype)
    joined = np.concatenate(weights)
    if stored == "F16":
        joined = joined.astype(np.float16).astype(np.float32)
    padded = np.zeros((-(-len(joined) // 16) * 16, 64), np.float32)
    padded[: len(joined), :depth] = exact(joined, dtype)
    blocks = padded.reshape(-1, 16, 64).transpose(0, 2, 1)  # [block, k, output]
    if dtype == "bfloat16":
        cells = floats(np.frombuffer(weight.buffer, np.uint16)).reshape(-1, 32, 16, 2)
        cells = cells.transpose(0, 1, 3, 2).reshape(-1, 64, 16)
    else:
        cells = np.frombuffer(weight.buffer, np.float32).reshape(-1, 64, 16)
    np.testing.assert_array_equal(cells, blocks)
    assert weight.buffer.nbytes == packed_bytes(len(joined), depth, dtype) == blocks.size * ITEM_BYTES[dtype]


def test_special_halves_are_converted() -> None:
    bits = np.array([0, 0x8000, 1, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0x7C00, 0xFC00, 0x3C01], np.uint16)
    values = bits.view(np.float16).astype(np.float32).reshape(1, -1)
    weight = runtime("portable").pack([Stored(values, "F16")], "float32")
    cells = np.frombuffer(weight.buffer, np.float32).reshape(-1, 16)[: len(bits), 0]
    np.testing.assert_array_equal(cells.view(np.uint32), values.reshape(-1).view(np.uint32))


def test_a_tensor_of_another_size_is_refused() -> None:
    stored = Stored(random((4, 8), "float32"))
    stored.shape = (5, 8)
    with pytest.raises(NativeError, match="128 bytes, expected 160"):
        runtime("portable").pack([stored], "float32")
