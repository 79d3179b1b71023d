"""Builds the library of CUDA kernels with nvcc, and finds the one that was built. Standard library only.

As a program, for the build of the package with PAGED_CUDA: cuda_build.py FOLDER [ARCHITECTURE ...]

The library has a C interface (`cuda_abi`) and its own static copy of the CUDA runtime, so it fits any torch. It holds
machine code for each architecture named and, for newer GPUs, PTX of the last one. It lies in a folder named after the
sources, so that a new version of them never runs an old library.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ARCHITECTURES = (80, 86, 89, 90)
"""Compute capabilities without the dot: A100; RTX 30; RTX 40 and L40S; H100 and H200."""
LIBRARY = "libpaged_cuda.so"
NOTE = "architectures"
"""Beside the library: what it was compiled for."""
UNFINISHED = "unfinished-"
ABANDONED_S = 3600.0
FLAGS = ("-std=c++20", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wno-unknown-pragmas")


class CudaBuildError(RuntimeError):
    """Nvcc is missing or failed, or there is no place for the library; the message ends with what was said."""


def source_folder() -> Path:
    """The .cu files: beside the installed package, or in a checkout."""
    installed = Path(__file__).parent / "cuda_sources"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "src/cuda"


def sources() -> list[Path]:
    """Of the library, headers included."""
    return sorted(path for path in source_folder().iterdir() if path.suffix in (".cu", ".cuh", ".h"))


def packaged_library() -> Path | None:
    """The one that was built with the package, from these very sources, if it was."""
    # Beside the compiled module: in an editable installation that is not where this file lies.
    native = importlib.util.find_spec("paged_kernels._native")
    if native is None or native.origin is None:
        return None
    library = library_path(Path(native.origin).parent)
    return library if library.is_file() else None


def library_path(cache: Path) -> Path:
    """Where the library of these sources lies, or will, in a folder for such."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return cache / "cuda" / digest.hexdigest()[:16] / LIBRARY


def find_nvcc() -> Path | None:
    """CUDA_HOME's nvcc, the one on PATH, or the usual one."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    found = shutil.which("nvcc")
    candidates = [*(Path(home) / "bin/nvcc" for home in homes if home), *([Path(found)] if found else [])]
    return next((path for path in [*candidates, Path("/usr/local/cuda/bin/nvcc")] if path.is_file()), None)


def compile_command(nvcc: Path, source: Path, output: Path, architectures: Sequence[int]) -> list[str]:
    """Nvcc for one source: machine code for each architecture, PTX for the last."""
    codes = [f"-gencode=arch=compute_{one},code=sm_{one}" for one in architectures]
    last = max(architectures)
    codes.append(f"-gencode=arch=compute_{last},code=compute_{last}")
    return [str(nvcc), *FLAGS, *codes, "-c", str(source), "-o", str(output)]


def built_for(library: Path) -> tuple[int, ...]:
    """What a library was compiled for, ascending, as `build` noted it; empty: there is none, or it is not known."""
    try:
        words = (library.parent / NOTE).read_text().split()
        return tuple(sorted(int(word) for word in words)) if library.is_file() else ()
    except (OSError, ValueError):
        return ()


def build(library: Path, architectures: Sequence[int] = ARCHITECTURES, *, nvcc: Path | None = None) -> None:
    """Compile all sources side by side and link them; the library appears when it is complete.

    Args:
        library: As `library_path` gives it.
        architectures: Such as 80 and 90; not empty.
        nvcc: The compiler; None: as `find_nvcc` finds it.

    Raises:
        CudaBuildError: There is no nvcc, it failed, or the folder cannot be written.
    """
    nvcc = nvcc or find_nvcc()
    if nvcc is None:
        raise CudaBuildError("nvcc is not here: install the CUDA toolkit 12 or newer, or set CUDA_HOME")
    work = _work_folder(library.parent)
    try:
        linked = _compile(nvcc, work, architectures)
        note = work / NOTE
        note.write_text(" ".join(map(str, architectures)) + "\n")
        # Never a note beside a library that it does not describe.
        (library.parent / NOTE).unlink(missing_ok=True)
        linked.replace(library)
        note.replace(library.parent / NOTE)
    except OSError as error:
        raise _unwritable(library.parent, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _work_folder(folder: Path) -> Path:
    """A folder of this call alone: of two that build at once, each has a whole library in the end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        return Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder))
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> CudaBuildError:
    return CudaBuildError(
        f"{folder} cannot be written ({error.strerror}): set PAGED_CACHE to a folder that can"
    )


def _remove_abandoned(folder: Path) -> None:
    """What builds left that were killed: nothing takes an hour."""
    for path in folder.glob(f"{UNFINISHED}*"):
        if time.time() - path.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(path, ignore_errors=True)


def _compile(nvcc: Path, work: Path, architectures: Sequence[int]) -> Path:
    """Object by object, then the library, in `work`."""
    units = [path for path in sources() if path.suffix == ".cu"]
    objects = [work / f"{path.stem}.o" for path in units]
    commands = [
        compile_command(nvcc, unit, output, architectures)
        for unit, output in zip(units, objects, strict=True)
    ]
    _run(commands)
    linked = work / LIBRARY
    # Without codes of its own the link adds an empty part for nvcc's oldest GPU.
    codes = [word for word in commands[0] if word.startswith("-gencode")]
    _run([[str(nvcc), *codes, "-shared", "-cudart", "static", *map(str, objects), "-o", str(linked)]])
    return linked


def _run(commands: Sequence[list[str]]) -> None:
    """Side by side; when one fails, or the build is interrupted, the others end."""
    started: list[subprocess.Popen[str]] = []

    def start() -> None:
        for command in commands:
            started.append(_start(command))

    try:
        # In a thread no signal comes between the start of a process and the note of it.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(start).result()
        for process in started:
            said, _ = process.communicate()
            if process.returncode != 0:
                lines = said.strip().splitlines() or [f"exit code {process.returncode}"]
                old = (
                    ": install the CUDA toolkit 12 or newer" if any("c++20" in line for line in lines) else ""
                )
                raise CudaBuildError(f"{Path(commands[0][0]).name} failed: {' | '.join(lines[-3:])}{old}")
    finally:
        for process in started:
            if process.returncode is None:
                # Nvcc runs the compilers proper, and would leave them behind.
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def _start(command: list[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        )
    except OSError as error:
        raise CudaBuildError(f"{command[0]} cannot be run: {error.strerror}") from error


if __name__ == "__main__":
    build(library_path(Path(sys.argv[1])), [int(one) for one in sys.argv[2:]] or ARCHITECTURES)
