"""The library of the CUDA kernels for the tests beside this file."""

from __future__ import annotations

import ctypes

import pytest
from emulated_library import emulated_library


@pytest.fixture(scope="session")
def emulated() -> ctypes.CDLL:
    """On the emulator."""
    return emulated_library()
