"""Paged attention of the CUDA kernels, emulated: against float64, and the same bits by every way."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from attention_support import Case, Memory, run

BOUNDS = {"bfloat16": 1.6e-2, "float16": 2e-3}


def assert_right(case: Case, library: ctypes.CDLL, decode: tuple[int, ...]) -> None:
    memory = Memory(case)
    got, expected = run(library, memory, decode=decode).double(), memory.expected()
    assert not got.isnan().any()
    assert (got - expected).abs().max() <= BOUNDS[case.dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes(emulated: ctypes.CDLL, head_dim: int, dtype: str) -> None:
    case = Case(((1, 77), (1, 1), (19, 40)), head_dim=head_dim, dtype=dtype)
    assert_right(case, emulated, (0, 1))


@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (8, 1), (7, 1), (17, 1), (24, 2)])
def test_groups(emulated: ctypes.CDLL, heads: tuple[int, int]) -> None:
    case = Case(((1, 70), (9, 33)), num_heads=heads[0], num_kv_heads=heads[1])
    assert_right(case, emulated, (0,))


@pytest.mark.parametrize("block_size", [1, 3, 16, 100, 256])
@pytest.mark.parametrize("window", [0, 1, 40, 1000])
def test_pages_and_windows(emulated: ctypes.CDLL, block_size: int, window: int) -> None:
    case = Case(((1, 150), (1, 64), (1, 65), (30, 130)), block_size=block_size, window=window)
    assert_right(case, emulated, (0, 1, 2))


def test_same_bits_by_every_way(emulated: ctypes.CDLL) -> None:
    """The last row of a sequence, whoever computes it: decode, prefill, other pages, other company."""
    alone = Case(((1, 200),), split=32)
    want = run(emulated, Memory(alone), decode=(0,))
    for parallel in (2, 5):
        assert torch.equal(run(emulated, Memory(alone), decode=(0,), parallel=parallel), want)
    assert torch.equal(run(emulated, Memory(alone)), want)
    for new in (2, 33, 200):
        assert torch.equal(run(emulated, Memory(replace(alone, sequences=((new, 200),))))[-1:], want)
    for block_size in (1, 7, 256):
        assert torch.equal(run(emulated, Memory(replace(alone, block_size=block_size)), decode=(0,)), want)


@pytest.mark.parametrize("decode", [(0, 1, 2), ()])
def test_nan_stays_nan_and_in_its_own_sequence(emulated: ctypes.CDLL, decode: tuple[int, ...]) -> None:
    """Zeros in its place would be taken for a result: a request whose numbers are none must fail."""
    case = Case(((1, 50), (1, 33), (1, 64)), head_dim=80, num_heads=7, num_kv_heads=1, block_size=3)
    memory = Memory(case)
    sound = run(emulated, memory, decode=decode)
    memory.keys[memory.table[1, 5]] = torch.nan
    got = run(emulated, memory, decode=decode)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], sound[[0, 2]])


def test_unknown_shapes_are_refused(emulated: ctypes.CDLL) -> None:
    from paged_kernels.cuda_abi import CudaKernelError

    with pytest.raises(CudaKernelError, match="no kernel for this shape"):
        run(emulated, Memory(Case(((1, 5),), head_dim=48)), decode=(0,))
