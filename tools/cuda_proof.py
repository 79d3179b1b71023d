"""What can be proven of the CUDA kernels without a GPU, in one command: `make cuda-proof`.

    python tools/cuda_proof.py [--only emulate|sanitize|bugs|machine-code] [--architectures 80,90] [--json FILE]

1. emulate: every case of kernels/emulation/check.cpp, threads in turn and in three random orders.
2. sanitize: the same under AddressSanitizer with UBSan, and the small ones under ThreadSanitizer.
3. bugs: faults planted in copies of the sources, one at a time; the checker named beside each must catch it.
4. machine-code: nvcc for each architecture, and a gate on what the assembler made of every kernel.

A part whose tools are not here is skipped and says so; exit code 1 if anything fails. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build_emulated
import machine_code

SEEDS = (1, 7, 23)
SMALL = (
    *("attention-80", "product-20", "norm", "rope", "gated"),
    *("sample-race", "sample-candidates", "sample-changes", "logprobs"),
)
"""Cases of few enough threads for ThreadSanitizer."""
LIMIT_S = 300
EMULATED = build_emulated.ROOT / "build/emulated"
ENVIRONMENT = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}


@dataclass(frozen=True)
class Bug:
    """A fault to plant.

    Attributes:
        name: What it is.
        file: In kernels/src/cuda.
        old: What stands there once.
        new: What is planted.
        case: Of the check.
        caught_by: "" for the emulator or a wrong result, "address" or "thread" for what needs that sanitizer.
    """

    name: str
    file: str
    old: str
    new: str
    case: str
    caught_by: str = ""


BUGS = (
    Bug(
        "no wait for copies",
        "attention.cu",
        "wait_copies<kStages - 1>();\n        __syncthreads();",
        "__syncthreads();",
        "attention-80",
    ),
    Bug(
        "no barrier after copies",
        "attention.cu",
        "wait_copies<kStages - 1>();\n        __syncthreads();",
        "wait_copies<kStages - 1>();",
        "attention-80",
    ),
    Bug(
        "no barrier before a stage is filled again",
        "attention.cu",
        "        }\n        __syncthreads();\n    }\n    merge_split();",
        "        }\n    }\n    merge_split();",
        "attention-80",
        "thread",
    ),
    Bug(
        "partial sums read without a barrier",
        "w4a16.cu",
        "    __syncthreads();\n    if (warp != 0) {",
        "    if (warp != 0) {",
        "product-3",
    ),
    Bug(
        "warps' sums read without a barrier",
        "elementwise.cu",
        "    __syncthreads();\n    float sum = 0.0f;",
        "    float sum = 0.0f;",
        "norm",
    ),
    Bug(
        "shared memory one element short",
        "w4a16.cu",
        "PAGED_SHARED(float, partial, kFewWarps * 32 * 4);",
        "PAGED_SHARED(float, partial, kFewWarps * 32 * 4 - 1);",
        "product-3",
        "address",
    ),
    Bug(
        "a row past the end",
        "elementwise.cu",
        "if (at >= features) {",
        "if (at >= features + 8) {",
        "gated",
        "address",
    ),
    Bug(
        "a barrier for half of the block",
        "elementwise.cu",
        "    __syncthreads();\n    float sum = 0.0f;",
        "    if (threadIdx.x < 128) __syncthreads();\n    float sum = 0.0f;",
        "norm",
    ),
    Bug(
        "a shuffle that half of a warp leaves out",
        "attention_rows.cuh",
        "            weights[r] += __shfl_xor_sync(kAllLanes, weights[r], 2);",
        "            if (threadIdx.x % 32 < 16) weights[r] += __shfl_xor_sync(kAllLanes, weights[r], 2);",
        "attention-80",
    ),
    Bug(
        "blocks write one place",
        "w4a16.cu",
        "float* to = sums + blockIdx.y * size",
        "float* to = sums + 0 * size",
        "product-20",
    ),
    Bug(
        "a misaligned load",
        "w4a16.cu",
        "(lane & 3) * 16;\n\n    float sums[4]",
        "(lane & 3) * 16 + 1;\n\n    float sums[4]",
        "product-3",
        "address",
    ),
    Bug(
        "rows of shared memory without padding",
        "attention_rows.cuh",
        "kStride = D + 8;\n    static_assert((kStride / 8) % 2 == 1);",
        "kStride = D;",
        "attention-64",
        "conflicts",
    ),
    Bug(
        "splits merged by the wrong maximum",
        "attention_rows.cuh",
        "exp2f(split - largest)};",
        "exp2f(before - largest)};",
        "attention-80",
    ),
    Bug(
        "the last key left out",
        "attention_rows.cuh",
        "key <= visible.last[r]",
        "key < visible.last[r]",
        "attention-80",
    ),
    Bug(
        "the wrong page",
        "attention_rows.cuh",
        "int64_t{blocks[index]} * num_kv_heads",
        "int64_t{blocks[0]} * num_kv_heads",
        "attention-80",
    ),
    Bug(
        "a zero point of the wrong output", "codes.cuh", "scales.zero[p >> 1]", "scales.zero[0]", "product-3"
    ),
    Bug("a nibble too far", "codes.cuh", "word >> (4 * p)", "word >> (4 * (p ^ 1))", "product-3"),
    Bug(
        "rotation the wrong way",
        "elementwise.cu",
        "- __fmul_rn(high.value[i], sin[i])",
        "+ __fmul_rn(high.value[i], sin[i])",
        "rope",
    ),
    Bug(
        "another key of the noise",
        "random.cuh",
        "key1 += 0xBB67AE85u;",
        "key1 += 0xBB67AE84u;",
        "sample-race",
    ),
    Bug(
        "a race without a second",
        "sampling.cu",
        "second = first;",
        "",
        "sample-rivals",
    ),
    Bug(
        "a race that float decides",
        "sampling.cu",
        "constexpr float kEdge = 1.002f;",
        "constexpr float kEdge = 1.0f;",
        "sample-race",
    ),
    Bug(
        "sums that float decides",
        "sampling.cu",
        "constexpr float kSumError = 1e-5f;",
        "constexpr float kSumError = -1.0f;",
        "sample-sums",
    ),
    Bug(
        "top_p counts the token itself",
        "sampling.cu",
        "at > 0 ? sums[at - 1] : 0.0",
        "sums[at]",
        "sample-candidates",
    ),
    Bug(
        "ties to the highest id",
        "logit_row.cuh",
        "high_value == low_value && high_id < low_id",
        "high_value == low_value && high_id > low_id",
        "sample-candidates",
    ),
    Bug(
        "a tie that is not cut",
        "logit_row.cuh",
        "front.id = enough;\n    return front;",
        "front.id = row.size;\n    return front;",
        "sample-candidates",
    ),
    Bug(
        "more ties than the list holds",
        "logit_row.cuh",
        "const bool fits = *count <= kListed;",
        "const bool fits = *count <= 2 * kListed;",
        "sample-candidates",
        "address",
    ),
    Bug(
        "a list sorted without a barrier",
        "logit_row.cuh",
        "                }\n                __syncthreads();\n            }",
        "                }\n            }",
        "sample-candidates",
        "thread",
    ),
    Bug(
        "warps' best read without a barrier",
        "block.cuh",
        "    __syncthreads();\n    T all = of_warp[0];",
        "    T all = of_warp[0];",
        "sample-changes",
    ),
    Bug(
        "a bit's rank one too far",
        "penalties.cuh",
        "(1u << (token & 31)) - 1",
        "(2u << (token & 31)) - 1",
        "sample-changes",
        "address",
    ),
    Bug(
        "penalties of the prompt's tokens",
        "penalties.cuh",
        "if (at >= row.num_prompt) {",
        "if (at >= 0) {",
        "sample-changes",
    ),
    Bug(
        "forbidden tokens left in",
        "penalties.cuh",
        "bits[word] |= forbidden[word];",
        "bits[word] |= 0u;",
        "sample-changes",
    ),
    Bug(
        "occurrences counted before their places are made",
        "penalties.cuh",
        "        begin();\n        __syncthreads();",
        "        begin();",
        "sample-changes",
        "thread",
    ),
    Bug(
        "NaN taken for a number",
        "logit_row.cuh",
        "wrong |= !(x[i] < INFINITY);",
        "wrong |= x[i] == INFINITY;",
        "sample-faults",
    ),
    Bug(
        "a rank that counts the token itself",
        "sampling.cu",
        "logit == chosen && id < token",
        "logit == chosen && id <= token",
        "logprobs",
    ),
)


class Result:
    """Lines for people and for JSON; whether all is well."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, part: str, name: str, ok: bool | None, detail: str = "") -> None:
        """One finding; `ok` None: it was skipped."""
        word = "skipped" if ok is None else "ok" if ok else "FAILED"
        print(f"{part:13} {word:8} {name}{': ' + detail if detail else ''}", flush=True)
        self.rows.append({"part": part, "name": name, "outcome": word, "detail": detail})

    @property
    def failed(self) -> bool:
        """Whether anything did."""
        return any(row["outcome"] == "FAILED" for row in self.rows)


def run_check(program: Path, cases: Sequence[str], **environment: str) -> tuple[bool, str]:
    """Whether all cases are right, and the line that says what is wrong."""
    try:
        done = subprocess.run(
            [str(program), *cases],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            check=False,
            env={**ENVIRONMENT, **environment},
        )
    except subprocess.TimeoutExpired:
        return False, f"over {LIMIT_S} s"
    lines = (done.stdout + done.stderr).splitlines()
    telling = [
        line
        for line in lines
        if line.startswith(("SUMMARY", "emulation:")) or "WRONG" in line or "runtime error" in line
    ]
    return done.returncode == 0, (telling[0] if telling else f"exit code {done.returncode}")[:160]


def sound_program(sanitize: str, work: Path) -> Path:
    """The check without a fault, beside its objects; made once, the plain one of the objects of the tests' library."""
    program = (work / sanitize if sanitize else EMULATED) / "check"
    if sanitize and program.is_file():
        return program
    if sanitize:
        return build_emulated.build_check(work / sanitize, sanitize=sanitize)
    library = build_emulated.build(EMULATED)
    is_current = program.is_file() and program.stat().st_mtime > library.stat().st_mtime
    return program if is_current else build_emulated.build_check_beside(library)


def emulate(result: Result, work: Path) -> None:
    """Threads in turn, then in random orders."""
    program = sound_program("", work)
    for seed in (None, *SEEDS):
        environment = {} if seed is None else {"EMULATION_SEED": str(seed)}
        ok, detail = run_check(program, (), **environment)
        result.add(
            "emulate",
            "threads in turn" if seed is None else f"threads in random order {seed}",
            ok,
            "" if ok else detail,
        )


def sanitize(result: Result, work: Path) -> None:
    """Each sanitizer over its cases."""
    for name, cases in (("address", ()), ("thread", SMALL)):
        program = sound_program(name, work)
        ok, detail = run_check(program, cases)
        result.add("sanitize", f"{name} sanitizer, {len(cases) or 'all'} cases", ok, "" if ok else detail)


UNITS = {
    "attention_rows.cuh": "attention.cu",
    "codes.cuh": "w4a16.cu",
    **dict.fromkeys(("block.cuh", "logit_row.cuh", "penalties.cuh", "random.cuh"), "sampling.cu"),
}
"""The source that a fault in a header is compiled with."""


def plant(bug: Bug, folder: Path) -> Path:
    """The source to compile, in a copy of all with the fault; without the head sizes that its case does not use."""
    shutil.copytree(build_emulated.SOURCES, folder)
    path = folder / bug.file
    text = path.read_text()
    if text.count(bug.old) != 1:
        raise ValueError(f"{bug.name}: what it replaces stands {text.count(bug.old)} times in {bug.file}")
    path.write_text(text.replace(bug.old, bug.new))
    unit = folder / UNITS.get(bug.file, bug.file)
    unit.write_text(with_head_size(unit.read_text(), bug.case.rpartition("-")[2]))
    return unit


def with_head_size(text: str, size: str) -> str:
    """A source in which attention is compiled for one head size alone: that is most of its time."""
    sizes = re.compile(r"^ *case (\d+): return run\.template operator\(\)<T, \1>\(\);\n", re.MULTILINE)
    return sizes.sub(lambda line: line[0] if line[1] == size else "", text)


def sanitizer_of(bug: Bug) -> str:
    """What the program is compiled with."""
    return bug.caught_by if bug.caught_by in build_emulated.SANITIZERS else ""


def catch(bug: Bug, sound: Path, work: Path) -> tuple[bool, str]:
    """Whether the checker notices, and what it says; `sound` holds the objects without the fault."""
    folder = work / bug.name.replace(" ", "-").replace("'", "")
    unit = plant(bug, folder / "src")
    program = build_emulated.relink_check(sound, unit, folder, sanitize=sanitizer_of(bug))
    if bug.caught_by == "conflicts":
        done = subprocess.run(
            [str(program), bug.case], capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
        conflicts = int(done.stdout.rsplit("bank conflicts: ", 1)[1])
        return conflicts > 0, f"{conflicts} bank conflicts counted"
    right, detail = run_check(program, (bug.case,))
    return not right, detail


def bugs(result: Result, work: Path) -> None:
    """All planted faults, as many at a time as there are cores."""
    sound = {name: sound_program(name, work).parent for name in build_emulated.SANITIZERS}

    def one(bug: Bug) -> tuple[bool, str]:
        return catch(bug, sound[sanitizer_of(bug)], work / "bugs")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for bug, (caught, detail) in zip(BUGS, pool.map(one, BUGS), strict=True):
            result.add("bugs", bug.name, caught, detail if caught else "NOT caught")


def main() -> int:
    """Run the parts, print a line for each finding."""
    parser = argparse.ArgumentParser(description="Prove the CUDA kernels without a GPU.")
    parser.add_argument("--only", choices=("emulate", "sanitize", "bugs", "machine-code"))
    parser.add_argument(
        "--architectures", default="80,90", type=lambda text: [int(part) for part in text.split(",")]
    )
    parser.add_argument(
        "--update", action="store_true", help="write the figures of the machine code that are kept"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = Result()
    emulated: dict[str, Callable[[Result, Path], None]] = {
        "emulate": emulate,
        "sanitize": sanitize,
        "bugs": bugs,
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, part in emulated.items():
            if arguments.only not in (None, name):
                continue
            if build_emulated.toolkit_headers() is None:
                result.add(name, "all", None, "no CUDA toolkit here (cuda_fp16.h)")
                continue
            part(result, Path(folder))
        if arguments.only in (None, "machine-code"):
            machine_code.gate(result.add, Path(folder), arguments.architectures, update=arguments.update)
    if arguments.json:
        arguments.json.write_text(json.dumps(result.rows, indent=1) + "\n")
    return 1 if result.failed else 0


if __name__ == "__main__":
    sys.exit(main())
