"""Where the library of CUDA kernels is looked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from paged_kernels import cuda_build

from pagedcli.ops.cuda_library import library_in


def test_the_library_built_with_the_package_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies beside the compiled module; one that was built from other sources is not taken."""
    beside = SimpleNamespace(origin=str(tmp_path / "site/_native.abi3.so"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: beside)
    in_cache = cuda_build.library_path(tmp_path / "cache")
    old = tmp_path / "site/cuda/0123456789abcdef" / cuda_build.LIBRARY
    old.parent.mkdir(parents=True)
    old.touch()
    assert library_in(tmp_path / "cache") == in_cache
    packaged = cuda_build.library_path(tmp_path / "site")
    packaged.parent.mkdir()
    packaged.touch()
    assert library_in(tmp_path / "cache") == packaged
