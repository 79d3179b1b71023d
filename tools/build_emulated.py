"""Build the CUDA kernels for the CPU: the same .cu files compiled by g++ against the emulator (kernels/emulation).

    python tools/build_emulated.py [-o FOLDER]

Needs g++ and the headers of the CUDA toolkit (CUDA_HOME, /usr/local/cuda, or NVIDIA's wheels), no GPU and no nvcc.
Prints the path of the library. Standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EMULATION = ROOT / "kernels/emulation"
SOURCES = ROOT / "kernels/src/cuda"
COMMON = (
    "-std=c++20",
    "-fPIC",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-Wno-class-memaccess",
)
# The emulator itself is never instrumented: it tells the sanitizers of its fibers.
PLAIN = ("runtime.cpp", "rendezvous.cpp")
INSTRUMENTED = ("copies.cpp",)
SANITIZERS = {"": (), "address": ("-fsanitize=address,undefined",), "thread": ("-fsanitize=thread",)}


def toolkit_headers() -> Path | None:
    """The folder that holds cuda_fp16.h, or None."""
    nvcc = shutil.which("nvcc")
    beside = [str(Path(nvcc).resolve().parents[1])] if nvcc else []
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), *beside, "/usr/local/cuda"]
    folders = [Path(home) / "include" for home in homes if home]
    folders += Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/include")
    return next((folder for folder in folders if (folder / "cuda_fp16.h").is_file()), None)


def compile_commands(
    headers: Path, folder: Path, sanitize: str, sources: Path, instrumented: Sequence[str] = INSTRUMENTED
) -> list[list[str]]:
    """One command for each object file.

    Args:
        headers: Of the CUDA toolkit.
        folder: Where objects go.
        sanitize: A key of `SANITIZERS`.
        sources: Folder of the .cu files.
        instrumented: Files of the emulator that are compiled as the kernels are.
    """
    emulation = [EMULATION / name for name in (*PLAIN, *instrumented)]
    units = [*emulation, *sorted(sources.glob("*.cu"))]
    return [compile_command(unit, headers, folder, sanitize, sources) for unit in units]


def compile_command(
    unit: Path, headers: Path, folder: Path, sanitize: str, sources: Path, *, level: str = "-O2"
) -> list[str]:
    """For one source; arguments as of `compile_commands`, and how much to optimize where nothing is sanitized."""
    include = ["-isystem", str(headers), f"-I{EMULATION}", f"-I{sources}", "-DPAGED_EMULATE"]
    # A loop that fills memory must not become a call that sanitizers intercept.
    plain = ["-O2", "-fno-tree-loop-distribute-patterns"]
    # -Og: with UBSan, -O1 takes three times as long to compile. What it takes for uninitialized is not.
    sanitized = ["-Og", "-g1", "-Wno-maybe-uninitialized", *SANITIZERS[sanitize]]
    instrumented = sanitized if sanitize else [level]
    language = ["-x", "c++"] if unit.suffix == ".cu" else []
    flags = [*COMMON, *(plain if unit.name in PLAIN else instrumented), *include, *language]
    return ["g++", *flags, "-c", str(unit), "-o", str(folder / f"{unit.stem}.o")]


def _headers() -> Path:
    headers = toolkit_headers()
    if headers is None:
        raise FileNotFoundError("cuda_fp16.h: set CUDA_HOME to a CUDA toolkit")
    return headers


def _compile_and_link(commands: list[list[str]], link: list[str], output: Path) -> Path:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))
    unfinished = output.with_suffix(".unfinished")
    objects = [command[-1] for command in commands]
    subprocess.run(["g++", *link, *objects, "-o", str(unfinished)], check=True)
    return unfinished.replace(output)


def build(folder: Path) -> Path:
    """The library, built where sources are newer than it; of several processes one builds. Its objects lie beside it.

    Raises:
        FileNotFoundError: The toolkit's headers are not here.
        subprocess.CalledProcessError: It does not compile.
    """
    headers = _headers()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libpaged_emulated.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_current(library):
            for stale in folder.glob("*.o"):
                stale.unlink()
            _compile_and_link(compile_commands(headers, folder, "", SOURCES), ["-shared"], library)
    return library


def build_check(folder: Path, *, sanitize: str = "", sources: Path = SOURCES) -> Path:
    """The program of check.cpp, built anew; raises as `build`."""
    headers = _headers()
    folder.mkdir(parents=True, exist_ok=True)
    commands = compile_commands(headers, folder, sanitize, sources, (*INSTRUMENTED, "check.cpp"))
    return _compile_and_link(commands, list(SANITIZERS[sanitize]), folder / "check")


def build_check_beside(library: Path) -> Path:
    """The program of check.cpp with the objects of a library that `build` made."""
    command = compile_command(EMULATION / "check.cpp", _headers(), library.parent, "", SOURCES)
    kept = [str(path) for path in library.parent.glob("*.o") if path.name != "check.o"]
    return _compile_and_link([command], kept, library.parent / "check")


def build_program(source: Path, program: Path, *, strict: bool = True) -> Path:
    """A .cu program with a `main` of its own, on the emulator; raises as `build`.

    Args:
        source: The program.
        program: Where it goes; its objects lie beside it.
        strict: Whether a warning is an error: not where the compiler is one that we do not know.
    """
    headers = _headers()
    folder = program.parent
    units = [EMULATION / name for name in (*PLAIN, *INSTRUMENTED)] + [source]
    commands = [compile_command(unit, headers, folder, "", SOURCES) for unit in units]
    if not strict:
        commands = [[word for word in command if word != "-Werror"] for command in commands]
    return _compile_and_link(commands, [], program)


def relink_check(sound: Path, unit: Path, folder: Path, *, sanitize: str) -> Path:
    """The program of `build_check` in `sound` with one source compiled anew from elsewhere, in `folder`."""
    command = compile_command(unit, _headers(), folder, sanitize, unit.parent, level="-O1")
    kept = [str(path) for path in sound.glob("*.o") if path.name != f"{unit.stem}.o"]
    return _compile_and_link([command], [*SANITIZERS[sanitize], *kept], folder / "check")


def _is_current(library: Path) -> bool:
    if not library.exists():
        return False
    sources = [Path(__file__), *EMULATION.iterdir(), *SOURCES.iterdir()]
    return max(source.stat().st_mtime for source in sources) < library.stat().st_mtime


def main() -> int:
    """Build and print the path; 2 if the headers are missing."""
    parser = argparse.ArgumentParser(description="Build the CUDA kernels for the CPU.")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build/emulated")
    arguments = parser.parse_args()
    try:
        print(build(arguments.output))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
