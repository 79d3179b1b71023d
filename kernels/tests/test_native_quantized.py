"""Quantized linears of every variant against float64, and the same bits however rows and blocks are shared out."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
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
    isas,
    random,
    runtime,
    struct,
)
from paged_kernels.checks import ShapeError
from paged_kernels.native import NativeError, Program
from paged_kernels.quantized import INT8_BLOCK, ROW_KINDS, QuantizedWeight, alike

rows_as = pytest.mark.parametrize("kind", ["int8", "bfloat16", "float32"])


@dataclass(frozen=True)
class Codes:
    """A quantized tensor as a checkpoint has it."""

    bits: int
    group_size: int
    codes: Array
    scales: Array
    zeros: Array | None
    offsets: Array | None
    g_idx: Array | None = None

    @property
    def groups(self) -> Array:
        return np.arange(self.codes.shape[1]) // self.group_size if self.g_idx is None else self.g_idx

    @property
    def weight(self) -> Array:
        """float64 [out, in]."""
        scales = self.scales.astype(np.float64)
        offsets = self.offsets if self.zeros is None else -scales * self.zeros
        assert offsets is not None
        return scales[:, self.groups] * self.codes + offsets.astype(np.float64)[:, self.groups]

    def rows(self, first: int, last: int) -> Codes:
        zeros = None if self.zeros is None else self.zeros[first:last]
        offsets = None if self.offsets is None else self.offsets[first:last]
        codes, scales = self.codes[first:last], self.scales[first:last]
        return replace(self, codes=codes, scales=scales, zeros=zeros, offsets=offsets)


def make(
    outputs: int,
    depth: int,
    bits: int = 4,
    group: int = 64,
    *,
    offsets: bool = False,
    halves: bool = True,
    act_order: bool = False,
    seed: int = 0,
) -> Codes:
    generator = np.random.default_rng(seed)
    groups = -(-depth // group)
    codes = generator.integers(0, 2**bits, (outputs, depth), dtype=np.uint8)
    scales = (generator.random((outputs, groups)) * 0.1 + 0.01).astype(np.float16 if halves else np.float32)
    zeros = generator.integers(0, 2**bits, (outputs, groups)).astype(np.int16)
    minimum = generator.standard_normal((outputs, groups)).astype(np.float32)
    g_idx = generator.permutation(np.arange(depth) // group).astype(np.int32) if act_order else None
    return Codes(
        bits, group, codes, scales.astype(np.float32),
        None if offsets else zeros, minimum if offsets else None, g_idx,
    )  # fmt: skip


def described(weight: QuantizedWeight) -> ctypes.Structure:
    """PagedQuantizedWeight of a packed weight."""
    fields = {"codes": weight.codes.address, "scales": weight.scales.address, "zeros": weight.zeros.address}
    names = ("out_features", "depth", "group_size", "bits", "half_scales", "float_offsets")
    params = struct("PagedQuantizedWeight")()
    for name, value in (fields | {name: getattr(weight, name) for name in names}).items():
        setattr(params, name, int(value))
    return params


def prepare(isa: str, x: Array, dtype: str, weight: QuantizedWeight, kind: str) -> tuple[Array, int]:
    """Rows for a weight, between guard bytes, and their stride in bytes."""
    group = weight.group_size
    per_group = -(-group // INT8_BLOCK)
    blocks = -(-weight.depth // group) * per_group  # at most
    row_bytes = {"int8": weight.depth + 8 * blocks, "bfloat16": 2 * weight.depth, "float32": 4 * weight.depth}
    stride = -(-row_bytes[kind] // 64) * 64
    out = np.full((len(x) + 2, stride), 0xA5, np.uint8)
    inputs = Guarded(*x.shape, dtype, stride=x.shape[1] + 3).write(x)
    call(
        isa, "prepare", "PagedPrepare", x=inputs, out=out.ctypes.data + stride, rows=len(x),
        columns=0 if weight.columns is None else weight.columns.address, in_features=x.shape[1],
        depth=weight.depth, group_size=group, x_stride=inputs.stride, out_stride=stride,
        dtype=dtype_code(dtype), kind=ROW_KINDS[kind],
    )  # fmt: skip
    assert (out[0] == 0xA5).all()
    assert (out[-1] == 0xA5).all()
    return out, stride


def linear(
    isa: str, dtype: str, kind: str, x: Array, weight: QuantizedWeight, threads: int = 2, **fields: Any
) -> Array:
    outputs = weight.out_features // 2 if fields.get("gated") else weight.out_features
    out_dtype = fields.pop("out_dtype", "float32")
    prepared, stride = prepare(isa, x, dtype, weight, kind)
    out = Guarded(len(x), outputs, out_dtype, stride=outputs + 5)
    params = described(weight)
    call(
        isa, "quantized_linear", "PagedQuantizedLinear", threads, x=prepared.ctypes.data + stride,
        weight=ctypes.addressof(params), out=out, rows=len(x), x_stride=stride, out_stride=out.stride,
        kind=ROW_KINDS[kind], out_dtype=dtype_code(out_dtype), **fields,
    )  # fmt: skip
    return out.read()


def int8_error(x: Array, codes: Codes, block: int) -> Array:
    """What rounding x to 127 steps in blocks may change: half a step of every feature times the weights' sizes."""
    order = np.argsort(codes.groups, kind="stable")
    wide, weight = np.abs(x.astype(np.float64))[:, order], np.abs(codes.weight)[:, order]
    bound = np.zeros((len(x), len(weight)))
    groups = codes.groups[order]
    for group in np.unique(groups):
        inside = np.flatnonzero(groups == group)
        for first in range(0, len(inside), block):
            some = inside[first : first + block]
            steps = wide[:, some].max(1, initial=0.0) / 127
            bound += 0.5001 * steps[:, None] * weight[:, some].sum(1)
    return bound


def check(isa: str, dtype: str, kind: str, x: Array, codes: Codes, got: Array) -> None:
    wide, weight = x.astype(np.float64), codes.weight
    # Terms of a sum with the codes' zero points apart, which is how some ways compute it.
    sizes = np.abs(codes.scales.astype(np.float64)[:, codes.groups]) * 2**codes.bits + np.abs(weight)
    bound = 2.0**-24 * (x.shape[1] + 8) * (np.abs(wide) @ sizes.T) + 1e-30
    if kind == "int8":
        bound += int8_error(x, codes, INT8_BLOCK)
    elif kind == "bfloat16":
        bound += (2.0**-8 + 2.0**-9) * (np.abs(wide) @ np.abs(weight).T)
    assert np.max(np.abs(got - wide @ weight.T) / bound) <= 1.0


GRID = [
    # rows, depth, outputs, bits, group
    (1, 64, 16, 4, 64),
    (3, 70, 7, 4, 32),
    (5, 100, 50, 4, 128),
    (6, 576, 96, 4, 64),
    (17, 130, 33, 4, 1000),
    (33, 320, 40, 8, 16),
    (9, 300, 20, 8, 300),
    (70, 192, 18, 8, 96),
    (2, 33, 15, 8, 32),
    (20, 256, 33, 3, 256),
    (20, 416, 33, 2, 160),
    (8, 96, 48, 6, 16),
    (9, 130, 33, 4, 10),
    (70, 512, 80, 4, 128),
    (41, 1100, 50, 4, 64),
    (14, 832, 24, 8, 64),
]


@isas
@rows_as
@pytest.mark.parametrize(("rows", "depth", "outputs", "bits", "group"), GRID)
@pytest.mark.parametrize("form", ["zeros", "offsets", "act_order"])
def test_linear(
    isa: str, kind: str, rows: int, depth: int, outputs: int, bits: int, group: int, form: str
) -> None:
    codes = make(
        outputs, depth, bits, group, offsets=form == "offsets", act_order=form == "act_order",
        halves=form != "offsets",
    )  # fmt: skip
    x = random((rows, depth), "bfloat16", 1)
    weight = runtime(isa).pack_quantized([codes])
    assert weight.half_scales == (form != "offsets")
    check(isa, "float32", kind, x, codes, linear(isa, "float32", kind, x, weight))
    x = np.random.default_rng(2).standard_normal(x.shape).astype(np.float32)
    if kind == "float32":
        check(isa, "float32", kind, x, codes, linear(isa, "float32", kind, x, weight))


@isas
@rows_as
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_same_bits_whatever_rows_and_threads_share_the_work(
    isa: str, kind: str, bits: int
) -> None:
    codes = make(150, 200, bits, 64, offsets=bits == 8)
    weight, x = runtime(isa).pack_quantized([codes]), random((520, 200), "bfloat16", 1)
    whole = linear(isa, "bfloat16", kind, x, weight)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 31, 33, 64, 65, 70, 257):
        for first in (0, 520 - rows):
            part = linear(isa, "bfloat16", kind, np.ascontiguousarray(x[first : first + rows]), weight)
            np.testing.assert_array_equal(part, whole[first : first + rows])
    for threads in (1, 3):
        np.testing.assert_array_equal(linear(isa, "bfloat16", kind, x, weight, threads), whole)


@isas
@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 16), (4, 256), (8, 48)])
def test_int8_sums_are_those_of_the_portable_kernels(isa: str, bits: int, group: int) -> None:
    codes = make(80, 256, bits, group)
    x = random((37, 256), "bfloat16", 1)
    got, want = (
        linear(name, "bfloat16", "int8", x, runtime(name).pack_quantized([codes]))
        for name in (isa, "portable")
    )
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-5)


@isas
@rows_as
@dtypes
@pytest.mark.parametrize("outputs", [15, 96])
def test_bias_and_residual_are_added_before_the_only_rounding(
    isa: str, kind: str, dtype: str, outputs: int
) -> None:
    codes, x = make(outputs, 64), random((37, 64), "bfloat16", 1)
    weight = runtime(isa).pack_quantized([codes])
    plain = linear(isa, dtype, kind, x, weight)
    bias, added = random((outputs,), "float32", 3), random((37, outputs), dtype, 4)
    residual = Guarded(37, outputs, dtype, stride=outputs + 7).write(added)
    got = linear(
        isa,
        dtype,
        kind,
        x,
        weight,
        bias=bias,
        residual=residual,
        residual_stride=residual.stride,
        out_dtype=dtype,
    )
    np.testing.assert_array_equal(got, exact(plain + bias + added, dtype))


@isas
@rows_as
@dtypes
@pytest.mark.parametrize("activation", [0, 1, 2])
@pytest.mark.parametrize("rows", [1, 19, 100])
def test_gate_and_up_in_one_pass(isa: str, kind: str, dtype: str, activation: int, rows: int) -> None:
    from test_native_linear import activated

    codes, x = make(96 + 32, 64), random((rows, 64), "bfloat16", 1, scale=0.1)
    weight = runtime(isa).pack_quantized([codes])
    sums = linear(isa, dtype, kind, x, weight).astype(np.float64)
    gate, up = sums[:, :64], sums[:, 64:]
    acted = gate * activated(gate, activation)
    got = linear(isa, dtype, kind, x, weight, gated=1, activation=activation, out_dtype=dtype)
    assert_close(got, acted * up, dtype, np.abs(acted * up) + np.abs(up), steps=60)


@isas
@rows_as
def test_a_nan_stays_in_its_row(isa: str, kind: str) -> None:
    weight, x = runtime(isa).pack_quantized([make(48, 64)]), random((40, 64), "bfloat16", 1)
    clean = linear(isa, "bfloat16", kind, x, weight)
    x[17, 5], x[30, 9] = np.nan, np.inf
    spoiled = linear(isa, "bfloat16", kind, x, weight)
    assert np.isnan(spoiled[17]).all()
    assert not np.isfinite(spoiled[30]).any()
    others = np.isin(np.arange(40), (17, 30), invert=True)
    np.testing.assert_array_equal(spoiled[others], clean[others])


@isas
@dtypes
def test_rows_of_a_table(isa: str, dtype: str) -> None:
    for codes in (make(50, 100, 8, 32), make(50, 100, 4, 20 * 16, offsets=True)):
        table = runtime(isa).pack_quantized([codes])
        ids = np.array([0, 49, 17, 17, 16])
        out = Guarded(5, 100, dtype, stride=103)
        params = described(table)
        call(
            isa, "quantized_embedding", "PagedQuantizedEmbedding", table=ctypes.addressof(params), token_ids=ids,
            out=out, rows=5, hidden_size=100, out_stride=103, dtype=dtype_code(dtype),
        )  # fmt: skip
        assert_close(out.read(), codes.weight[ids], dtype, np.abs(codes.weight[ids]) + 4, steps=2)


def test_dequantized_weights_are_the_stored_ones_to_the_bit() -> None:
    codes = make(16, 64, 4, 32)
    table = runtime("portable").pack_quantized([codes])
    out, params, ids = Guarded(16, 64, "float32"), described(table), np.arange(16)
    call(
        "portable", "quantized_embedding", "PagedQuantizedEmbedding", table=ctypes.addressof(params), token_ids=ids,
        out=out, rows=16, hidden_size=64, out_stride=64, dtype=0,
    )  # fmt: skip
    assert codes.zeros is not None
    groups = codes.groups
    want = (codes.codes - codes.zeros[:, groups].astype(np.float32)) * codes.scales[:, groups]
    np.testing.assert_array_equal(out.read(), want)


@isas
def test_parts_are_packed_one_below_the_other(isa: str) -> None:
    codes = make(70, 100, 4, 32)
    whole = runtime(isa).pack_quantized([codes])
    parts = runtime(isa).pack_quantized([codes.rows(0, 20), codes.rows(20, 21), codes.rows(21, 70)])
    for name in ("codes", "scales", "zeros"):
        one, other = (np.frombuffer(getattr(weight, name), np.uint8) for weight in (whole, parts))
        np.testing.assert_array_equal(one, other)
    assert whole.nbytes == 80 * 128 // 2 + 80 * 4 * 3


def test_wide_zero_points_and_scales_are_kept() -> None:
    codes = make(16, 64, 8, 64)
    assert codes.zeros is not None
    codes.zeros[3] = 256
    codes.scales[5] = 0.1
    weight = runtime("portable").pack_quantized([codes])
    assert weight.float_offsets
    assert not weight.half_scales
    x = random((3, 64), "bfloat16", 1)
    check("portable", "float32", "float32", x, codes, linear("portable", "float32", "float32", x, weight))


def test_only_alike_parts_are_packed_together() -> None:
    plain = make(16, 64, 4, 32)
    assert alike(plain, make(32, 64, 3, 32))
    assert alike(plain, replace(plain, g_idx=np.arange(64) // 32))
    for other in (
        make(16, 64, 8, 32), make(16, 64, 4, 64), make(16, 64, 4, 32, offsets=True),
        make(16, 64, 4, 32, act_order=True), make(16, 96, 4, 32),
    ):  # fmt: skip
        assert not alike(plain, other)
        with pytest.raises(ShapeError, match="parts of a quantized weight"):
            runtime("portable").pack_quantized([plain, other])


class Recorded:
    """A program over the rows of a table, run on all of them."""

    def __init__(self, isa: str, dtype: str, x: Array) -> None:
        on = runtime(isa)
        self.rows = len(x)
        self.program = Program(on, dtype, 16)
        self.x = self.program.embedding(on.pack([Stored(x)], dtype))

    def run(self, value: int, *, fuse: bool = True) -> Array:
        self.program.finish(value, fuse=fuse)
        every = np.arange(self.rows)
        blocks = np.arange(-(-self.rows // 16), dtype=np.int32).reshape(1, -1)
        count = np.array([self.rows], np.int32)
        self.program.run(every, every, every, np.array([0, self.rows], np.int32), count, blocks, every)
        return self.program.logits().copy()


@isas
@dtypes
@rows_as
def test_segments_write_columns_of_one_value(isa: str, dtype: str, kind: str) -> None:
    on, x = runtime(isa), random((21, 100), "bfloat16", 1)
    codes = [make(20, 100, 4, 32), make(17, 100, 8, 50, seed=1), make(16, 100, 4, 32, act_order=True, seed=2)]
    dense = random((30, 100), "bfloat16", 3)
    weights = [on.pack_quantized([part]) for part in codes]
    bias = on.upload(random((17,), "float32", 4))
    recorded = Recorded(isa, dtype, x)
    value = recorded.program.linear_segments(
        recorded.x,
        [(weights[0], None), (on.pack([Stored(dense)], dtype), None), (weights[1], bias), (weights[2], None)],
        activation=kind,
        float32_out=True,
    )
    got = recorded.run(value)
    alone = [linear(isa, dtype, kind, x, weight) for weight in weights]
    alone[1] = alone[1] + np.frombuffer(bias, np.float32)[:17]
    np.testing.assert_array_equal(got[:, :20], alone[0])
    np.testing.assert_allclose(got[:, 20:50], x @ dense.T, atol=2e-3)
    np.testing.assert_array_equal(got[:, 50:67], alone[1])
    np.testing.assert_array_equal(got[:, 67:], alone[2])


@isas
@dtypes
@rows_as
def test_rows_are_prepared_once_and_results_fused(isa: str, dtype: str, kind: str) -> None:
    on, x = runtime(isa), random((21, 96), "bfloat16", 1, scale=0.1)
    up, down = (on.pack_quantized([part]) for part in (make(192, 96), make(96, 96)))
    norm = on.upload(np.ones(96, np.float32))

    def record(fuse: bool) -> tuple[Recorded, Array]:
        recorded = Recorded(isa, dtype, x)
        program = recorded.program
        first = program.linear_quantized(recorded.x, down, activation=kind)
        inner = program.gated(program.linear_quantized(recorded.x, up, activation=kind), "silu")
        out = program.linear_quantized(program.add(inner, first), down, activation=kind)
        normed, _ = program.add_rms_norm(out, recorded.x, norm, 1e-5)
        return recorded, recorded.run(
            program.linear_quantized(normed, down, activation=kind, float32_out=True), fuse=fuse
        )

    fused, got = record(True)
    plain, want = record(False)
    lines = fused.program.describe().splitlines()
    # 96 features are padded to 128: rows are always prepared, once for both linears over the table's rows.
    assert sum(line.startswith("prepare") for line in lines) == 3
    assert "quantized_linear+gated" in fused.program.describe()
    assert len(lines) == len(plain.program.describe().splitlines()) - 1
    np.testing.assert_allclose(got, want, atol=1e-4 if dtype == kind == "float32" else 0.35)


def test_rows_that_are_right_already_are_not_prepared() -> None:
    on = runtime("portable")
    recorded = Recorded("portable", "float32", random((3, 64), "float32", 1))
    weight = on.pack_quantized([make(16, 64)])
    value = recorded.program.linear_quantized(recorded.x, weight, activation="float32")
    recorded.run(value)
    assert "prepare" not in recorded.program.describe()


@isas
@dtypes
def test_a_quantized_table_is_embedding_and_head(isa: str, dtype: str) -> None:
    codes = make(50, 64, 8, 32)
    on = runtime(isa)
    table = on.pack_quantized([codes])
    program = Program(on, dtype, 16)
    program.finish(program.linear_quantized(program.embedding(table), table, float32_out=True))
    ids = np.array([3, 49, 0])
    one = np.array([[0]], np.int32)
    program.run(ids, ids * 0, ids * 0, np.array([0, 3], np.int32), np.array([3], np.int32), one, np.arange(3))
    x = exact(codes.weight[ids], dtype)
    check(isa, dtype, "int8", x, codes, program.logits())
    with pytest.raises(NativeError, match="token id 50"):
        program.run(
            ids + 1, ids * 0, ids * 0, np.array([0, 3], np.int32), np.array([3], np.int32), one, np.arange(3)
        )


def test_a_weight_of_another_size_is_refused() -> None:
    on = runtime("portable")
    weight = on.pack_quantized([make(16, 64)])
    recorded = Recorded("portable", "float32", random((3, 80), "float32", 1))
    with pytest.raises(NativeError, match="64 padded input features, its input 80"):
        recorded.program.linear_quantized(recorded.x, weight)
    with pytest.raises(NativeError, match="bytes, expected"):
        recorded.program.linear_quantized(recorded.x, replace(weight, out_features=17))
    native = recorded.program._native
    with pytest.raises(NativeError, match="columns 10 to 26 of a value of 20"):
        native.quantized_linear(
            recorded.x, 0, None, native.allocate(recorded.x, 20, False), 10, False, *weight.arguments
        )
