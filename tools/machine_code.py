"""A gate on what nvcc's assembler makes of the CUDA kernels: registers, spills, and the instructions that matter.

Used by cuda_proof.py. The figures are kept in kernels/src/cuda/machine_code.json and compared: a kernel that grows by
more than a tenth, spills, or loses its wide loads or tensor-core instructions fails. Needs nvcc, and cuobjdump with
nvdisasm (from the toolkit or from NVIDIA's wheels) for the instructions. Standard library only.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "kernels"))

from paged_kernels import cuda_build  # noqa: E402

KEPT = ROOT / "kernels/src/cuda/machine_code.json"
GROWTH = 1.1
Figures = dict[str, int]
Add = Callable[[str, str, "bool | None", str], None]

# Of a line such as "        /*0a30*/              @!P0 LDG.E.128 R4, desc[UR6][R2.64] ;".
OPCODE = re.compile(r"^[ \t]+/\*[0-9a-f]{4,}\*/[ \t]+(?:@!?\w+[ \t]+)?([A-Z][\w.]*)", re.MULTILINE)
INSTRUCTIONS = {
    "mma": re.compile(r"\bHMMA\."),
    "ldmatrix": re.compile(r"\bLDSM\."),
    "load_128": re.compile(r"\bLDG\.[\w.]*128"),
    "copy_async_128": re.compile(r"\bLDGSTS\.[\w.]*128"),
    "store_128": re.compile(r"\bSTG\.[\w.]*128"),
    "local": re.compile(r"\b(?:LDL|STL)\b"),
    "convert_int": re.compile(r"\bI2F|\bF2I"),
    "reciprocal": re.compile(r"\bMUFU\.RCP\b"),
    "barrier": re.compile(r"\bBAR\.SYNC"),
}

# Of each kernel whose name begins with the key: (figure, least, most); None: no bound.
RULES: dict[str, tuple[tuple[str, int | None, int | None], ...]] = {
    # Shared memory is the static one: with what a launch adds it must fit all GPUs (kMostStaticShared in device.cuh).
    "": (("spill", None, 0), ("local", None, 0), ("shared", None, 18 * 1024)),
    "attention_decode": (
        ("mma", 24, None),
        ("ldmatrix", 12, None),
        ("copy_async_128", 8, None),
        ("convert_int", None, 4),  # two divisions before the loops, none in them
        ("registers", None, 232),
    ),
    "attention_prefill": (
        ("mma", 24, None),
        ("ldmatrix", 12, None),
        ("copy_async_128", 4, None),
        ("convert_int", None, 2),
        ("registers", None, 255),
    ),
    "few_rows": (
        ("mma", 16, None),
        ("load_128", 4, None),
        ("convert_int", None, 0),
        ("reciprocal", None, 0),
        ("registers", None, 96),
        ("shared", None, 4 * 1024),
    ),
    "ring_kernel": (
        ("mma", 16, None),
        ("copy_async_128", 4, None),
        ("convert_int", None, 0),
        ("registers", None, 168),
        ("shared", None, 128),
    ),
    "rms_norm": (("load_128", 2, None), ("store_128", 1, None)),
    "gated": (("load_128", 2, None), ("store_128", 1, None)),
    "rope": (("load_128", 2, None), ("store_128", 2, None)),
    "rows_kernel": (("load_128", 1, None), ("store_128", 1, None)),
    "sample_kernel": (("load_128", 8, None), ("registers", None, 128)),
    "logprobs_kernel": (("load_128", 8, None), ("registers", None, 64), ("shared", None, 13 * 1024)),
}


def _tool(name: str) -> str | None:
    found = shutil.which(name)
    if found:
        return found
    nvcc = cuda_build.find_nvcc()
    beside = [nvcc.resolve().parent / name] if nvcc else []
    wheels = Path(sys.prefix).glob(f"lib/python*/site-packages/**/bin/{name}")
    return next((str(path) for path in [*beside, *wheels] if path.is_file()), None)


def assembler_figures(log: str) -> dict[str, Figures]:
    """Registers, bytes of static shared memory and of spills of each kernel, from what ptxas -v says."""
    figures: dict[str, Figures] = {}
    kernel = ""
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)'", line):
            kernel = found[1]
        elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            figures.setdefault(kernel, {})["spill"] = int(found[1]) + int(found[2])
        elif found := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            figures.setdefault(kernel, {}).update(
                registers=int(found[1]), shared=int(shared[1]) if shared else 0
            )
    return figures


def instruction_figures(sass: str) -> dict[str, Figures]:
    """How often each instruction that matters stands in each kernel."""
    figures = {}
    for part in re.split(r"\n\s*Function : ", sass)[1:]:
        name, _, body = part.partition("\n")
        opcodes = Counter(OPCODE.findall(body))
        counts = {
            key: sum(count for opcode, count in opcodes.items() if pattern.search(opcode))
            for key, pattern in INSTRUCTIONS.items()
        }
        counts["instructions"] = opcodes.total()
        figures[name.strip()] = counts
    return figures


def _readable(names: Sequence[str]) -> dict[str, str]:
    """Template arguments instead of mangled names."""
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    plain = [re.sub(r"^void paged::|\(.*$|paged::", "", line) for line in done.stdout.splitlines()]
    return dict(zip(names, plain, strict=True))


def measure(source: Path, architecture: int, work: Path) -> dict[str, Figures]:
    """All figures of the kernels of one source for one architecture.

    Raises:
        CudaBuildError: nvcc is missing or fails.
    """
    nvcc = cuda_build.find_nvcc()
    if nvcc is None:
        raise cuda_build.CudaBuildError("nvcc is not here")
    output = (
        work / f"{source.stem}-{architecture}.cubin"
    )  # of the GPU's side alone: nothing is compiled for the host
    code = ["-cubin", f"-arch=sm_{architecture}", "-Xptxas", "-v"]
    command = [str(nvcc), *cuda_build.FLAGS, *code, str(source), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise cuda_build.CudaBuildError(done.stderr.strip()[-400:])
    figures = assembler_figures(done.stderr)
    disassembler = _tool("cuobjdump")
    if disassembler and _tool("nvdisasm"):
        sass = subprocess.run(
            [disassembler, "-sass", str(output)], capture_output=True, text=True, check=True
        ).stdout
        for name, counts in instruction_figures(sass).items():
            figures.setdefault(name, {}).update(counts)
    names = _readable(sorted(figures))
    return {names[name]: figures[name] for name in sorted(figures)}


def faults(kernel: str, figures: Figures, before: Figures | None) -> list[str]:
    """Rules that a kernel breaks, and growth over what was kept."""
    found = []
    for part, rules in RULES.items():
        if not kernel.startswith(part):
            continue
        for name, least, most in rules:
            value = figures.get(name)
            if value is not None and (
                (least is not None and value < least) or (most is not None and value > most)
            ):
                found.append(
                    f"{name} {value}, allowed {least if least is not None else ''}..{most if most is not None else ''}"
                )
    for name in ("instructions", "registers"):
        if before and name in before and figures.get(name, 0) > GROWTH * before[name]:
            found.append(f"{name} grew from {before[name]} to {figures[name]}")
    return found


def gate(add: Add, work: Path, architectures: Sequence[int], *, update: bool) -> None:
    """Compile for each architecture, hold every kernel against the rules; `update` keeps the figures."""
    if cuda_build.find_nvcc() is None:
        add("machine-code", "all", None, "nvcc is not here")
        return
    kept: dict[str, dict[str, Figures]] = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    jobs = [
        (source, one) for one in architectures for source in cuda_build.sources() if source.suffix == ".cu"
    ]
    with ThreadPoolExecutor(2) as pool:
        measured = list(pool.map(lambda job: measure(*job, work), jobs))
    for (source, one), kernels in zip(jobs, measured, strict=True):
        before = kept.setdefault(f"sm_{one}", {})
        wrong = [
            f"{name}: {fault}"
            for name, figures in kernels.items()
            for fault in faults(name, figures, before.get(name))
        ]
        has_code = any("instructions" in figures for figures in kernels.values())
        detail = "; ".join(wrong) or f"{len(kernels)} kernels" + (
            "" if has_code else ", instructions not looked at: no cuobjdump"
        )
        add("machine-code", f"{source.name} for sm_{one}", not wrong, detail)
        if update:
            before.update(kernels)
    if update:
        KEPT.write_text(json.dumps(_sorted(kept), indent=1) + "\n")


def _sorted(kept: dict[str, Any]) -> dict[str, Any]:
    return {name: dict(sorted(kernels.items())) for name, kernels in sorted(kept.items())}
