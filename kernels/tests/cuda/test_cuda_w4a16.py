"""4-bit products of the CUDA kernels, emulated, against float64 on the weights as they are rounded."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from attention_support import DTYPES, numbers
from paged_kernels import cuda_abi, cuda_pack
from torch import Tensor

BOUNDS = {"bfloat16": 4e-3, "float16": 5e-4}


@dataclass
class Weight:
    """A quantized weight in the kernels' layout, and as numbers."""

    dtype: str
    n: int
    k: int
    group: int
    has_bias: bool = True

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.n, self.k, self.group])
        kind, groups = DTYPES[self.dtype], self.k // self.group
        codes = rng.integers(0, 16, (self.n, self.k), dtype=np.uint8)
        zeros = rng.integers(0, 16, (groups, self.n))
        scales = rng.random((groups, self.n)) * 0.02 + 0.01
        self.codes = torch.from_numpy(cuda_pack.pack_codes(codes).view(np.int32))
        self.scales = torch.from_numpy(scales).to(kind)
        self.zeros = torch.from_numpy(zeros + cuda_pack.ZERO_BIAS[self.dtype]).to(kind)
        self.bias = numbers(self.n, seed=7, dtype=kind) if self.has_bias else None
        wide_codes = torch.from_numpy(codes.astype(np.float64))
        per_input = [torch.from_numpy(zeros).double(), self.scales.double()]
        zero, scale = (part.T.repeat_interleave(self.group, 1) for part in per_input)
        self.numbers = ((wide_codes - zero) * scale).to(kind)

    def abi(self) -> cuda_abi.PagedCodes:
        bias = None if self.bias is None else self.bias.data_ptr()
        addresses = (self.codes.data_ptr(), self.scales.data_ptr(), self.zeros.data_ptr(), bias)
        return cuda_abi.PagedCodes(*addresses, self.n, self.k, self.group, cuda_abi.DTYPES[self.dtype])


def product(library: ctypes.CDLL, weight: Weight, x: Tensor, scratch: Tensor | None = None) -> Tensor:
    if scratch is None:
        scratch = torch.zeros(library.paged_cuda_w4a16_scratch(weight.abi()), dtype=torch.uint8)
    y = torch.full((len(x), weight.n), torch.nan, dtype=x.dtype)
    code = library.paged_cuda_w4a16(
        weight.abi(), y.data_ptr(), x.data_ptr(), len(x), scratch.data_ptr(), None
    )
    cuda_abi.check("w4a16", code)
    return y


def assert_right(library: ctypes.CDLL, weight: Weight, m: int) -> None:
    x = numbers(m, weight.k, seed=m, dtype=DTYPES[weight.dtype])
    expected = x.double() @ weight.numbers.double().T
    if weight.bias is not None:
        expected += weight.bias.double()
    got = product(library, weight, x)
    assert not got.isnan().any()
    assert (got.double() - expected).abs().max() <= BOUNDS[weight.dtype] * expected.abs().max()


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("m", [1, 3, 8, 9, 16, 17, 33, 64])
def test_rows(emulated: ctypes.CDLL, dtype: str, m: int) -> None:
    assert_right(emulated, Weight(dtype, n=144, k=320, group=64), m)


@pytest.mark.parametrize("group", [16, 32, 128, 640])
@pytest.mark.parametrize("m", [2, 20])
def test_groups(emulated: ctypes.CDLL, group: int, m: int) -> None:
    assert_right(emulated, Weight("bfloat16", n=80, k=640, group=group, has_bias=False), m)


def test_shared_inputs(emulated: ctypes.CDLL) -> None:
    """Enough inputs that several blocks share a tile of outputs; the scratch serves again and again."""
    weight = Weight("bfloat16", n=16, k=2048, group=128)
    scratch = torch.zeros(emulated.paged_cuda_w4a16_scratch(weight.abi()), dtype=torch.uint8)
    assert len(scratch) > 4096  # there are sums in it
    x = numbers(10, weight.k, seed=1, dtype=torch.bfloat16)
    first = product(emulated, weight, x, scratch)
    expected = x.double() @ weight.numbers.double().T + weight.bias.double()
    assert (first.double() - expected).abs().max() <= BOUNDS["bfloat16"] * expected.abs().max()
    assert torch.equal(product(emulated, weight, x, scratch), first)
    assert torch.equal(product(emulated, weight, x[:9], scratch), first[:9])


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_dequantize(emulated: ctypes.CDLL, dtype: str) -> None:
    weight = Weight(dtype, n=48, k=192, group=32)
    out = torch.full((weight.n, weight.k), torch.nan, dtype=DTYPES[dtype])
    assert emulated.paged_cuda_w4a16_dequantize(weight.abi(), out.data_ptr(), None) == 0
    assert torch.equal(out, weight.numbers)


def test_columns(emulated: ctypes.CDLL) -> None:
    x, order = numbers(3, 300, seed=1, dtype=torch.float16), torch.randperm(300).to(torch.int32)
    out = torch.empty_like(x)
    assert emulated.paged_cuda_columns(out.data_ptr(), x.data_ptr(), order.data_ptr(), 3, 300, None) == 0
    assert torch.equal(out, x[:, order.long()])


@pytest.mark.parametrize(
    ("n", "k", "group", "m"), [(24, 64, 64, 1), (16, 96, 32, 1), (16, 128, 24, 1), (16, 64, 64, 65)]
)
def test_other_shapes_are_refused(emulated: ctypes.CDLL, n: int, k: int, group: int, m: int) -> None:
    assert m > emulated.paged_cuda_w4a16_max_rows() or not cuda_pack.fits(n, k, group)
    codes = cuda_abi.PagedCodes(None, None, None, None, n, k, group, 0)
    assert emulated.paged_cuda_w4a16(codes, None, None, m, None, None) == cuda_abi.NO_KERNEL
