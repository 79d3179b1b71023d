"""The way from the benchmark to the cases of the kernels: what can be measured, and the command of a worker process.

Imports `paged_kernels.bench.cases` only, which imports the standard library.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from paged_kernels.bench.cases import (
    CONTEXTS,
    FORMATS,
    OPS,
    PAGE_SIZES,
    Case,
    Format,
    list_cases,
)
from paged_kernels.bench.families import FAMILIES, Family

__all__ = [
    "CONTEXTS",
    "FAMILIES",
    "FORMATS",
    "OPS",
    "PAGE_SIZES",
    "Case",
    "Family",
    "Format",
    "list_cases",
    "native_variants",
    "worker_command",
]

WORKER = "paged_kernels.bench.worker"


def worker_command(
    kind: str, threads: int, cpus: Sequence[int], device: str, cold_bytes: int, library: Path | None = None
) -> list[str]:
    """Starts a worker; see `paged_kernels.bench.worker`.

    Args:
        kind: "native" or "torch".
        threads: Compute threads.
        cpus: Logical CPUs for the native kernels' threads.
        device: Of torch.
        cold_bytes: Of copies that take turns; 0: as the machine's caches are.
        library: Of our CUDA kernels, for "torch"; None: they are not measured.
    """
    options = ["--threads", str(threads), "--device", device, "--cold-bytes", str(cold_bytes)]
    ours = [] if library is None else ["--library", str(library)]
    return [
        *(sys.executable, "-m", WORKER, kind, *options, *ours),
        *("--cpus", ",".join(str(cpu) for cpu in cpus)),
    ]


def native_variants() -> tuple[str, ...]:
    """Variants of the native kernels that this machine runs, best first; none if they were not built."""
    if importlib.util.find_spec("paged_kernels._native") is None:
        return ()
    from paged_kernels.native import available_isas

    return available_isas()
