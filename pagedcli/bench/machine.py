"""What the machine can do at most, measured in the same run as the figures beside it.

May import numpy, and torch on CUDA. `kernels/bench/machine.c` is compiled for this machine and run as a process of its
own, so that neither torch nor our own kernels are what our kernels are measured against. Without a checkout or a
compiler numpy measures what it can: reading, and float32 products.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedcli.errors import MissingDependencyError

SOURCE = Path(__file__).parents[2] / "kernels" / "bench" / "machine.c"
MOST_THREADS = 256
"""Of machine.c; more threads than cores are no faster."""
WIDE = ("amx", "avx512bf16", "avx512")
"""Variants with registers of 512 bits."""


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Peak rates with some number of threads; 0 for an instruction set that this machine does not have.

    Attributes:
        threads: Threads at work.
        read_bytes_per_s: Reading memory that no cache holds.
        f32_flops_per_s: Float32 multiply-adds out of registers of 256 bits (AVX2), else of 128 (NEON, SSE).
        f32_wide_flops_per_s: The same, of 512 bits.
        bf16_dot_flops_per_s: Dot products of bfloat16 pairs in vector registers.
        bf16_tile_flops_per_s: Products of bfloat16 tiles (AMX).
        int8_dot_ops_per_s: Dot products of four int8 in vector registers of 512 bits (VNNI).
        int8_tile_ops_per_s: Products of int8 tiles (AMX).
    """

    threads: int
    read_bytes_per_s: float
    f32_flops_per_s: float
    f32_wide_flops_per_s: float
    bf16_dot_flops_per_s: float
    bf16_tile_flops_per_s: float
    int8_dot_ops_per_s: float = 0.0
    int8_tile_ops_per_s: float = 0.0

    def flops_per_s(self, dtype: str, isa: str) -> float:
        """The rate of the instructions that a variant of the kernels multiplies with.

        Products of bfloat16 on `avx512bf16` are dots, also on a processor that is no faster with them.

        Args:
            dtype: "float32", "bfloat16" or "int8".
            isa: Variant of the kernels.
        """
        if dtype == "int8":
            return self.int8_tile_ops_per_s if isa == "amx" else self.int8_dot_ops_per_s
        if isa == "amx" and dtype == "bfloat16":
            return self.bf16_tile_flops_per_s
        if isa == "avx512bf16" and dtype == "bfloat16":
            return self.bf16_dot_flops_per_s
        return self.f32_wide_flops_per_s if isa in WIDE else self.f32_flops_per_s


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What a run is held against.

    Attributes:
        device: "cpu" or "cuda".
        threads: Threads at work; 0 on CUDA.
        read_bytes_per_s: Reading memory that no cache holds.
        flops_per_s: Products of `products` with the fastest instructions that the run's kernels may use; None: it was
            not measured here.
        products: "float32", "bfloat16", "float16" or "int8".
        measured_by: What measured them.
        rates: Of all instruction sets, where machine.c measured them.
    """

    device: str
    threads: int
    read_bytes_per_s: float
    flops_per_s: float | None
    products: str
    measured_by: str
    rates: MachineRates | None = None


ReadPasses = Callable[[int], list[float]]
"""Reads so many megabytes a number of times and gives the rate of each pass, bytes per second."""

UNCACHED_MEGABYTES = 1024


@dataclass(frozen=True, slots=True)
class Passes:
    """Rates of passes over memory, bytes per second each.

    Attributes:
        uncached: Over more than any cache holds.
        again: Over as much as a model's weights take, again and again: what a last-level cache keeps is in them.
    """

    uncached: list[float]
    again: list[float]

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.uncached + other.uncached, self.again + other.again)


@dataclass(frozen=True, slots=True)
class MachineNow:
    """A machine whose memory is looked at again in between runs, since others use it, too.

    Attributes:
        rates: Measured once.
        read: Measures reading now.
    """

    rates: MachineRates
    read: ReadPasses

    def passes(self, weight_bytes: float) -> Passes:
        """Of a model with so many bytes of weights; takes a second or two."""
        return Passes(self.read(UNCACHED_MEGABYTES), self.read(max(1, round(weight_bytes / 2**20))))


def measure_limits(device: str, products: str, isa: str, threads: int) -> MachineLimits:
    """Measure the limits of a run.

    Args:
        device: "cpu" or "cuda".
        products: What its kernels multiply: "float32", "bfloat16", "float16" or "int8".
        isa: Variant of the CPU kernels; empty: other kernels, which may use whatever is there.
        threads: Compute threads.
    """
    if device != "cpu":
        return _measure_cuda(products)
    if not can_compile():
        return _measure_with_numpy(products, threads, "no compiler here")
    try:
        rates = measure_machine(min(threads, MOST_THREADS))
    except (OSError, subprocess.CalledProcessError) as error:  # measured otherwise, and the report says so
        return _measure_with_numpy(products, threads, f"machine.c failed: {type(error).__name__}")
    flops = rates.flops_per_s(products, isa or "amx") or rates.flops_per_s(products, "avx512bf16")
    return MachineLimits(
        "cpu", threads, rates.read_bytes_per_s, flops or None, products, "kernels/bench/machine.c", rates
    )


def _compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")


def can_compile() -> bool:
    """Whether machine.c and a compiler are here."""
    return _compiler() is not None and SOURCE.is_file()


def measure_machine(threads: int, megabytes: int = UNCACHED_MEGABYTES) -> MachineRates:
    """Compile and run the measurement; takes some seconds.

    Raises:
        MissingDependencyError: There is no C compiler, or this is not a checkout.
    """
    with _compiled() as measured:
        return MachineRates(**measured(threads, megabytes))


READING_PASSES = 25


@contextmanager
def reading(threads: int) -> Iterator[ReadPasses]:
    """The compiled measurement of reading alone, READING_PASSES passes each time.

    Raises:
        MissingDependencyError: There is no C compiler, or this is not a checkout.
    """
    with _compiled() as measured:
        yield lambda megabytes: list(measured(threads, megabytes, READING_PASSES))


@contextmanager
def _compiled() -> Iterator[Callable[..., Any]]:
    """machine.c for this machine: from its arguments to what it prints."""
    compiler = _compiler()
    if compiler is None or not SOURCE.is_file():
        raise MissingDependencyError(
            "kernels/bench/machine.c measures the machine's limits: run this in a checkout, with a C compiler"
        )
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "machine"
        options = ["-O3", "-march=native", "-pthread", str(SOURCE), "-o", str(program)]
        subprocess.run([compiler, *options], check=True, capture_output=True)

        def measured(*arguments: int) -> Any:
            line = [str(program), *map(str, arguments)]
            return json.loads(subprocess.run(line, check=True, capture_output=True, text=True).stdout)

        yield measured


def _best_seconds(work: Callable[[], object], tries: int = 5) -> float:
    """Other load can only make it longer."""
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


NUMPY_MEGABYTES = 512
NUMPY_PRODUCT = (1024, 2048, 4096)


def _measure_with_numpy(products: str, threads: int, why: str) -> MachineLimits:
    """Reading by dot products of parts on threads of their own; float32 products by numpy's own library."""
    import numpy as np

    parts = np.ones((threads, NUMPY_MEGABYTES * (1 << 18) // threads), np.float32)
    with ThreadPoolExecutor(threads) as pool:
        seconds = _best_seconds(lambda: list(pool.map(lambda part: part @ part, parts)))
    flops = None
    if products == "float32":
        rows, inner, columns = NUMPY_PRODUCT
        left, right = np.ones((rows, inner), np.float32), np.ones((inner, columns), np.float32)
        flops = 2 * rows * inner * columns / _best_seconds(lambda: left @ right)
    return MachineLimits("cpu", threads, parts.nbytes / seconds, flops, products, f"numpy: {why}")


def _measure_cuda(products: str) -> MachineLimits:
    """Memory by a copy, read and written bytes together; products by torch's own matrix product."""
    import torch

    dtype = getattr(torch, products)
    source = torch.ones(1 << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    left = torch.ones(8192, 8192, dtype=dtype, device="cuda")

    def done(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            work()
            torch.cuda.synchronize()

        return run

    copying = 2 * source.nbytes / _best_seconds(done(lambda: target.copy_(source)))
    flops = 2 * 8192**3 / _best_seconds(done(lambda: left @ left))
    return MachineLimits("cuda", 0, copying, flops, products, f"torch {torch.__version__}: a copy, a product")
