"""Rows, norms, gated activations, sums and RoPE of the CUDA kernels, emulated, against the reference in float64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from attention_support import DTYPES, numbers
from paged_kernels import cuda_abi, reference
from torch import Tensor

BOUNDS = {"bfloat16": 8e-3, "float16": 1e-3}
both = pytest.mark.parametrize("dtype", list(DTYPES))


def assert_near(got: Tensor, expected: Tensor, dtype: str) -> None:
    assert not got.isnan().any()
    assert (got.double() - expected).abs().max() <= BOUNDS[dtype] * max(1.0, float(expected.abs().max()))


@both
def test_rows(emulated: ctypes.CDLL, dtype: str) -> None:
    table, ids = numbers(11, 72, seed=1, dtype=DTYPES[dtype]), torch.tensor([10, 0, 3, 3])
    out = torch.empty(4, 72, dtype=table.dtype)
    code = emulated.paged_cuda_rows(
        out.data_ptr(), table.data_ptr(), ids.data_ptr(), 4, 72, cuda_abi.DTYPES[dtype], None
    )
    assert code == 0
    assert torch.equal(out, table[ids])


@both
@pytest.mark.parametrize("features", [8, 576, 2048, 4104])
def test_rms_norm(emulated: ctypes.CDLL, dtype: str, features: int) -> None:
    x, residual = (numbers(3, features, seed=seed, dtype=DTYPES[dtype]) for seed in (1, 2))
    weight = numbers(features, seed=3, dtype=DTYPES[dtype])
    out, total = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    arguments = (weight.data_ptr(), 3, features, 1e-5, cuda_abi.DTYPES[dtype], None)
    assert emulated.paged_cuda_rms_norm(out.data_ptr(), None, x.data_ptr(), None, *arguments) == 0
    assert_near(out, reference.rms_norm(x.double(), weight.double(), 1e-5), dtype)
    assert (
        emulated.paged_cuda_rms_norm(
            out.data_ptr(), total.data_ptr(), x.data_ptr(), residual.data_ptr(), *arguments
        )
        == 0
    )
    assert torch.equal(total, x + residual)
    assert_near(out, reference.rms_norm(total.double(), weight.double(), 1e-5), dtype)


@both
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated(emulated: ctypes.CDLL, dtype: str, activation: str) -> None:
    gate_up = numbers(3, 2 * 2056, seed=4, dtype=DTYPES[dtype])
    out = torch.full((3, 2056), torch.nan, dtype=gate_up.dtype)
    index = ("silu", "gelu", "gelu_tanh").index(activation)
    code = emulated.paged_cuda_gated(
        out.data_ptr(), gate_up.data_ptr(), 3, 2056, index, cuda_abi.DTYPES[dtype], None
    )
    assert code == 0
    assert_near(out, reference.gated(gate_up.double(), activation), dtype)


@both
def test_add(emulated: ctypes.CDLL, dtype: str) -> None:
    x, y = (numbers(5, 1032, seed=seed, dtype=DTYPES[dtype]) for seed in (1, 2))
    want = x + y
    code = emulated.paged_cuda_add(
        x.data_ptr(), x.data_ptr(), y.data_ptr(), x.numel(), cuda_abi.DTYPES[dtype], None
    )
    assert code == 0
    assert torch.equal(x, want)


@both
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "heads", "block_size"),
    [(64, (9, 3), 16), (80, (2, 1), 1), (96, (4, 4), 7), (128, (32, 8), 16), (256, (3, 1), 256)],
)
def test_rope_kv_write(
    emulated: ctypes.CDLL, dtype: str, norms: bool, head_dim: int, heads: tuple[int, int], block_size: int
) -> None:
    num_heads, num_kv_heads = heads
    kind, rows = DTYPES[dtype], 5
    qkv = numbers(rows, (num_heads + 2 * num_kv_heads) * head_dim, seed=1, dtype=kind)
    cos, sin = (
        numbers(40, head_dim // 2, seed=2, dtype=torch.float32),
        numbers(40, head_dim // 2, seed=3, dtype=torch.float32),
    )
    weights = [numbers(head_dim, seed=seed, dtype=kind) for seed in (4, 5)] if norms else [None, None]
    positions, slots = torch.tensor([3, 39, 0, 17, 18]), torch.randperm(3 * block_size + 5)[:rows]
    num_blocks = -(-(3 * block_size + 5) // block_size)
    cache = (num_blocks, num_kv_heads, block_size, head_dim)
    keys, values = torch.zeros(cache, dtype=kind), torch.zeros(cache, dtype=kind)
    q = torch.full((rows, num_heads, head_dim), torch.nan, dtype=kind)
    arguments = cuda_abi.PagedRope(
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        positions.data_ptr(),
        slots.data_ptr(),
        *(None if weight is None else weight.data_ptr() for weight in weights),
        q.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        rows,
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        cuda_abi.DTYPES[dtype],
        1e-6,
    )
    assert emulated.paged_cuda_rope_kv_write(arguments, None) == 0

    all_heads = qkv.double().view(rows, -1, head_dim)
    parts = torch.split(all_heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    rotated = []
    for part, weight in zip(parts[:2], weights, strict=True):
        normed = part if weight is None else reference.rms_norm(part, weight.double(), 1e-6)
        rotated.append(reference.rotate(normed, cos[positions].double(), sin[positions].double()))
    assert_near(q, rotated[0], dtype)
    for got, new in ((keys, rotated[1]), (values, parts[2])):
        expected = torch.zeros(cache, dtype=torch.float64)
        reference.write_kv(expected, new, slots)
        assert_near(got, expected, dtype)


def test_odd_sizes_are_refused(emulated: ctypes.CDLL) -> None:
    assert emulated.paged_cuda_rows(None, None, None, 1, 12, 0, None) == cuda_abi.NO_KERNEL
    assert emulated.paged_cuda_gated(None, None, 1, 12, 0, 0, None) == cuda_abi.NO_KERNEL
    assert emulated.paged_cuda_add(None, None, None, 12, 0, None) == cuda_abi.NO_KERNEL
