"""`paged build-cuda` and what doctor says of its library, with a stand-in for nvcc: no toolkit, no GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from paged_kernels import cuda_build

from pagedcli.cli.main import run

Words = Callable[..., tuple[int, str]]
NVCC = """#!/bin/sh
echo "$@" >> "{log}"
while [ "$1" != "-o" ]; do shift; done
echo made > "$2"
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PAGED_CACHE; nothing is taken from the package."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PAGED_CACHE", str(folder))
    monkeypatch.setattr(cuda_build, "packaged_library", lambda: None)
    return folder


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def nvcc(tmp_path: Path) -> Path:
    return script(tmp_path / "nvcc", NVCC.format(log=tmp_path / "log"))


@pytest.fixture
def build(cache: Path, nvcc: Path, capsys: pytest.CaptureFixture[str]) -> Words:
    """The exit code and all that was said."""

    def call(*words: str, compiler: Path = nvcc) -> tuple[int, str]:
        code = run(["build-cuda", "--nvcc", str(compiler), *words])
        return code, " ".join(capsys.readouterr().err.split())

    return call


def test_a_library_is_built_once_for_what_is_asked(build: Words, cache: Path, tmp_path: Path) -> None:
    library = cuda_build.library_path(cache)
    code, said = build("--arch", "90", "--arch", "80", "--arch", "90")
    assert (code, "compiling for 80, 90:" in said, f"{library} is built" in said) == (0, True, True)
    assert sorted(path.name for path in library.parent.iterdir()) == [cuda_build.NOTE, cuda_build.LIBRARY]
    commands = (tmp_path / "log").read_text().splitlines()
    assert len(commands) == 1 + len([path for path in cuda_build.sources() if path.suffix == ".cu"])
    for command in commands:  # the link too: without them it adds code for nvcc's oldest GPU
        for code_for in ("compute_80,code=sm_80", "compute_90,code=sm_90", "compute_90,code=compute_90"):
            assert f"-gencode=arch={code_for}" in command
    for words in ((), ("--arch", "80"), ("--arch", "90", "--arch", "80")):
        code, said = build(*words)
        assert (code, "is there already, for 80, 90 (--force builds it again)" in said) == (0, True)
    assert len((tmp_path / "log").read_text().splitlines()) == len(commands)


def test_another_gpu_or_force_builds_it_again(build: Words, cache: Path) -> None:
    library = cuda_build.library_path(cache)
    assert build("--arch", "80")[0] == 0
    code, said = build("--arch", "86")
    assert (code, "compiling for 86" in said, cuda_build.built_for(library)) == (0, True, (86,))
    code, said = build("--force")
    assert (code, "compiling for 80, 86, 89, 90" in said) == (0, True)
    assert cuda_build.built_for(library) == (80, 86, 89, 90)


def test_a_gpu_that_is_too_old_is_refused_also_where_a_library_is(build: Words) -> None:
    for _ in range(2):
        code, said = build("--arch", "75")
        assert code == 2
        assert said == ("paged: --arch 75: the kernels need compute capability 8.0 or newer: --arch 80")
        assert build()[0] == 0


@pytest.mark.parametrize(
    "text", [None, "", "#!/bin/sh\necho nvcc fatal: bad GPU; exit 1\n", "#!/bin/sh\nexit 3\n"]
)
def test_a_compiler_that_fails_is_one_line(build: Words, tmp_path: Path, text: str | None) -> None:
    compiler = tmp_path / "other"
    if text is not None:
        compiler.write_text(text)
        compiler.chmod(0o755 if text else 0o644)
    code, said = build(compiler=compiler)
    assert code == 2
    message = said.partition("paged: ")[2]
    expected = {
        None: f"{compiler} cannot be run: No such file or directory",
        "": f"{compiler} cannot be run: Permission denied",
    }.get(text, f"other failed: {'nvcc fatal: bad GPU' if 'bad' in (text or '') else 'exit code 3'}")
    assert message == expected


def test_a_cache_that_cannot_be_written_is_one_line(build: Words, cache: Path) -> None:
    cache.write_text("a file")
    code, said = build()
    folder = cuda_build.library_path(cache).parent
    assert (code, said.partition("paged: ")[2]) == (
        2,
        f"{folder} cannot be written (Not a directory): set PAGED_CACHE to a folder that can",
    )


def test_without_nvcc_it_says_what_to_install(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_build, "find_nvcc", lambda: None)
    assert run(["build-cuda"]) == 2
    assert (
        "paged: nvcc is not here: install the CUDA toolkit 12 or newer, or set CUDA_HOME"
        in capsys.readouterr().err
    )
    assert not list(cache.rglob("*.so"))


def test_what_killed_builds_left_is_removed(build: Words, cache: Path) -> None:
    folder = cuda_build.library_path(cache).parent
    old, young = folder / f"{cuda_build.UNFINISHED}1", folder / f"{cuda_build.UNFINISHED}2"
    for path in (old, young):
        path.mkdir(parents=True)
    os.utime(old, (0, 0))
    assert build()[0] == 0
    assert (old.exists(), young.exists()) == (False, True)


def test_an_interrupted_build_ends_its_compilers(tmp_path: Path, cache: Path) -> None:
    """At once, with the processes that they started, and leaves nothing."""
    pipe, gone = tmp_path / "pipe", tmp_path / "gone"
    for path in (pipe, gone):
        os.mkfifo(path)
    # Holds the second pipe open as long as it lives, in a child as nvcc's compilers are.
    slow = script(
        tmp_path / "slow", f"#!/bin/sh\n(exec 3> {gone}; echo here > {pipe}; exec sleep 600) & wait\n"
    )
    path = os.pathsep.join(str(Path(package).parents[1]) for package in (run.__code__.co_filename,))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, path])}
    command = "import sys; from pagedcli.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "build-cuda", "--force", "--nvcc", str(slow)],
        env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with gone.open() as alive:
        with pipe.open() as started:
            assert "here" in started.read()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        assert alive.read() == ""  # ends when the last that could write has ended
    assert process.returncode == 130
    assert said.splitlines()[-1] == "paged: interrupted"
    assert not list(cache.rglob(f"{cuda_build.UNFINISHED}*"))


def test_doctor_tells_of_the_library(
    build: Words, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pagedcli.cli.doctor_run import _kernel_rows

    assert _kernel_rows(wanted=False) == []
    assert _kernel_rows(wanted=True) == [("CUDA kernels", "not built: paged build-cuda")]
    assert build("--arch", "80", "--arch", "90")[0] == 0
    library = cuda_build.library_path(cache)
    found = [("CUDA kernels", f"built for 80, 90 and newer, in {library}")]
    assert _kernel_rows(wanted=False) == _kernel_rows(wanted=True) == found
    (library.parent / cuda_build.NOTE).unlink()
    assert _kernel_rows(wanted=True) == [("CUDA kernels", f"built, in {library}")]
    assert run(["doctor"]) == 0
    assert "CUDA kernels" in capsys.readouterr().out
