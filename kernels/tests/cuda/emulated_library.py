"""The CUDA kernels on the emulator, for tests: built once into build/emulated, skipped where it cannot be."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from pathlib import Path

import pytest
from paged_kernels import cuda_abi

ROOT = Path(__file__).resolve().parents[3]


@cache
def emulated_library() -> ctypes.CDLL:
    """The library; skips the test where the toolkit's headers or a compiler are not installed."""
    spec = importlib.util.spec_from_file_location("build_emulated", ROOT / "tools/build_emulated.py")
    assert spec is not None
    assert spec.loader is not None
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    if builder.toolkit_headers() is None:
        pytest.skip("no CUDA toolkit here (cuda_fp16.h): set CUDA_HOME")
    return cuda_abi.load(builder.build(ROOT / "build/emulated"))
