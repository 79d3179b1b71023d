"""Our CUDA kernels: those of `paged build-cuda` if it has run, else built once for the GPU that is here."""

from __future__ import annotations

import ctypes

import pytest
import torch
from paged_kernels import cuda_abi, cuda_build

from pagedcli.checkpoint.sources import cache_folder
from pagedcli.ops.cuda_library import library_in


@pytest.fixture(scope="session")
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
