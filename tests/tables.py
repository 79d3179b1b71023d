"""Block tables and steps for tests that run a model by hand. Standard library only."""

from __future__ import annotations

import random
from collections.abc import Sequence


def scattered_tables(lengths: Sequence[int], block_size: int, seed: int = 0) -> tuple[list[list[int]], int]:
    """Disjoint tables of shuffled blocks, and how many blocks there are."""
    needs = [-(-length // block_size) for length in lengths]
    blocks = list(range(sum(needs) + 3))
    random.Random(seed).shuffle(blocks)
    tables = []
    for need in needs:
        tables.append(blocks[:need])
        blocks = blocks[need:]
    return tables, sum(needs) + 3


def chunked(index: int, length: int, size: int) -> list[list[tuple[int, int]]]:
    """Steps that compute one sequence alone in chunks of `size`."""
    return [[(index, min(size, length - start))] for start in range(0, length, size)]
