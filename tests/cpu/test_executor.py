"""Executors: order, failures, closing, and leaving the interpreter."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pagedcli.core.plan import PlanEntry, StepPlan, StepResult
from pagedcli.engine.executor import Executor, ExecutorInfo
from pagedcli.errors import EngineDead
from pagedcli.runtime.executors import InlineExecutor, ThreadExecutor

INFO = ExecutorInfo("cpu", "float32", 1, 16, 8, 4, 64, 10, 0, 0)


def plan(step: int) -> StepPlan:
    return StepPlan(step, (PlanEntry(step, 0, 0, 0, 1, True, (0,)),))


@dataclass
class Launched:
    worker: RecordingWorker
    step: int
    ready: bool = True

    def done(self) -> bool:
        return self.ready

    def read(self) -> StepResult:
        self.worker.log.append(("read", self.step))
        if self.step == self.worker.fail_read:
            raise ValueError(f"read {self.step}")
        return StepResult(self.step, (self.step,), (None,), ((),), 0.0)


@dataclass
class RecordingWorker:
    """Records what is launched and read, on which thread; can hold up, fail, and act like a GPU."""

    fail_launch: int = -1
    fail_read: int = -1
    asynchronous: bool = False
    gate: threading.Event = field(default_factory=threading.Event)
    log: list[tuple[str, int]] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    info: ExecutorInfo = INFO

    def __post_init__(self) -> None:
        self.gate.set()

    def launch(self, plan: StepPlan) -> Launched:
        assert self.gate.wait(30)
        self.threads.add(threading.current_thread().name)
        self.log.append(("launch", plan.step))
        if plan.step == self.fail_launch:
            raise ValueError(f"launch {plan.step}")
        return Launched(self, plan.step, ready=not self.asynchronous)

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).read()


both = pytest.mark.parametrize("make", [InlineExecutor, ThreadExecutor])


@both
def test_plans_run_in_order_of_submission(make: Callable[[RecordingWorker], Executor]) -> None:
    worker = RecordingWorker()
    executor = make(worker)
    assert executor.info is INFO
    handles = [executor.submit(plan(step)) for step in range(1, 40)]
    assert [handle.result().tokens for handle in reversed(handles)] == [(step,) for step in range(39, 0, -1)]
    assert all(handle.done() for handle in handles)
    assert handles[3].result() is handles[3].result()
    assert [step for what, step in worker.log if what == "launch"] == list(range(1, 40))
    executor.close()
    executor.close()
    own = {threading.current_thread().name} if make is InlineExecutor else {"paged-executor"}
    assert worker.threads == own


@both
@pytest.mark.parametrize("where", ["launch", "read"])
def test_a_failure_comes_out_of_its_handle_and_ends_the_executor(
    make: Callable[[RecordingWorker], Executor], where: str
) -> None:
    worker = RecordingWorker(
        fail_launch=3 if where == "launch" else -1, fail_read=3 if where == "read" else -1
    )
    executor = make(worker)
    handles = [executor.submit(plan(step)) for step in range(1, 6)]
    assert handles[0].result().step == 1
    assert handles[1].result().step == 2
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{where} 3"):
            handles[2].result()
    for later in (*handles[3:], executor.submit(plan(9))):
        with pytest.raises(EngineDead, match=f"ValueError: {where} 3") as caught:
            later.result()
        assert isinstance(caught.value.__cause__, ValueError)
    assert ("launch", 4) not in worker.log
    executor.close()


@both
def test_a_closed_executor_refuses_plans(make: Callable[[RecordingWorker], Executor]) -> None:
    executor = make(RecordingWorker())
    executor.close()
    with pytest.raises(EngineDead, match="closed"):
        executor.submit(plan(1))


def test_submit_returns_at_once_and_close_finishes_what_was_submitted() -> None:
    worker = RecordingWorker()
    worker.gate.clear()
    executor = ThreadExecutor(worker)
    handles = [executor.submit(plan(step)) for step in range(1, 4)]
    assert not handles[0].done()
    closer = threading.Thread(target=executor.close)
    closer.start()
    time.sleep(0.05)
    assert closer.is_alive()
    worker.gate.set()
    closer.join(30)
    assert [handle.done() for handle in handles] == [True] * 3
    assert handles[2].result().step == 3


def test_a_result_is_delivered_before_the_next_plan_is_computed_on_a_cpu() -> None:
    """Else the scheduler would wait for a step that it need not wait for."""
    worker = RecordingWorker()
    worker.gate.clear()
    executor = ThreadExecutor(worker)
    for step in (1, 2, 3):
        executor.submit(plan(step))
    worker.gate.set()
    executor.close()
    assert worker.log == [(what, step) for step in (1, 2, 3) for what in ("launch", "read")]


def test_a_waiting_plan_is_launched_before_the_last_is_read_on_a_gpu() -> None:
    worker = RecordingWorker(asynchronous=True)
    worker.gate.clear()
    executor = ThreadExecutor(worker)
    for step in (1, 2, 3):
        executor.submit(plan(step))
    worker.gate.set()
    executor.close()
    expected = ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "read 3"]
    assert [f"{what} {step}" for what, step in worker.log] == expected


def test_a_forgotten_executor_ends_its_thread_and_frees_its_worker() -> None:
    worker = RecordingWorker()
    executor = ThreadExecutor(worker)
    executor.submit(plan(1)).result()
    thread = next(t for t in threading.enumerate() if t.name == "paged-executor")
    watched = weakref.ref(worker)
    del executor, worker
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    del thread
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(7)", "executor.close(); executor.close()"])
def test_the_interpreter_exits_with_plans_in_the_queue(ending: str) -> None:
    script = f"""
        import time
        from pagedcli.core.plan import PlanEntry, StepPlan, StepResult
        from pagedcli.runtime.executors import ThreadExecutor

        class Done:
            def done(self): return True
            def read(self): return StepResult(1, (1,), (None,), ((),), 0.0)

        class Worker:
            info = None
            def launch(self, plan):
                time.sleep(0.2)
                return Done()

        executor = ThreadExecutor(Worker())
        first = executor.submit(StepPlan(1, ()))
        more = [executor.submit(StepPlan(step, ())) for step in range(2, 5)]
        first.result()
        {ending}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        check=False,
        timeout=100,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert done.returncode == (7 if "7" in ending else 0)


def test_an_interrupt_inside_an_inline_step_ends_the_executor() -> None:
    class Interrupted(RecordingWorker):
        def launch(self, plan: StepPlan) -> Launched:
            raise KeyboardInterrupt

    executor = InlineExecutor(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        executor.submit(plan(1))
    with pytest.raises(EngineDead, match="KeyboardInterrupt"):
        executor.submit(plan(2)).result()
