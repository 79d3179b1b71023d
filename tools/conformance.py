"""The conformance program of the CUDA wrappers (kernels/conformance): build, run, compare. Standard library only.

    python tools/conformance.py emulate|gpu [-o FILE] [--architecture N]

On a GPU its output is golden data: kept as kernels/conformance/golden.json, it is what the emulator is held against.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build_emulated

ROOT = build_emulated.ROOT
SOURCE = ROOT / "kernels/conformance/conformance.cu"
GOLDEN = ROOT / "kernels/conformance/golden.json"
NEAR = 2.0**-11
"""Largest difference of a "near" result, in parts of it or of the largest of all: 16 products summed in another
order and kept to fewer bits than float32 has; functions that are off by a few units in the last place."""
LIMIT_S = 60
Results = Mapping[str, Mapping[str, Any]]


class ConformanceError(Exception):
    """It cannot be built or run; the message ends with what was said."""


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConformanceError(f"{Path(command[0]).name} took over {LIMIT_S} s") from error
    if done.returncode != 0:
        raise ConformanceError(f"{Path(command[0]).name}: {(done.stderr or done.stdout).strip()[-400:]}")
    return done.stdout


def build_for_gpu(nvcc: Path, architecture: int, program: Path) -> None:
    """With nvcc for one architecture.

    Raises:
        ConformanceError: It does not compile.
    """
    include = f"-I{build_emulated.SOURCES}"
    code = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    _run([str(nvcc), "-std=c++20", "-O3", code, include, str(SOURCE), "-o", str(program)])


def run(program: Path) -> Results:
    """What the program finds.

    Raises:
        ConformanceError: It failed.
    """
    found: Results = json.loads(_run([str(program)]))
    return found


def emulated(folder: Path, *, strict: bool = True) -> Results:
    """The program's output on the emulator, built in `folder`; `strict` as of `build_emulated.build_program`.

    Raises:
        ConformanceError: It failed.
        FileNotFoundError: The toolkit's headers are not here.
    """
    program = folder / "conformance"
    build_emulated.build_program(SOURCE, program, strict=strict)
    return run(program)


def golden() -> Results | None:
    """What a GPU found, or None: none has run it yet."""
    return json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else None


def differences(got: Results, want: Results) -> list[str]:
    """A line for each result that is not what it should be; empty: all are."""
    missing = sorted(set(got) ^ set(want))
    lines = [f"{name} is only in one of the two" for name in missing]
    for name in (name for name in want if name in got):
        here, there = got[name]["words"].split(), want[name]["words"].split()
        wrong = _wrong(here, there, is_near=want[name]["kind"] == "near")
        if wrong:
            at = wrong[0]
            lines.append(
                f"{name}: {len(wrong)} of {len(there)} words, the first word {at}: {here[at]} for {there[at]}"
            )
    return lines


def _wrong(here: list[str], there: list[str], *, is_near: bool) -> list[int]:
    if len(here) != len(there):
        return [min(len(here), len(there), 1) - 1]
    if not is_near:
        return [at for at, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1]]
    numbers = [(_float(a), _float(b)) for a, b in zip(here, there, strict=True)]
    largest = max((abs(b) for _, b in numbers if abs(b) < 1e4), default=1.0)
    return [
        at for at, (a, b) in enumerate(numbers) if not abs(a - b) <= NEAR * max(abs(b), min(largest, 1.0))
    ]


def _float(word: str) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", int(word, 16)))[0]
    return value


def _gpu(architecture: int, folder: Path) -> Results:
    sys.path.insert(0, str(ROOT / "kernels"))
    from paged_kernels import cuda_build

    nvcc = cuda_build.find_nvcc()
    if nvcc is None:
        raise ConformanceError("nvcc is not here: set CUDA_HOME")
    build_for_gpu(nvcc, architecture, folder / "conformance-gpu")
    return run(folder / "conformance-gpu")


def main() -> int:
    """Write what was found; on a GPU also say whether the emulator, or what was kept, finds the same."""
    parser = argparse.ArgumentParser(description="What the CUDA wrappers do with fixed inputs.")
    parser.add_argument("where", choices=("emulate", "gpu"))
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build/conformance.json")
    parser.add_argument("--architecture", type=int, default=90)
    arguments = parser.parse_args()
    folder = arguments.output.parent
    folder.mkdir(parents=True, exist_ok=True)
    try:
        on_emulator = emulated(folder, strict=arguments.where == "emulate")
        found = on_emulator if arguments.where == "emulate" else _gpu(arguments.architecture, folder)
    except (ConformanceError, FileNotFoundError) as error:
        print(f"conformance: {error}", file=sys.stderr)
        return 1
    arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    wrong = differences(on_emulator, found)
    kept = golden()
    if kept is None:
        print(
            f"no golden data is kept yet: from a GPU, keep {arguments.output} as {GOLDEN.relative_to(ROOT)}"
        )
    else:
        wrong += [f"kept: {line}" for line in differences(found, kept)]
    words = sum(len(result["words"].split()) for result in found.values())
    print("\n".join(wrong) or f"{len(found)} kinds of results, {words} words: as the emulator has them")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
