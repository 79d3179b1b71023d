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
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ARCHITECTURES = (80, 86, 89, 90)
"""Compute capabilities without the dot: A100; RTX 30; RTX 40 and L40S; H100 and H200."""
LIBRARY = "libpaged_cuda.so"
FLAGS = ("-std=c++20", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wno-unknown-pragmas")


class CudaBuildError(RuntimeError):
    """nvcc is missing or failed; the message ends with what it said."""


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


def build(library: Path, architectures: Sequence[int] = ARCHITECTURES, *, nvcc: Path | None = None) -> None:
    """Compile all sources side by side and link them; the library appears when it is complete.

    Args:
        library: As `library_path` gives it.
        architectures: Such as 80 and 90; not empty.
        nvcc: The compiler; None: as `find_nvcc` finds it.

    Raises:
        CudaBuildError: There is no nvcc, or it cannot be run, or it failed.
        OSError: The library cannot be written.
    """
    nvcc = nvcc or find_nvcc()
    if nvcc is None:
        raise CudaBuildError("nvcc is not here: install the CUDA toolkit 12 or newer, or set CUDA_HOME")
    library.parent.mkdir(parents=True, exist_ok=True)
    # Of this call alone: of two that build at once, each has a whole library in the end.
    work = Path(tempfile.mkdtemp(prefix="unfinished-", dir=library.parent))
    try:
        units = [path for path in sources() if path.suffix == ".cu"]
        objects = [work / f"{path.stem}.o" for path in units]
        commands = [
            compile_command(nvcc, unit, output, architectures)
            for unit, output in zip(units, objects, strict=True)
        ]
        _run_all(commands)
        linked = work / LIBRARY
        _run([str(nvcc), "-shared", "-cudart", "static", *map(str, objects), "-o", str(linked)])
        linked.replace(library)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run_all(commands: Sequence[list[str]]) -> None:
    """Side by side; after the first that fails none is begun any more."""
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        for finished in as_completed([pool.submit(_run, command) for command in commands]):
            finished.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _run(command: list[str]) -> None:
    name = Path(command[0]).name
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise CudaBuildError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode == 0:
        return
    said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
    old = ": install the CUDA toolkit 12 or newer" if any("c++20" in line for line in said) else ""
    raise CudaBuildError(f"{name} failed: {' | '.join(said[-3:])}{old}")


if __name__ == "__main__":
    build(library_path(Path(sys.argv[1])), [int(one) for one in sys.argv[2:]] or ARCHITECTURES)
