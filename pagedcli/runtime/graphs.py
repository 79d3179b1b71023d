"""What a CUDA graph is to us: work on the device that was recorded once and is started as a whole. May import torch.

Recorded work always reads and writes the same memory, so it must take all that differs between steps from fixed
buffers, and may neither read a value back nor send one from the host. Kernels of one graph start without the host:
hundreds of launches of a few microseconds each become one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

LARGEST = 512
"""Rows of the largest decode step that is a graph, unless sizes are given; a larger one's own work hides launches."""
_STEPS = ((64, 8), (128, 16), (256, 32), (512, 64))


class Captures(Protocol):
    """Records work."""

    def capture(self, computes: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        """Record pieces of work, of which one runs at a time; what does each of them again on the current stream.

        Each is done twice or recorded without being done: it must come to the same.
        """


class CudaCaptures:
    """Implements `Captures` with CUDA graphs.

    The memory between the kernels of those that are captured together is one pool, in which nothing outlives a replay:
    results must be copied to buffers that were there before.

    Args:
        device: Of the work.
        cuda: `torch.cuda`, or what stands in for it in a test.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        # The same for all: libraries keep a workspace for every stream.
        self._stream = cuda.Stream(device)

    def capture(self, computes: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        """As `Captures`. The first goes first: the largest should, so that the others find room in its memory."""
        pool = self._cuda.graph_pool_handle()
        return [self._capture(compute, pool) for compute in computes]

    def _capture(self, compute: Callable[[], None], pool: Any) -> Callable[[], None]:
        # Done once before, since libraries make what they need (handles, workspaces) when something is first done.
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            compute()
        graph = self._cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile; `graph` waits for the device before it begins.
        mode = "thread_local"
        with self._cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode=mode):
            compute()
        replay: Callable[[], None] = graph.replay
        return replay


def sizes_for(max_rows: int, given: Sequence[int] = ()) -> tuple[int, ...]:
    """Numbers of rows for which decode steps are recorded, ascending; a step takes the next larger one.

    At most a fifth of the rows above 16 only fill up. 8 and 64 are among them, where the kernel for 4-bit weights
    changes: a step has the bits that it would have without filling.

    Args:
        max_rows: Sequences that may run at once.
        given: What the user wants instead.
    """
    if given:
        return tuple(sorted({min(size, max_rows) for size in given}))
    sizes = [1, 2, 4]
    for end, step in _STEPS:
        sizes += range(sizes[-1] // step * step + step, end + 1, step)
    most = min(max_rows, LARGEST)
    return (*(size for size in sizes if size < most), most)
