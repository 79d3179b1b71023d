"""Build the CUDA kernels for the CPU: the same .cu files compiled by g++ against the emulator (kernels/emulation).

    python tools/build_emulated.py [--sanitize address|thread] [--define PAGED_BUG=1] [-o FOLDER]

Needs g++ and the headers of the CUDA toolkit (CUDA_HOME, /usr/local/cuda, or NVIDIA's wheels), no GPU and no nvcc.
Prints the path of the library. Standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EMULATION = ROOT / "kernels/emulation"
SOURCES = ROOT / "kernels/src/cuda"
COMMON = ("-std=c++20", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-class-memaccess")
# The emulator itself is never instrumented: it tells the sanitizers of its fibers.
PLAIN = ("runtime.cpp", "rendezvous.cpp")
INSTRUMENTED = ("copies.cpp",)
SANITIZERS = {"": (), "address": ("-fsanitize=address,undefined",), "thread": ("-fsanitize=thread",)}


def toolkit_headers() -> Path | None:
    """The folder that holds cuda_fp16.h, or None."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [Path(home) / "include" for home in homes if home]
    folders += Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/include")
    return next((folder for folder in folders if (folder / "cuda_fp16.h").is_file()), None)


def compile_commands(headers: Path, folder: Path, sanitize: str, defines: list[str]) -> list[list[str]]:
    """One command for each object file."""
    flags = SANITIZERS[sanitize]
    optimize = ["-O1", "-g"] if sanitize else ["-O2"]
    include = ["-isystem", str(headers), f"-I{EMULATION}", "-DPAGED_EMULATE", *(f"-D{name}" for name in defines)]
    commands = []
    for source in [*(EMULATION / name for name in PLAIN), *(EMULATION / name for name in INSTRUMENTED), *sorted(SOURCES.glob("*.cu"))]:
        # A loop that fills memory must not become a call that sanitizers intercept.
        own = ["-O2", "-fno-tree-loop-distribute-patterns"] if source.name in PLAIN else [*optimize, *flags]
        language = ["-x", "c++"] if source.suffix == ".cu" else []
        commands.append(["g++", *COMMON, *own, *include, *language, "-c", str(source), "-o", str(folder / f"{source.stem}.o")])
    return commands


def build(folder: Path, *, sanitize: str = "", defines: list[str] | None = None) -> Path:
    """The library, built where sources are newer than it; of several processes one builds.

    Raises:
        FileNotFoundError: The toolkit's headers are not here.
        subprocess.CalledProcessError: It does not compile.
    """
    headers = toolkit_headers()
    if headers is None:
        raise FileNotFoundError("cuda_fp16.h: set CUDA_HOME to a CUDA toolkit")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libpaged_emulated.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_current(library):
            commands = compile_commands(headers, folder, sanitize, defines or [])
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda command: subprocess.run(command, check=True), commands))
            objects = [command[-1] for command in commands]
            unfinished = library.with_suffix(".unfinished")
            subprocess.run(["g++", "-shared", *SANITIZERS[sanitize], *objects, "-o", str(unfinished)], check=True)
            unfinished.replace(library)
    return library


def _is_current(library: Path) -> bool:
    if not library.exists():
        return False
    sources = [Path(__file__), *EMULATION.iterdir(), *SOURCES.iterdir()]
    return max(source.stat().st_mtime for source in sources) < library.stat().st_mtime


def main() -> int:
    """Build and print the path; 2 if the headers are missing."""
    parser = argparse.ArgumentParser(description="Build the CUDA kernels for the CPU.")
    parser.add_argument("--sanitize", default="", choices=tuple(SANITIZERS))
    parser.add_argument("--define", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build/emulated")
    arguments = parser.parse_args()
    try:
        print(build(arguments.output, sanitize=arguments.sanitize, defines=arguments.define))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
