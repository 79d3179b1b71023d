"""Where the library of CUDA kernels is looked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from paged_kernels import cuda_build

from pagedcli.errors import MissingDependencyError, how_to_install
from pagedcli.ops import select
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


@pytest.mark.parametrize(
    ("devices", "torch", "says"),
    [
        (None, None, "NVIDIA's driver is not here (libcuda.so.1)"),
        (0, None, "NVIDIA's driver finds no GPU"),
        (1, None, f"there is a GPU, and torch is not installed: {how_to_install('cuda')}"),
        (1, ("2.13.0+cpu", None, False), "there is a GPU, and torch 2.13.0+cpu is a build without CUDA"),
        (1, ("2.11.0", "13.0", False), "there is a GPU, and torch 2.11.0 for CUDA 13.0 cannot use it"),
        (1, ("2.11.0", "13.0", True), None),
    ],
)
def test_what_is_missing_first_for_a_cuda_device(
    monkeypatch: pytest.MonkeyPatch,
    devices: int | None,
    torch: tuple[str, str | None, bool] | None,
    says: str | None,
) -> None:
    monkeypatch.setattr(select, "_count_devices", lambda: devices)
    monkeypatch.setattr(select, "torch_is_installed", lambda: torch is not None)
    version, cuda, works = torch or ("", None, False)
    monkeypatch.setattr("pagedcli.ops.torch_ops.cuda_version", lambda: (version, cuda))
    monkeypatch.setattr("pagedcli.ops.torch_ops.cuda_is_available", lambda: works)
    assert select.has_cuda() is (says is None)
    if says is None:
        select.require_cuda("--device cuda")
        return
    with pytest.raises(
        MissingDependencyError, match=r"^--device cuda cannot be used here: .*--device cpu$"
    ) as caught:
        select.require_cuda("--device cuda")
    assert says in str(caught.value)
