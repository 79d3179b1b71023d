"""I1 to I12 of the design, each shown once on purpose; the random workloads look for what nobody thought of."""

from __future__ import annotations

import ast
import copy
import inspect
from pathlib import Path

import pytest

import pagedcli.core
from pagedcli.config import SchedulerConfig
from pagedcli.core.kv_manager import PagedKV
from pagedcli.core.plan import StepResult
from pagedcli.core.request import FinishReason, Request
from pagedcli.core.sampling import SamplingParams
from pagedcli.core.scheduler import Scheduler
from pagedcli.engine.core import EngineCore
from pagedcli.errors import RequestError
from tests.core.bed import Bed, alone, numbers


def test_I1_shared_blocks_are_counted_once_per_table() -> None:
    bed = Bed(num_pages=20, page_size=4)
    bed.add(numbers(13), max_tokens=9)
    bed.step(2)
    bed.add(numbers(13), max_tokens=9)
    bed.step()
    refs = {block.id: (block.refs, block.owners) for block in bed.scheduler.snapshot().blocks if block.refs}
    assert [refs[block] for block in bed.requests[0].table[:3]] == [(2, (0, 1))] * 3
    bed.drain().assert_idle()


@pytest.mark.parametrize("other", [{"cache_salt": "mine"}, {"prompt_logprobs": 1}])
def test_I2_no_hit_across_salts_and_none_for_prompt_logprobs(other: dict[str, object]) -> None:
    bed = Bed(num_pages=20, page_size=4)
    bed.add(numbers(13))
    bed.drain()
    bed.add(numbers(13), **other)
    bed.drain().assert_right()
    assert bed.requests[1].num_cached == 0


def test_I2_same_tokens_after_another_parent_are_no_hit() -> None:
    bed = Bed(num_pages=20, page_size=4)
    bed.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
    bed.drain()
    bed.add([0, 2, 3, 4, 5, 6, 7, 8, 9])
    bed.drain().assert_right()
    assert bed.requests[1].num_cached == 0


def test_I3_every_entry_computes_and_the_last_prompt_token_is_always_computed() -> None:
    bed = Bed(num_pages=20, page_size=4, max_num_batched_tokens=5, max_num_seqs=5)
    for length in (1, 4, 8, 8, 9):
        bed.add(numbers(length))
        bed.drain()
    entries = [entry for plan in bed.plans for entry in plan.entries]
    assert min(entry.n for entry in entries) == 1
    for request_id, request in bed.requests.items():
        covered = [
            e for e in entries if e.request_id == request_id and e.start < request.num_prompt <= e.start + e.n
        ]
        assert len(covered) == 1, "the position before the first output"
        assert covered[0].samples


def test_I4_schedule_is_a_function_of_state() -> None:
    bed = Bed(num_pages=12, page_size=2, max_num_batched_tokens=8, max_num_seqs=5, depth=2)
    for index in range(6):
        bed.add(numbers(5, 3 * index), max_tokens=12)
    while bed.core.has_work:
        twins = [copy.deepcopy(bed.scheduler) for _ in range(2)]
        for twin in twins:
            twin.stats, twin.snapshot(), twin.blocked(0)  # looking changes nothing
        planned = len(bed.plans)
        may_plan = len(bed.core.flight) < 2
        bed.step()
        if may_plan:
            plans = [twin.schedule() for twin in twins]
            assert plans[0] == plans[1] == (bed.plans[planned] if len(bed.plans) > planned else None)


def test_I4_core_knows_no_clock_no_chance_and_no_log() -> None:
    for path in Path(inspect.getfile(pagedcli.core)).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"time", "random", "logging", "datetime", "os"} & set(names), path.name


@pytest.mark.parametrize("depth", [2, 3])
def test_I5_depth_changes_no_output(depth: int) -> None:
    outputs = []
    for each in (1, depth):
        bed = Bed(num_pages=16, page_size=2, max_num_batched_tokens=8, max_num_seqs=8, depth=each)
        for index in range(10):
            bed.add(numbers(6, 2 * index), max_tokens=14)
        outputs.append(bed.drain().output)
        assert bed.counters.preemptions > 0
    assert outputs[0] == outputs[1]


def test_I6_pending_and_inflight_equal_what_the_plans_in_flight_hold() -> None:
    bed = Bed(num_pages=16, page_size=2, max_num_batched_tokens=8, max_num_seqs=8, depth=3)
    for index in range(10):
        bed.add(numbers(6, 2 * index), max_tokens=14)
    seen = 0
    while bed.core.has_work:
        bed.step()
        for request_id, request in bed.requests.items():
            entries = [
                e for _, plan, _ in bed.core.flight for e in plan.entries if e.request_id == request_id
            ]
            assert request.inflight == len(entries)
            assert request.num_pending == sum(entry.samples for entry in entries)
            seen += request.num_pending
    assert seen > 100
    assert bed.counters.preemptions > 0


def test_I7_late_token_of_an_aborted_request_is_dropped() -> None:
    bed = Bed(depth=2)
    request_id = bed.add(numbers(4), max_tokens=10)
    bed.step(3)
    assert bed.requests[request_id].num_pending > 0
    had = list(bed.output[request_id])
    bed.scheduler.abort(request_id)
    bed.drain()
    bed.step(2)
    assert bed.output[request_id] == had
    assert bed.counters.dropped_tokens == 1
    assert not bed.core.flight
    bed.assert_idle()


def preempted_in_flight() -> tuple[Bed, int]:
    """A bed in which request 1 was just preempted while a token of it was on the device."""
    bed = Bed(num_pages=6, page_size=2, depth=3)
    bed.add(numbers(3), max_tokens=8)
    bed.add(numbers(3, 50), max_tokens=8)
    while bed.counters.preemptions == 0:
        bed.step()
    return bed, 1


def test_I7_late_token_of_a_preempted_request_is_kept() -> None:
    bed, victim = preempted_in_flight()
    assert bed.requests[victim].num_pending == 1
    had = len(bed.output[victim])
    bed.step()
    assert len(bed.output[victim]) == had + 1
    bed.drain().assert_right()
    assert bed.counters.dropped_tokens == 0


def test_I8_request_with_pending_tokens_is_not_admitted_again() -> None:
    bed, victim = preempted_in_flight()
    bed.scheduler.abort(0)  # all memory is free now
    assert bed.requests[victim].num_pending == 1
    assert str(bed.scheduler.blocked(victim)) == "waits for 1 token still on the device"
    assert bed.scheduler.schedule() is None
    bed.drain()
    assert bed.output[victim] == alone(numbers(3, 50), 8)


def test_I9_victims_come_from_the_tail() -> None:
    bed = Bed(num_pages=9, page_size=2, max_num_batched_tokens=16, max_num_seqs=8)
    for index in range(3):
        bed.add(numbers(4, 50 * index), max_tokens=10)
    while bed.counters.preemptions == 0:
        bed.step()
    assert [request.num_preemptions for request in bed.requests.values()] == [0, 0, 1]
    for plan in bed.plans:
        assert len({entry.request_id for entry in plan.entries}) == len(plan.entries)
    bed.drain().assert_right()


def test_I9_preemption_that_gains_nothing_does_not_happen() -> None:
    """Request 1 holds only blocks that request 2, in the plan already, shares: taking them would free nothing."""
    bed = Bed(num_pages=6, page_size=2, max_num_batched_tokens=8, max_num_seqs=4)
    for index in range(2):
        bed.add(numbers(4, 50 * index), max_tokens=6)
    bed.step()
    scheduler, (first, second) = bed.scheduler, bed.requests.values()
    for block in second.table:
        bed.kv.pool.share(block)  # type: ignore[attr-defined]
    assert bed.kv.gain(second) == 0
    while bed.kv.available() > 0:  # type: ignore[attr-defined]
        bed.kv.pool.take(99)  # type: ignore[attr-defined]
    first.num_preemptions = 3
    plan = scheduler.schedule()
    assert scheduler.stats.counters.preemptions == 0
    assert plan is None, "neither can grow, and nobody loses anything for it"


def test_I10_admission_within_a_rank_is_by_arrival() -> None:
    bed = Bed(num_pages=12, page_size=4, max_num_seqs=2, policy="priority")
    for index, priority in enumerate([1, 0, 1, 0, 0]):
        bed.add(numbers(5, 50 * index), max_tokens=3, priority=priority)
    bed.drain().assert_right()
    admitted = [entry.request_id for plan in bed.plans for entry in plan.entries if entry.admission]
    assert admitted == [1, 3, 4, 0, 2]


def test_I10_loop_applies_in_order_of_submission() -> None:
    class Reordering(EngineCore):
        def step(self) -> list:  # type: ignore[type-arg]
            self.flight.reverse()
            return super().step()

    bed = Bed(depth=3)
    bed.add(numbers(4), max_tokens=10)
    bed.core = Reordering(bed.scheduler, bed, 3, lambda: 0.0)
    with pytest.raises(Exception, match="I10: result out of order"):
        bed.drain()


def test_I11_prompt_blocks_are_published_when_issued_output_blocks_when_applied() -> None:
    bed = Bed(num_pages=20, page_size=4)
    bed.add(numbers(8), max_tokens=9)
    plan = bed.scheduler.schedule()
    assert plan is not None
    request = bed.requests[0]
    assert len(request.keys) == 2, "the prompt is known: published before anything was computed"
    tokens = alone(numbers(8), 9)
    for expected_keys, token in (
        (2, tokens[0]),
        (2, tokens[1]),
        (2, tokens[2]),
        (2, tokens[3]),
        (3, tokens[4]),
    ):
        bed.scheduler.apply(plan, StepResult(plan.step, (token,), (None,), ((),), 0.0), 0.0)
        assert len(request.keys) == expected_keys, "position 11 is issued only after its token is known"
        plan = bed.scheduler.schedule()
        assert plan is not None


@pytest.mark.parametrize(
    ("length", "params", "message"),
    [
        (0, {}, "the prompt is empty: give at least one token"),
        (41, {}, "needs 11 pages, the pool has 10: shorten by 1 token or --num-pages 11"),
        (9, {"max_pages": 2}, "the prompt needs 3 pages, max_pages is 2: shorten by 1 token or max_pages 3"),
    ],
)
def test_I12_what_can_never_fit_is_refused(length: int, params: dict[str, int], message: str) -> None:
    bed = Bed(num_pages=10, page_size=4)
    with pytest.raises(RequestError) as caught:
        bed.add(numbers(length), **params)
    assert str(caught.value) == message
    assert not bed.scheduler.has_work
    assert bed.counters.rejected == 1


def test_I12_prompt_leaves_room_for_one_token_unless_it_wants_none() -> None:
    bed = Bed(num_pages=100, page_size=4, max_model_len=32)
    with pytest.raises(RequestError) as caught:
        bed.add(numbers(32))
    assert str(caught.value) == (
        "needs 33 tokens, one of them for output, and the longest sequence has 32: "
        "shorten by 1 token or --max-model-len 33"
    )
    with pytest.raises(RequestError, match="needs 33 tokens and the longest sequence has 32"):
        bed.add(numbers(33), max_tokens=0)
    full, almost, clamped = (
        bed.add(numbers(32), max_tokens=0),
        bed.add(numbers(31)),
        bed.add(numbers(20), max_tokens=99),
    )
    bed.drain().assert_right()
    assert [len(bed.output[each]) for each in (full, almost, clamped)] == [0, 1, 12]
    assert set(bed.finish.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("length", "remedy"),
    [(63, "shorten by 32 tokens or --max-model-len 64"), (64, "shorten by 33 tokens")],
)
def test_I12_no_longer_sequence_is_advised_than_the_model_was_made_for(length: int, remedy: str) -> None:
    config, kv = SchedulerConfig(), PagedKV(100, 4)
    scheduler = Scheduler(config, kv, max_model_len=32, model_limit=64)
    request = Request(0, numbers(length), length, SamplingParams())
    with pytest.raises(RequestError) as caught:
        scheduler.add(request, 0.0)
    assert str(caught.value).endswith(f"the longest sequence has 32: {remedy}")


def test_core_needs_no_engine() -> None:
    """The scheduler can be driven by hand: add, schedule, apply."""
    bed = Bed()
    bed.add(numbers(3), max_tokens=1)
    scheduler: Scheduler = bed.scheduler
    plan = scheduler.schedule()
    assert plan is not None
    events = scheduler.apply(plan, StepResult(plan.step, (5,), (None,), ((),), 0.0), 1.0)
    assert [(event.token, event.finish) for event in events] == [(5, FinishReason.LENGTH)]
    assert not scheduler.has_work
