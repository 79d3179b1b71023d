"""How much main memory there is, and how many KV blocks fit into a budget. Imports no torch; CUDA: `gpu_memory`.

Sizes that the user chose and that do not fit are refused here, with the numbers and the flag, before anything is
allocated: what a CPU promises (overcommit) it may not keep, and the process would be killed without a word.
"""

from __future__ import annotations

import psutil

from pagedcli.config_file import show_bytes
from pagedcli.errors import ConfigError
from pagedcli.models.spec import ModelSpec
from pagedcli.runtime.cgroups import ControlGroups

CPU_KV_FRACTION = 0.4

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


def free_memory(groups: ControlGroups | None = None) -> int:
    """Bytes of main memory that this process can still take: what is available, within its containers' limits."""
    available = int(psutil.virtual_memory().available)
    room = (groups or ControlGroups()).free_memory()
    return available if room is None else min(available, room)


def block_bytes(spec: ModelSpec, block_size: int, dtype: str) -> int:
    """Memory of one block, keys and values of all layers."""
    return spec.kv_elements_per_token() * block_size * _DTYPE_BYTES[dtype]


def blocks_within(budget_bytes: int, bytes_per_block: int) -> int:
    """Blocks that fit into a budget.

    Raises:
        ConfigError: Not even one.
    """
    if budget_bytes < bytes_per_block:
        raise ConfigError(
            f"a page of KV takes {show_bytes(bytes_per_block)}, the memory for KV is "
            f"{show_bytes(max(0, budget_bytes))}: give --kv-memory {bytes_per_block} or more, or a smaller --page-size"
        )
    return budget_bytes // bytes_per_block


def automatic_blocks(
    budget_bytes: int, bytes_per_block: int, *, block_size: int, max_num_seqs: int, max_model_len: int
) -> int:
    """Blocks that fit into a budget, at most what all slots together could ever fill."""
    most_useful = max_num_seqs * -(-max_model_len // block_size)
    return min(blocks_within(budget_bytes, bytes_per_block), most_useful)


def check_kv_fits(
    num_blocks: int, bytes_per_block: int, free_bytes: int, *, asked_bytes: int | None = None
) -> None:
    """Refuse a pool that does not fit into what is free.

    Args:
        num_blocks: Of the pool.
        bytes_per_block: Keys and values of all layers.
        free_bytes: What is free.
        asked_bytes: What the user gave as --kv-memory; None: gave a number of pages.

    Raises:
        ConfigError: With the largest pool that would fit, in the terms that the user chose.
    """
    needed = num_blocks * bytes_per_block
    if needed <= free_bytes:
        return
    if free_bytes < bytes_per_block:
        remedy = "a smaller model"
    elif asked_bytes is None:
        remedy = f"--num-pages {free_bytes // bytes_per_block}"
    else:
        most = free_bytes // bytes_per_block * bytes_per_block
        remedy = f"--kv-memory {most >> 20}MiB" if most >> 20 else f"--kv-memory {most}"
    raise ConfigError(
        f"{num_blocks} pages of {show_bytes(bytes_per_block)} take {show_bytes(needed)} for KV, "
        f"{show_bytes(free_bytes)} is free: use {remedy}"
    )


def cpu_kv_budget(groups: ControlGroups | None = None) -> int:
    """Memory for KV on a CPU if nobody says: 40% of what is free."""
    return int(free_memory(groups) * CPU_KV_FRACTION)
