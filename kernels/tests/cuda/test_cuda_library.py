"""The library that nvcc builds: it loads where there is no GPU, and says what is missing when it is called."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from paged_kernels import cuda_abi, cuda_build


@pytest.mark.parametrize(("code", "says"), [(35, "driver"), (100, "no CUDA device"), (7, "CUDA error 7$")])
def test_errors_say_what_they_mean(code: int, says: str) -> None:
    with pytest.raises(cuda_abi.CudaKernelError, match=says):
        cuda_abi.check("gated", code)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_library_for_every_gpu_loads_without_one(tmp_path: Path) -> None:
    if cuda_build.find_nvcc() is None:
        pytest.skip("nvcc is not here: set CUDA_HOME")
    path = cuda_build.library_path(tmp_path)
    cuda_build.build(path)
    assert {entry.name for entry in path.parent.iterdir()} == {cuda_build.LIBRARY, cuda_build.NOTE}
    assert cuda_build.built_for(path) == cuda_build.ARCHITECTURES
    check_without_gpu(cuda_abi.load(path))


def check_without_gpu(library: ctypes.CDLL) -> None:
    """What needs no GPU answers; what does says so."""
    assert library.paged_cuda_attention_tile_rows(128) > 0
    assert library.paged_cuda_w4a16_max_rows() == 64
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU here: make gpu-check runs the kernels")
    memory = (ctypes.c_uint16 * 64)()
    code = library.paged_cuda_add(memory, memory, memory, 64, 0, None)
    with pytest.raises(cuda_abi.CudaKernelError, match=r"driver is missing|no CUDA device"):
        cuda_abi.check("add", code)
