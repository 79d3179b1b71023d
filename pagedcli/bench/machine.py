"""What the machine can do at most, measured in the same run as the figures beside it. Standard library only.

`kernels/bench/machine.c` is compiled for this machine and run as a process of its own, so that neither torch nor our
own kernels are what our kernels are measured against.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pagedcli.errors import MissingDependencyError

SOURCE = Path(__file__).parents[2] / "kernels" / "bench" / "machine.c"
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
    """

    threads: int
    read_bytes_per_s: float
    f32_flops_per_s: float
    f32_wide_flops_per_s: float
    bf16_dot_flops_per_s: float
    bf16_tile_flops_per_s: float

    def flops_per_s(self, dtype: str, isa: str) -> float:
        """The rate of the instructions that a variant of the kernels multiplies with.

        Products of bfloat16 on `avx512bf16` are dots, also on a processor that is no faster with them.
        """
        if isa == "amx" and dtype == "bfloat16":
            return self.bf16_tile_flops_per_s
        if isa == "avx512bf16" and dtype == "bfloat16":
            return self.bf16_dot_flops_per_s
        return self.f32_wide_flops_per_s if isa in WIDE else self.f32_flops_per_s


def measure_machine(threads: int, megabytes: int = 1024) -> MachineRates:
    """Compile and run the measurement; takes about ten seconds.

    Raises:
        MissingDependencyError: There is no C compiler, or this is not a checkout.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not SOURCE.is_file():
        raise MissingDependencyError(
            "kernels/bench/machine.c measures the machine's limits: run this in a checkout, with a C compiler"
        )
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "machine"
        options = ["-O3", "-march=native", "-pthread", str(SOURCE), "-o", str(program)]
        subprocess.run([compiler, *options], check=True)
        done = subprocess.run(
            [str(program), str(threads), str(megabytes)], check=True, capture_output=True, text=True
        )
    return MachineRates(**json.loads(done.stdout))
