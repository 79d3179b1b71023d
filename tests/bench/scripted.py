"""A run over the scripted executor on a clock that only its steps move: every time is known beforehand."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

from pagedcli.bench.drive import Drive
from pagedcli.bench.recorder import Recorder, TableClock
from pagedcli.bench.run import Run, StepTimes, Watch
from pagedcli.config import SchedulerConfig
from pagedcli.core.kv_manager import PagedKV
from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.core.scheduler import Scheduler
from pagedcli.engine.admission import QueueLimits
from pagedcli.engine.client import EngineSettings, EngineThread
from pagedcli.engine.executor import ExecutorInfo, StepHandle
from pagedcli.engine.timing import Cause, Timing
from pagedcli.workloads.requests import WorkloadRequest
from tests.fakes import VOCAB_SIZE, ByteTokenizer, FakeExecutor


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0
        self._idle = threading.Event()

    def __call__(self) -> float:
        return self.now

    def watch(self, timing: Timing) -> None:
        """Learn from its marks whether the engine's thread has nothing to do."""
        mark = timing.mark

        def noting(cause: Cause, now: float | None = None) -> None:
            mark(cause, now)
            (self._idle.set if cause == "no_work" else self._idle.clear)()

        timing.mark = noting  # type: ignore[method-assign]

    def sleep(self, seconds: float) -> None:
        """Move on, but only once the engine's thread has seen that there is nothing to do."""
        assert self._idle.wait(60)
        self.now += seconds


@dataclasses.dataclass
class ClockedExecutor:
    """A step takes 0.1 s, and 1 ms for every position."""

    executor: FakeExecutor
    clock: Clock

    @property
    def info(self) -> ExecutorInfo:
        return self.executor.info

    def submit(self, plan: StepPlan) -> StepHandle:
        handle, seconds = self.executor.submit(plan), 0.1 + 0.001 * plan.num_tokens
        self.clock.now += seconds
        return _Handle(handle, seconds)

    def close(self) -> None:
        self.executor.close()


@dataclasses.dataclass
class _Handle:
    handle: StepHandle
    seconds: float

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self.handle.result()._replace(seconds=self.seconds)


def request(name: str, prompt: int, output: int, **more: Any) -> WorkloadRequest:
    """Different prompts for different names."""
    first = sum(name.encode()) % 200
    tokens = tuple((first + 7 * index) % 250 for index in range(prompt))
    return WorkloadRequest(name, tokens, output, more.pop("max_tokens", 64), **more)


def run_scripted(
    workload: Sequence[WorkloadRequest],
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    depth: int = 1,
    watch: Watch | None = None,
    kv_seconds: float = 0.0,
    **scheduler: Any,
) -> Run:
    """Run it on a new engine.

    Args:
        kv_seconds: What every reading of the clock round the block tables adds.
    """
    clock = Clock()
    executor = FakeExecutor(num_blocks=num_blocks, block_size=block_size, max_num_seqs=8)
    kv = PagedKV(num_blocks, block_size)
    tables = TableClock(kv, _ticking(kv_seconds))
    config = SchedulerConfig(**{"max_num_seqs": 8, **scheduler})
    core = Scheduler(config, kv, max_model_len=256)
    recorder = Recorder(ClockedExecutor(executor, clock), clock, VOCAB_SIZE)
    settings = EngineSettings(0, depth, limits=QueueLimits())
    client = EngineThread(core, recorder, ByteTokenizer(), settings, clock=clock)
    clock.watch(client.timing)
    client.start()
    try:
        drive = Drive(client, core, recorder, workload, clock, watch, sleep=clock.sleep)
        return drive.run(
            lambda stats: StepTimes(stats.executor_seconds, 0.5, tables.seconds, stats.gap_seconds)
        )
    finally:
        client.close()


def _ticking(seconds: float) -> Callable[[], float]:
    """Each reading comes so much later than the one before."""
    readings = iter(range(1 << 30))
    return lambda: next(readings) * seconds
