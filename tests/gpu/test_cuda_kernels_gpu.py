"""Our CUDA kernels on the hardware: built with nvcc for this GPU, over the op grid and against torch's ops."""

from __future__ import annotations

import ctypes

import pytest
import torch

from pagedcli.ops.cuda_ops import CudaOps
from pagedcli.ops.cuda_start import TriedSizes, wrong_kernels
from pagedcli.ops.torch_ops import TorchOps
from pagedcli.runtime.cuda_sampler import CudaSampler
from pagedcli.runtime.samplers import sampler_for
from tests import op_grid
from tests.gpu.test_sampler_gpu import VOCAB_SIZE, draw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
DTYPES = ("bfloat16", "float16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "vocab_size"),
    [(64, 49_152), (80, 120_000), (96, 128_256), (128, 151_936), (256, 300_000)],
)
def test_every_kernel_agrees_with_torch(
    library: ctypes.CDLL, dtype: str, head_dim: int, vocab_size: int
) -> None:
    """With every head size, and with vocabularies below and above what takes more shared memory than a block has."""
    ours, sizes = CudaOps("cuda", dtype, library), TriedSizes(head_dim, vocab_size)
    assert wrong_kernels(ours, TorchOps("cuda", dtype), sizes) == {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", op_grid.ATTENTION, ids=lambda case: case.label)
def test_attention(library: ctypes.CDLL, dtype: str, case: op_grid.AttentionCase) -> None:
    op_grid.check_attention(CudaOps("cuda", dtype, library), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "features"), [(1, 33), (17, 576), (300, 1000)])
def test_elementwise(library: ctypes.CDLL, dtype: str, rows: int, features: int) -> None:
    op_grid.check_elementwise(CudaOps("cuda", dtype, library), rows, features)


def test_sampled_tokens_are_those_of_the_cpu(library: ctypes.CDLL) -> None:
    ours = sampler_for(CudaOps("cuda", "bfloat16", library), VOCAB_SIZE)
    assert isinstance(ours, CudaSampler)
    rows = list(range(64))
    assert draw("cuda", rows, sampler=ours) == draw("cpu", rows)
    assert draw("cuda", rows[::-3], sampler=ours)[0] == draw("cpu", rows)[0][::-3]
