"""Our CUDA kernels on the hardware: built with nvcc for this GPU, over the op grid and against torch's ops."""

from __future__ import annotations

import ctypes

import pytest
import torch
from paged_kernels import cuda_abi, cuda_build

from pagedcli.checkpoint.sources import cache_folder
from pagedcli.ops.cuda_library import library_in
from pagedcli.ops.cuda_ops import CudaOps
from pagedcli.ops.cuda_start import wrong_kernels
from pagedcli.ops.torch_ops import TorchOps
from tests import op_grid

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
DTYPES = ("bfloat16", "float16")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    built = library_in(cache_folder())
    if built.is_file():
        return cuda_abi.load(built)
    if cuda_build.find_nvcc() is None:
        pytest.skip("nvcc is not here: set CUDA_HOME")
    major, minor = torch.cuda.get_device_capability()
    path = tmp_path_factory.mktemp("cuda") / cuda_build.LIBRARY
    cuda_build.build(path, [10 * major + minor])
    return cuda_abi.load(path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_agrees_with_torch(library: ctypes.CDLL, dtype: str) -> None:
    assert wrong_kernels(CudaOps("cuda", dtype, library), TorchOps("cuda", dtype)) == {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", op_grid.ATTENTION, ids=lambda case: case.label)
def test_attention(library: ctypes.CDLL, dtype: str, case: op_grid.AttentionCase) -> None:
    op_grid.check_attention(CudaOps("cuda", dtype, library), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "features"), [(1, 33), (17, 576), (300, 1000)])
def test_elementwise(library: ctypes.CDLL, dtype: str, rows: int, features: int) -> None:
    op_grid.check_elementwise(CudaOps("cuda", dtype, library), rows, features)
