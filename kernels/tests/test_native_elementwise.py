"""Embedding, norms, rotation with cache write, gated activation, sum and row selection against float64."""

from __future__ import annotations

import numpy as np
import pytest
from native_support import (
    Array,
    Guarded,
    assert_close,
    call,
    dtype_code,
    dtypes,
    exact,
    isas,
    packed,
    random,
)
from test_native_linear import activated

SIZES = [1, 2, 15, 16, 17, 64, 100]


@isas
@dtypes
@pytest.mark.parametrize("size", [1, 5, 16, 33])
def test_embedding(isa: str, dtype: str, size: int) -> None:
    table = random((50, size), dtype)
    ids = np.array([0, 49, 15, 16, 17, 15], np.int64)
    out = Guarded(6, size, dtype, stride=size + 3)
    call(
        isa, "embedding", "PagedEmbedding", table=packed(isa, table, dtype), token_ids=ids, out=out, rows=6,
        hidden_size=size, out_stride=out.stride, dtype=dtype_code(dtype),
    )  # fmt: skip
    np.testing.assert_array_equal(out.read(), table[ids])


@isas
@dtypes
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("residual", [False, True])
def test_norm(isa: str, dtype: str, size: int, residual: bool) -> None:
    x, weight = random((9, size), dtype, 1), random((size,), "float32", 2)
    inputs, out = Guarded(9, size, dtype, size + 1).write(x), Guarded(9, size, dtype, size + 2)
    other, total = Guarded(9, size, dtype, size + 3), Guarded(9, size, dtype, size + 4)
    fields = {}
    if residual:
        added = random((9, size), dtype, 3)
        fields = {
            "residual": other.write(added), "residual_stride": other.stride, "sum": total, "sum_stride": total.stride
        }  # fmt: skip
        x = exact(x + added, dtype)
    call(
        isa, "norm", "PagedNorm", x=inputs, weight=weight, out=out, rows=9, features=size,
        x_stride=inputs.stride, out_stride=out.stride, eps=1e-5, dtype=dtype_code(dtype), **fields,
    )  # fmt: skip
    if residual:
        np.testing.assert_array_equal(total.read(), x)
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight
    assert_close(out.read(), want, dtype, np.abs(want), steps=size / 8 + 6)


@isas
@dtypes
def test_norm_may_write_over_its_inputs(isa: str, dtype: str) -> None:
    x, added, weight = random((9, 50), dtype, 1), random((9, 50), dtype, 2), random((50,), "float32", 3)
    results = []
    for swap in (None, False, True):
        first, second = Guarded(9, 50, dtype).write(x), Guarded(9, 50, dtype).write(added)
        out, total = Guarded(9, 50, dtype), Guarded(9, 50, dtype)
        if swap is not None:
            out, total = (second, first) if swap else (first, second)
        call(
            isa, "norm", "PagedNorm", x=first, residual=second, weight=weight, out=out, sum=total, rows=9,
            features=50, x_stride=50, residual_stride=50, out_stride=50, sum_stride=50, eps=1e-5,
            dtype=dtype_code(dtype),
        )  # fmt: skip
        results.append((out.read(), total.read()))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@isas
@dtypes
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", [0, 1, 2])
def test_gated(isa: str, dtype: str, size: int, activation: int) -> None:
    gate_up = random((5, 2 * size), dtype, 1, scale=3.0)
    inputs, out = Guarded(5, 2 * size, dtype, 2 * size + 3).write(gate_up), Guarded(5, size, dtype, size + 1)
    call(
        isa, "gated", "PagedGated", gate_up=inputs, out=out, rows=5, features=size, in_stride=inputs.stride,
        out_stride=out.stride, activation=activation, dtype=dtype_code(dtype),
    )  # fmt: skip
    gate, up = gate_up[:, :size].astype(np.float64), gate_up[:, size:]
    want = gate * activated(gate, activation) * up
    # Below a hundredth of the gate the rounding of 1 + tanh or 1 + erf counts, not that of the result.
    assert_close(out.read(), want, dtype, np.abs(gate * up), steps=8)


@isas
@dtypes
@pytest.mark.parametrize("value", [-1e4, -100.0, -88.5, -87.0, 0.0, 88.0, 1e4, np.inf, -np.inf, np.nan])
def test_silu_of_extreme_gates(isa: str, dtype: str, value: float) -> None:
    gate_up = exact(np.array([[value] * 3 + [1.0] * 3]), dtype)
    out = Guarded(1, 3, dtype)
    call(
        isa, "gated", "PagedGated", gate_up=Guarded(1, 6, dtype).write(gate_up), out=out, rows=1, features=3,
        in_stride=6, out_stride=3, activation=0, dtype=dtype_code(dtype),
    )  # fmt: skip
    if np.isnan(value) or value == -np.inf:
        assert np.isnan(out.read()).all()  # -inf * 0, as torch has it
    else:
        wide = gate_up[:, :3].astype(np.float64)
        want = 0.0 if value == -1e4 else wide / (1.0 + np.exp(-wide))
        np.testing.assert_allclose(out.read(), want, rtol=1e-2, atol=1e-35)


@isas
@dtypes
def test_add_and_select(isa: str, dtype: str) -> None:
    x, other = random((7, 37), dtype, 1), random((7, 37), dtype, 2)
    first, second, out = (
        Guarded(7, 37, dtype, 40).write(x),
        Guarded(7, 37, dtype, 41).write(other),
        Guarded(7, 37, dtype, 42),
    )
    call(
        isa, "add", "PagedAdd", x=first, residual=second, out=out, rows=7, features=37, x_stride=40,
        residual_stride=41, out_stride=42, dtype=dtype_code(dtype),
    )  # fmt: skip
    np.testing.assert_array_equal(out.read(), exact(x + other, dtype))
    rows, picked = np.array([6, 0, 0, 3], np.int64), Guarded(4, 37, dtype, 38)
    call(
        isa, "select", "PagedSelect", x=first, row_index=rows, out=picked, rows=4, features=37, x_stride=40,
        out_stride=38, dtype=dtype_code(dtype),
    )  # fmt: skip
    np.testing.assert_array_equal(picked.read(), x[rows])


def rotated(heads: Array, cos: Array, sin: Array) -> Array:
    half = heads.shape[-1] // 2
    low, high = heads[..., :half], heads[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def head_normed(heads: Array, weight: Array, eps: float) -> Array:
    return heads / np.sqrt((heads**2).mean(-1, keepdims=True) + eps) * weight


@isas
@dtypes
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(3, 1, 64), (4, 4, 6), (14, 2, 80), (1, 1, 2)]
)
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_cache_write(
    isa: str, dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, normed: bool
) -> None:
    rows, num_blocks, half = 5, -(-40 // block_size), head_dim // 2
    heads = num_heads + 2 * num_kv_heads
    qkv = random((rows, heads * head_dim), dtype, 1)
    angles = np.random.default_rng(2).uniform(-9.0, 9.0, (20, half))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    positions = np.array([3, 4, 19, 0, 7], np.int64)
    slots = np.array([3, 4, 39, 31, 8], np.int64)
    norms = [random((head_dim,), "float32", seed) for seed in (3, 4)] if normed else [None, None]
    q = Guarded(rows, num_heads * head_dim, dtype, num_heads * head_dim + 3)
    cells = num_blocks * num_kv_heads * block_size
    key, value = Guarded(cells, head_dim, dtype), Guarded(cells, head_dim, dtype)
    empty = key.read()
    call(
        isa, "rope", "PagedRope", qkv=Guarded(*qkv.shape, dtype).write(qkv), positions=positions,
        slot_mapping=slots, cos=cos, sin=sin, q_norm=norms[0], k_norm=norms[1], q=q, key=key, value=value,
        rows=rows, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
        qkv_stride=qkv.shape[1], q_stride=q.stride, norm_eps=1e-6, dtype=dtype_code(dtype),
    )  # fmt: skip
    wide = qkv.astype(np.float64).reshape(rows, heads, head_dim)
    parts = [wide[:, :num_heads], wide[:, num_heads : num_heads + num_kv_heads]]
    if normed:
        parts = [head_normed(part, norm, 1e-6) for part, norm in zip(parts, norms, strict=True)]
    c, s = (table.astype(np.float64)[positions][:, None] for table in (cos, sin))
    bound = [np.abs(part).max() * 2 for part in parts]
    assert_close(q.read(), rotated(parts[0], c, s).reshape(rows, -1), dtype, bound[0], steps=20)
    head = np.arange(num_kv_heads)
    written = ((slots // block_size * num_kv_heads)[:, None] + head) * block_size + (slots % block_size)[
        :, None
    ]
    assert_close(key.read()[written], rotated(parts[1], c, s), dtype, bound[1], steps=20)
    np.testing.assert_array_equal(value.read()[written], wide[:, num_heads + num_kv_heads :])
    untouched = np.setdiff1d(np.arange(cells), written)
    np.testing.assert_array_equal(key.read()[untouched], empty[untouched])
    np.testing.assert_array_equal(value.read()[untouched], empty[untouched])
