"""The CUDA kernels on the emulator, built once a session."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import pytest
from paged_kernels import cuda_abi

ROOT = Path(__file__).resolve().parents[3]


def _builder():
    spec = importlib.util.spec_from_file_location("build_emulated", ROOT / "tools/build_emulated.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library; skips where the toolkit's headers are not installed."""
    builder = _builder()
    if builder.toolkit_headers() is None:
        pytest.skip("no CUDA toolkit here (cuda_fp16.h): set CUDA_HOME")
    return cuda_abi.load(builder.build(tmp_path_factory.mktemp("emulated")))
