"""Threads that share work without changing a bit of the result. Imports torch.

A matrix library may cut a product differently for every number of threads, and so add in another order. Here every
task is of a fixed size that depends on the data alone and runs on one thread of torch's; threads only decide which
task runs where. Results come back in the order of the tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

ROW_BLOCK = 512
"""Output features of one task."""


class Workers:
    """Maps functions over tasks; made by `workers`."""

    def __init__(self, pool: ThreadPoolExecutor | None) -> None:
        self._pool = pool

    def map(self, function: Callable[[T], R], tasks: Iterable[T]) -> list[R]:
        """Results in the order of `tasks`; the first exception in that order is raised."""
        if self._pool is None:
            return [function(task) for task in tasks]
        return list(self._pool.map(function, tasks))


@contextmanager
def workers(threads: int) -> Iterator[Workers]:
    """Threads, each with one thread of torch's; the caller's torch has one too until the end of the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if threads == 1:
            yield Workers(None)
            return
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield Workers(pool)
    finally:
        torch.set_num_threads(before)


def row_blocks(rows: int, size: int = ROW_BLOCK) -> Sequence[slice]:
    """Slices of `size` rows; the last may be shorter."""
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]
