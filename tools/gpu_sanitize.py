"""compute-sanitizer over the small cases of the kernels' check (kernels/emulation/check.cpp), on a GPU.

    python tools/gpu_sanitize.py [--architecture N] [-o PROGRAM] [--build-only]

The program is that which the emulator runs, with the kernels compiled by nvcc and its buffers in memory that GPU and
host share, each of exactly its size. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "kernels")]

import build_emulated  # noqa: E402
from paged_kernels import cuda_build  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# A launch ends before the host goes on: it reads the results without waiting.
ENVIRONMENT = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1"}
LIMIT_S = 40


def build(nvcc: Path, architecture: int, program: Path) -> None:
    """The check for the GPU.

    Raises:
        CudaBuildError: It does not compile.
    """
    program.parent.mkdir(parents=True, exist_ok=True)
    kernels = [str(path) for path in cuda_build.sources() if path.suffix == ".cu"]
    check = str(build_emulated.EMULATION / "check.cpp")
    code = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    command = [
        *(str(nvcc), "-std=c++20", "-O3", "-lineinfo", "-DPAGED_ON_GPU", code, f"-I{build_emulated.SOURCES}"),
        *("--threads", "0", "-x", "cu", check, *kernels, "-o", str(program)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise cuda_build.CudaBuildError((done.stderr or done.stdout).strip()[-600:])


def sanitize(sanitizer: str, program: Path, tool: str) -> tuple[bool, str]:
    """Whether a tool has nothing to say, and what it says."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", "3", str(program)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            check=False,
            env=ENVIRONMENT,
        )
    except subprocess.TimeoutExpired:
        return False, f"over {LIMIT_S} s"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return done.returncode == 0, "\n".join(lines[-12:])


def find_sanitizer(nvcc: Path) -> str | None:
    """On PATH, beside nvcc (which may be a script elsewhere that calls it), or in the usual place."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    folders = [nvcc.resolve().parent, *(Path(home) / "bin" for home in homes if home)]
    beside = (folder / "compute-sanitizer" for folder in folders)
    found = next((str(path) for path in beside if path.is_file()), None)
    return shutil.which("compute-sanitizer") or found


def main(words: Sequence[str] | None = None) -> int:
    """Build, run it alone, then under each tool."""
    parser = argparse.ArgumentParser(description="compute-sanitizer over small cases.")
    parser.add_argument("--architecture", type=int, default=90)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build/check-gpu")
    parser.add_argument("--build-only", action="store_true")
    arguments = parser.parse_args(words)
    nvcc = cuda_build.find_nvcc()
    if nvcc is None:
        print("gpu-sanitize: nvcc is not here: set CUDA_HOME", file=sys.stderr)
        return 1
    try:
        build(nvcc, arguments.architecture, arguments.output)
    except cuda_build.CudaBuildError as error:
        print(f"gpu-sanitize: {error}", file=sys.stderr)
        return 1
    if arguments.build_only:
        return 0
    alone = subprocess.run(
        [str(arguments.output)], capture_output=True, text=True, timeout=LIMIT_S, check=False, env=ENVIRONMENT
    )
    print(f"alone: exit code {alone.returncode}\n{alone.stdout}{alone.stderr}", flush=True)
    sanitizer = find_sanitizer(nvcc)
    if sanitizer is None:
        print("gpu-sanitize: compute-sanitizer is not here: it comes with the CUDA toolkit", file=sys.stderr)
        return 1
    found = []
    for tool in TOOLS:
        ok, said = sanitize(sanitizer, arguments.output, tool)
        print(f"{tool}: {'nothing found' if ok else said}", flush=True)
        found.append(ok)
    return 0 if alone.returncode == 0 and all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
