"""What the machine can do at most, measured in the same run as the figures that are printed beside it.

May import torch. Each limit is the best of several short tries, since other load can only lower it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Measured limits of this machine with the given number of threads.

    Attributes:
        read_bytes_per_s: Reading memory that no cache holds.
        flops_per_s: Dense matrix product in `dtype`.
        dtype: "float32" or "bfloat16".
        threads: Compute threads used.
    """

    read_bytes_per_s: float
    flops_per_s: float
    dtype: str
    threads: int


def _best_seconds(work: Callable[[], object], tries: int = 5) -> float:
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def measure_limits(dtype: str, *, read_bytes: int = 512 << 20) -> MachineLimits:
    """Measure the CPU with the threads that torch is set to.

    Args:
        dtype: "float32" or "bfloat16", for the matrix product of 1024 x 2048 by 2048 x 4096.
        read_bytes: Size of the buffer that is summed, far over the last-level cache.
    """
    buffer = torch.ones(read_bytes // 4, dtype=torch.float32)
    torch_dtype = getattr(torch, dtype)
    left, right = torch.randn(1024, 2048, dtype=torch_dtype), torch.randn(4096, 2048, dtype=torch_dtype)
    product_flops = 2 * 1024 * 2048 * 4096
    return MachineLimits(
        read_bytes_per_s=read_bytes / _best_seconds(buffer.sum),
        flops_per_s=product_flops / _best_seconds(lambda: torch.nn.functional.linear(left, right)),
        dtype=dtype,
        threads=torch.get_num_threads(),
    )
