"""Our CUDA kernels alone on Llama-3-8B's shapes beside torch's own ops: `make gpu-check` runs it.

    python tools/gpu_kernels.py --json FILE [--library FILE] [--device cuda] [--seconds 80]

The cases, their checks and the timing are those of `paged bench kernels`; here are the shapes that the aims are about,
the most important first, until the time is up. Exit code 1: a result was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from pagedcli.bench.kernel_results import case_dict  # noqa: E402
from pagedcli.bench.kernels import CUDA_VARIANT, KernelBench, Worker, start_workers  # noqa: E402
from pagedcli.bench.machine import MachineLimits, measure_limits  # noqa: E402
from pagedcli.checkpoint.sources import cache_folder  # noqa: E402
from pagedcli.ops.cuda_library import library_in  # noqa: E402
from pagedcli.ops.kernel_cases import FAMILIES, FORMATS, Case, Family, list_cases  # noqa: E402

VARIANTS = ("torch", CUDA_VARIANT)
FEW_ROWS, MANY_ROWS = (1, 2, 4, 8, 16, 32, 64), (256, 1024)
DECODES = ((16, 1024), (1, 1024), (64, 1024), (1, 8192), (16, 4096), (64, 4096))
"""(sequences, context)."""
SECONDS_EACH, ROUNDS = 0.06, 3
SHAPES = {
    "llama-3-8b": FAMILIES["llama-3-8b"],
    "tiny": Family("tiny", 256, 4, 2, 64, 192, 512, is_large=True),
}


def cases(family: Family) -> list[Case]:
    """The most important first; those that share weights together."""
    dense, codes = FORMATS["bfloat16"], FORMATS["int4-g128-a16"]
    shape = (family.q_size, family.q_size, family.heads)
    found = [Case("attention", "decode", (), dense, many, *shape, many, length) for many, length in DECODES]
    for name, rows in (("gate_up", FEW_ROWS), ("gate_up", MANY_ROWS), ("qkv", FEW_ROWS)):
        outputs, inputs = family.matrices()[name]
        for item in (codes, dense):
            found += [Case("linear", name, (), item, count, inputs, outputs) for count in rows]
    found += [
        Case("attention", "prefill", (), dense, rows, *shape, many, length)
        for rows, many, length in ((512, 1, 2048), (2048, 1, 2048), (4 * 512, 4, 1024))
    ]
    found += [
        Case("sampler", name, (), FORMATS["float32"], rows, family.vocab_size, 1)
        for name in ("greedy", "top-p")
        for rows in (1, 64)
    ]
    rowwise = ("norm", "rope", "gated", "embedding")
    return found + list_cases([family], ops=rowwise, formats=[dense], rows=(1, 64, 2048))


def run(worker: Worker, chosen: Sequence[Case], limits: MachineLimits, seconds: float) -> dict[str, Any]:
    """Case by case, until the time is up."""
    end = time.monotonic() + seconds
    found: dict[str, Any] = {"bytes_per_s": limits.read_bytes_per_s, "measured": worker.about, "cases": []}
    with KernelBench([worker], VARIANTS, seconds=SECONDS_EACH, rounds=ROUNDS) as bench:
        for times in bench.run(chosen, lambda case: None):
            found["cases"].append({**case_dict(times, limits), "wrong": times.wrong})
            if time.monotonic() > end:
                left = len(chosen) - len(found["cases"])
                found["left_out"] = f"{left} of {len(chosen)} cases" if left else ""
                break
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description="Our CUDA kernels beside torch's own ops.")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--library", type=Path, help="of our kernels [that of paged build-cuda]")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-3-8b")
    parser.add_argument("--most", type=int, help="cases")
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--bytes-per-s", type=float, help="of a copy; measured if not given")
    arguments = parser.parse_args(words)
    library = arguments.library or library_in(cache_folder())
    if not library.is_file():
        print(f"gpu-kernels: {library} is not there: run paged build-cuda", file=sys.stderr)
        return 1
    told = arguments.bytes_per_s
    limits = (
        MachineLimits(arguments.device, 0, told, None, "bfloat16", "told")
        if told
        else measure_limits(arguments.device, "bfloat16", "", 1)
    )
    (worker,) = start_workers(
        native=False,
        torch_device=arguments.device,
        threads=1,
        cpus=(),
        cold_bytes=1 if arguments.device == "cpu" else 0,
        library=library,
    )
    found = run(worker, cases(SHAPES[arguments.shape])[: arguments.most], limits, arguments.seconds)
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    wrong = [f"{case['op']} {case['name']}: {case['wrong']}" for case in found["cases"] if case["wrong"]]
    print("\n".join(wrong) or f"{len(found['cases'])} cases, all right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
