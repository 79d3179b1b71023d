"""What the scheduler promises one feature at a time: ends, forks, static batches, what it tells about itself."""

from __future__ import annotations

import pytest

from pagedcli.core.blocked import Blocked, BlockedKind
from pagedcli.core.plan import NO_TOKEN, StepResult
from pagedcli.core.request import FinishReason
from pagedcli.core.snapshot import BlockState
from tests.core.bed import Bed, alone, numbers


def test_deadline_ends_a_request_with_what_it_has() -> None:
    bed = Bed(num_pages=100)
    running = bed.add(numbers(4), deadline_s=5.0, max_tokens=50)
    bed.drain()
    assert bed.finish[running] is FinishReason.DEADLINE
    assert bed.output[running] == alone(numbers(4), 50)[:5]
    bed.assert_idle()


def test_deadline_counts_from_arrival_and_reaches_waiting_requests() -> None:
    bed = Bed(max_num_seqs=1)
    bed.add(numbers(4), max_tokens=20)
    waiting = bed.add(numbers(4, 50), deadline_s=3.0)
    bed.drain()
    event = next(event for event in bed.events if event.request_id == waiting)
    assert (event.token, event.index, event.finish) == (None, 0, FinishReason.DEADLINE)
    assert event.first_scheduled != event.first_scheduled, "NaN: it never ran"


def test_page_cap_ends_a_request_with_what_it_has() -> None:
    bed = Bed(page_size=4)
    capped = bed.add(numbers(6), max_pages=2, max_tokens=50)
    exact = bed.add(numbers(6, 50), max_pages=2, max_tokens=3)
    bed.drain().assert_right()
    assert bed.finish == {capped: FinishReason.PAGE_CAP, exact: FinishReason.LENGTH}
    assert len(bed.output[capped]) == 3, "eight positions hold KV; the ninth token needs none"
    assert max(len(table) for table in bed.shadow_tables()) <= 2


def test_watermark_keeps_pages_free_for_those_that_run() -> None:
    bed = Bed(num_pages=10, page_size=4, watermark=0.2, max_num_seqs=4)
    bed.add(numbers(12), max_tokens=4)
    second = bed.add(numbers(24, 50))
    bed.step()
    assert bed.scheduler.blocked(second) == Blocked(BlockedKind.MEMORY, needs=6, has=5)
    bed.drain().assert_right()


def test_watermark_counts_only_while_others_run() -> None:
    bed = Bed(num_pages=10, page_size=4, watermark=0.2)
    bed.add(numbers(40), max_tokens=1)
    bed.drain().assert_right()


def test_stop_id_counts_only_after_min_tokens() -> None:
    prompt = numbers(5)
    stop_id = alone(prompt, 3)[2]
    for min_tokens, count in ((0, 3), (2, 3), (3, 20)):
        bed = Bed()
        request_id = bed.add(prompt, max_tokens=20, min_tokens=min_tokens)
        bed.requests[request_id].stop_ids = frozenset([stop_id])
        bed.drain()
        assert len(bed.output[request_id]) == count


def test_max_tokens_0_computes_the_prompt_and_samples_nothing() -> None:
    bed = Bed(page_size=4, max_num_batched_tokens=8, max_num_seqs=8)
    request_id = bed.add(numbers(19), max_tokens=0, prompt_logprobs=2)
    bed.drain()
    (event,) = bed.events
    assert (event.request_id, event.token, event.finish) == (request_id, None, FinishReason.LENGTH)
    assert event.prompt_logprobs is not None
    assert [each.token for each in event.prompt_logprobs] == numbers(19)[1:]
    assert sum(plan.num_tokens for plan in bed.plans) == 19


def test_A6_prompt_logprobs_are_the_same_on_a_warm_cache() -> None:
    bed = Bed(page_size=16)
    for _ in range(2):
        bed.add(numbers(33), prompt_logprobs=1)
        bed.drain()
    first, second = (event.prompt_logprobs for event in bed.events if event.index == 0)
    assert first == second
    assert first is not None
    assert len(first) == 32, "one for each prompt token but the first"


@pytest.mark.parametrize("allocation", ["paged", "contiguous", "first-fit"])
@pytest.mark.parametrize("length", [1, 4, 5, 7, 16])
def test_samples_of_one_prompt_compute_it_once(allocation: str, length: int) -> None:
    bed = Bed(page_size=4, num_pages=100, max_model_len=64, allocation=allocation, prefix_caching=False)
    first = bed.add(numbers(length), max_tokens=9)
    for index in (1, 2):
        bed.add(numbers(length), max_tokens=9, fork_of=first, sample_index=index)
    bed.drain().assert_right()
    assert len({tuple(tokens) for tokens in bed.output.values()}) == 3
    assert bed.counters.prompt_tokens == length + 2, "the others compute only the last prompt token"
    assert [request.num_cached for request in bed.requests.values()] == [0, length - 1, length - 1]


def test_fork_whose_parent_is_gone_is_admitted_like_any_request() -> None:
    bed = Bed(page_size=4, max_num_batched_tokens=4, max_num_seqs=4)
    first = bed.add(numbers(20), max_tokens=5)
    child = bed.add(numbers(20), max_tokens=5, fork_of=first, sample_index=1)
    bed.step(2)
    assert bed.scheduler.blocked(child) == Blocked(BlockedKind.PARENT, 20, 8)
    bed.scheduler.abort(first)
    bed.drain().assert_right(child)


def test_failed_entry_ends_its_request_and_no_other() -> None:
    bed = Bed()
    bed.add(numbers(3))
    bed.add(numbers(3, 50))
    plan = bed.scheduler.schedule()
    assert plan is not None
    result = StepResult(plan.step, (NO_TOKEN, 5), (None, None), ((), ()), 0.0, ("logits are NaN", None))
    failed, fine = bed.scheduler.apply(plan, result, 0.0)
    assert (failed.request_id, failed.token, failed.finish, failed.error) == (
        0, None, FinishReason.ABORT, "logits are NaN",
    )  # fmt: skip
    assert (fine.token, fine.error) == (5, None)
    assert bed.counters.failed == 1
    assert [view.id for view in bed.scheduler.snapshot().running] == [1]


@pytest.mark.parametrize("allocation", ["paged", "contiguous", "first-fit"])
def test_static_batch_admits_nobody_and_frees_nothing_until_it_ends(allocation: str) -> None:
    bed = Bed(batching="static", allocation=allocation, page_size=4, max_model_len=32, max_num_seqs=5)
    for index in range(3):
        bed.add(numbers(4, 50 * index), max_tokens=2 + 5 * index)
    bed.step()
    for index in range(3, 7):
        bed.add(numbers(4, 50 * index), max_tokens=2)
    bed.step(4)
    snapshot = bed.scheduler.snapshot()
    assert (snapshot.held, [view.id for view in snapshot.running]) == ((0,), [1, 2])
    assert snapshot.waiting[0].blocked == Blocked(BlockedKind.BATCH, 2, 0)
    assert any(block.owners == (0,) for block in snapshot.blocks)
    bed.drain().assert_right()
    starts = [plan.step for plan in bed.plans for entry in plan.entries if entry.admission]
    assert starts == [1, 1, 1, 13, 13, 13, 13]
    bed.assert_idle()


def test_static_batch_is_filled_over_several_steps_when_the_budget_is_short() -> None:
    bed = Bed(batching="static", max_num_seqs=4, max_num_batched_tokens=8)
    for index in range(4):
        bed.add(numbers(8, 50 * index), max_tokens=12)
    bed.drain().assert_right()
    starts = [plan.step for plan in bed.plans for entry in plan.entries if entry.admission]
    assert len(starts) == 4
    assert starts[-1] < 12, "one batch, though its prompts take several steps"


def test_blocked_tells_why_a_request_waits() -> None:
    bed = Bed(num_pages=8, page_size=4, max_num_seqs=2, max_num_batched_tokens=16)
    running = bed.add(numbers(12), max_tokens=12)
    large = bed.add(numbers(24, 50))
    behind = bed.add(numbers(4, 90))
    bed.step(2)
    assert bed.scheduler.blocked(running) is None
    assert bed.scheduler.blocked(99) is None
    assert str(bed.scheduler.blocked(large)) == "needs 6 pages, 4 are available"
    assert bed.scheduler.blocked(behind) == Blocked(BlockedKind.ORDER, 1, 0)
    bed = Bed(max_num_seqs=1)
    bed.add(numbers(4))
    second = bed.add(numbers(4))
    bed.step()
    assert bed.scheduler.blocked(second) == Blocked(BlockedKind.SLOTS, 1, 0)
    bed = Bed(max_num_seqs=4, max_num_batched_tokens=4)
    bed.add(numbers(40))
    third = bed.add(numbers(50, 90))
    bed.step()
    assert bed.scheduler.blocked(third) == Blocked(BlockedKind.BUDGET, 50, 0)


def test_snapshot_shows_free_cached_used_and_shared_blocks() -> None:
    bed = Bed(num_pages=12, page_size=4)
    bed.add(numbers(9, 700), max_tokens=1)
    bed.drain()
    bed.add(numbers(9), max_tokens=9)
    bed.step()
    bed.add(numbers(9), max_tokens=9)
    bed.step()
    snapshot = bed.scheduler.snapshot()
    states = [block.state for block in snapshot.blocks]
    assert {state: states.count(state) for state in BlockState} == {
        BlockState.FREE: 12 - 2 - 2 - 2, BlockState.CACHED: 2, BlockState.USED: 2, BlockState.SHARED: 2,
    }  # fmt: skip
    assert snapshot.counts.cached == 2
    assert snapshot.counts.used == 4
    assert snapshot.counts.shared == 2
    shared = [block for block in snapshot.blocks if block.state is BlockState.SHARED]
    assert [block.owners for block in shared] == [(1, 2), (1, 2)]


def test_stats_count_recomputed_and_kv_use() -> None:
    bed = Bed(num_pages=6, page_size=2, prefix_caching=False)
    bed.add(numbers(3), max_tokens=8)
    bed.add(numbers(3, 50), max_tokens=8)
    bed.step()
    stats = bed.scheduler.stats
    assert (stats.stored_tokens, stats.allocated_tokens, stats.kv_use) == (6, 8, 0.75)
    assert stats.pool_use == 4 / 6
    bed.drain().assert_right()
    counters = bed.counters
    needed = sum(request.max_computed for request in bed.requests.values())
    assert counters.preemptions > 0
    assert counters.computed_tokens == needed + counters.recomputed_tokens
    assert counters.generated_tokens == 16
    assert bed.scheduler.stats.peak_running == 2
    assert bed.scheduler.stats.kv_use == 0.0


def test_events_carry_cached_tokens_and_the_time_of_the_first_admission() -> None:
    bed = Bed(page_size=4, max_num_seqs=1)
    bed.add(numbers(9), max_tokens=2)
    second = bed.add(numbers(9), max_tokens=2)
    bed.drain()
    events = [event for event in bed.events if event.request_id == second]
    assert [event.cached_tokens for event in events] == [8, 8]
    assert {event.first_scheduled for event in events} == {2.0}


def test_KV_use_of_many_sequences_is_above_95_percent_at_page_16() -> None:
    bed = Bed(num_pages=200, page_size=16, max_num_seqs=24, prefix_caching=False)
    for index in range(24):
        bed.add(numbers(32 + 37 * index % 225, 1000 * index), max_tokens=16 + 53 * index % 141)
    series = []
    while bed.core.has_work:
        bed.step()
        stats = bed.scheduler.stats
        series.append((stats.stored_tokens, stats.kv_use))
    busiest = sorted(series)[len(series) // 2 :]
    assert sum(use for _, use in busiest) / len(busiest) > 0.95


def test_peaks_are_those_of_the_fullest_step_though_nobody_looked_then() -> None:
    bed = Bed(num_pages=20, page_size=2, prefix_caching=False)
    for first in (0, 50, 100):
        bed.add(numbers(3, first), max_tokens=4)
    bed.drain()
    stats = bed.scheduler.stats
    # Three at once, each with 3 prompt tokens and 3 of its 4 others stored, in 3 pages.
    assert (stats.peak_running, stats.peak_stored_tokens, stats.peak_allocated_tokens) == (3, 18, 18)
    assert (stats.running, stats.stored_tokens, stats.allocated_tokens) == (0, 0, 0)
