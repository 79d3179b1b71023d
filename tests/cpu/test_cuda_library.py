"""Where the library of CUDA kernels is looked for, and how its build fails. `nvcc` is a script that stands in."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from paged_kernels import cuda_build

from pagedcli.errors import MissingDependencyError, how_to_install
from pagedcli.ops import select
from pagedcli.ops.cuda_library import build_library, library_in


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


Script = Callable[[str], Path]


@pytest.fixture
def nvcc(tmp_path: Path) -> Script:
    """A program of these lines of sh; `$out` is the file that it is asked for."""

    def write(lines: str) -> Path:
        program = tmp_path / "nvcc"
        program.write_text(f"#!/bin/sh\nfor out; do :; done\n{lines}\n")
        program.chmod(0o755)
        return program

    return write


def test_a_build_leaves_the_library_alone(tmp_path: Path, nvcc: Script) -> None:
    library = tmp_path / "cache/cuda/digest/lib.so"
    build_library(library, [90], nvcc('echo built > "$out"'))
    assert library.read_text() == "built\n"
    assert {path.name for path in library.parent.iterdir()} == {library.name, cuda_build.NOTE}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("echo one >&2; echo two >&2; exit 2", "nvcc failed: one | two"),
        ("kill -9 $$", "nvcc failed: exit code -9"),
        (
            "echo \"Value 'c++20' is not defined for option 'std'\" >&2; exit 1",
            "install the CUDA toolkit 12 or newer",
        ),
        (
            'case "$*" in *-shared*) echo no room >&2; exit 1;; esac; echo built > "$out"',
            "nvcc failed: no room",
        ),
    ],
)
def test_a_failing_compiler_is_told_and_leaves_nothing(
    tmp_path: Path, nvcc: Script, lines: str, said: str
) -> None:
    library = tmp_path / "cache/lib.so"
    library.parent.mkdir()
    library.write_text("of before")
    with pytest.raises(MissingDependencyError) as caught:
        build_library(library, [90], nvcc(lines))
    assert said in str(caught.value)
    assert library.read_text() == "of before"
    assert list(library.parent.iterdir()) == [library]


@pytest.mark.parametrize("kind", ["missing", "folder", "not a program"])
def test_a_compiler_that_cannot_be_run_is_named(tmp_path: Path, kind: str) -> None:
    program = tmp_path / "nvcc"
    if kind == "folder":
        program.mkdir()
    elif kind == "not a program":
        program.write_text("text")
    with pytest.raises(MissingDependencyError, match=rf"{program} cannot be run: "):
        build_library(tmp_path / "cache/lib.so", [90], program)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, nvcc: Script) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(MissingDependencyError, match=r"cache cannot be written \(.*\): set PAGED_CACHE"):
        build_library(tmp_path / "cache/lib.so", [90], nvcc("exit 1"))


def test_an_interrupted_build_leaves_nothing(
    tmp_path: Path, nvcc: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(commands: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cuda_build, "_run", interrupt)
    library = tmp_path / "cache/lib.so"
    with pytest.raises(KeyboardInterrupt):
        build_library(library, [90], nvcc("exit 1"))
    assert list(library.parent.iterdir()) == []


def test_two_builds_at_once_do_not_meet(tmp_path: Path, nvcc: Script) -> None:
    """Each waits for the other's folder to be there."""
    library = tmp_path / "cache/lib.so"
    program = nvcc(
        f'until [ $(ls {library.parent} | grep -c unfinished) = 2 ]; do :; done; echo built > "$out"\n'
        f'touch "{tmp_path}/seen"\n'
    )
    program.write_text(program.read_text().replace("until [", f'[ -f "{tmp_path}/seen" ] || until ['))
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(build_library, library, [90], program) for _ in range(2)]:
            done.result()
    assert library.read_text() == "built\n"
    assert {path.name for path in library.parent.iterdir()} == {library.name, cuda_build.NOTE}
