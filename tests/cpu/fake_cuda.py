"""What `torch.cuda` is to the runtime, without a GPU: what was asked for in which order, and made-up memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

GIB = 2**30


@dataclass(eq=False)
class FakeStream:
    name: str
    cuda: FakeCuda

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


@dataclass(eq=False)
class FakeEvent:
    cuda: FakeCuda
    is_done: bool = False

    def record(self, stream: FakeStream) -> None:
        self.cuda.log.append(f"event on {stream.name}")

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


@dataclass(eq=False)
class FakeGraph:
    cuda: FakeCuda

    def replay(self) -> None:
        self.cuda.log.append(f"replay on {self.cuda.current.name}")


@dataclass
class FakeCuda:
    """Bytes as torch and the driver would tell them: what torch reserves and does not use is not free either.

    Attributes:
        total: Of the GPU.
        outside: Taken by others and by CUDA.
        allocated: By torch.
        cached: Reserved by torch and not allocated.
        log: What was done, in order.
    """

    total: int = 16 * GIB
    outside: int = 0
    allocated: int = 0
    cached: int = 0
    peak: int = 0
    log: list[str] = field(default_factory=list)
    pools: int = 0

    def __post_init__(self) -> None:
        self.main = self.current = FakeStream("main", self)

    # ---- streams and graphs

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream("side", self)

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(
        self, graph: FakeGraph, *, pool: int, stream: FakeStream, capture_error_mode: str
    ) -> Iterator[None]:
        self.log.append(f"record into pool {pool} ({capture_error_mode})")
        with self.stream(stream):
            yield
        self.log.append("recorded")

    # ---- memory

    def take(self, count: int) -> None:
        if self.outside + self.allocated + self.cached + count > self.total:
            raise torch.OutOfMemoryError(f"tried to allocate {count} bytes")
        from_cache = min(self.cached, count)
        self.cached -= from_cache
        self.allocated += count
        self.peak = max(self.peak, self.allocated)

    def give(self, count: int) -> None:
        self.allocated -= count
        self.cached += count

    def empty_cache(self) -> None:
        self.cached = 0

    def synchronize(self, device: Any = None) -> None: ...

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.allocated

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated

    def memory_reserved(self, device: torch.device) -> int:
        return self.allocated + self.cached

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.total - self.outside - self.allocated - self.cached, self.total
