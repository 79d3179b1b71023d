"""What planning a step costs. The bound is loose, since machines differ; the figure is printed (`pytest -s`).

Processor time of this thread: what others do on the machine does not count.
"""

from __future__ import annotations

import gc
import statistics
import time

import pytest

from pagedcli.config import SchedulerConfig
from pagedcli.core.kv_manager import PagedKV
from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.core.request import Request
from pagedcli.core.sampling import SamplingParams
from pagedcli.core.scheduler import Scheduler

NUM_RUNNING = 256
LOOSE_BOUND_S = 0.010


def scheduler_of_decodes(num_blocks: int) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=NUM_RUNNING, max_num_batched_tokens=65_536)
    scheduler = Scheduler(config, PagedKV(num_blocks, 16), max_model_len=4096, watermark=0.01)
    for index in range(NUM_RUNNING):
        tokens = [(index * 7919 + position * 31) % 50_000 for position in range(200)]
        scheduler.add(Request(index, tokens, 200, SamplingParams(max_tokens=150), frozenset([50_001])), 0.0)
    return scheduler


def result_of(plan: StepPlan) -> StepResult:
    count = len(plan.entries)
    return StepResult(plan.step, (plan.step % 100,) * count, (None,) * count, ((),) * count, 0.0)


@pytest.mark.parametrize("pool", ["ample", "tight"])
def test_schedule_and_apply_cost_per_step(pool: str, record_property: pytest.RecordProperty) -> None:
    scheduler = scheduler_of_decodes(10_000 if pool == "ample" else 4_200)
    seconds = []
    gc.collect()
    while scheduler.has_work:
        start = time.thread_time()
        plan = scheduler.schedule()
        planned = time.thread_time()
        assert plan is not None
        result = result_of(plan)
        applied = time.thread_time()
        scheduler.apply(plan, result, 0.0)
        if len(plan.entries) >= NUM_RUNNING // 2:
            seconds.append(planned - start + time.thread_time() - applied)
    median = statistics.median(seconds)
    record_property("seconds_per_step", median)
    print(f"schedule + apply, {NUM_RUNNING} running, {pool} pool: {median * 1e3:.2f} ms a step")  # noqa: T201
    assert (scheduler.stats.counters.preemptions > 0) == (pool == "tight")
    assert median < LOOSE_BOUND_S
