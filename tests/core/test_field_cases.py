"""Reports from the field that touch the core, each as a test named after its id in the list of cases."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from pagedcli.core.block_pool import BlockKey
from pagedcli.core.kv_manager import PagedKV
from pagedcli.core.request import FinishReason
from pagedcli.errors import RequestError
from tests.core.bed import Bed, numbers


def test_A1_prompts_that_never_fit_are_refused_at_once_with_the_numbers() -> None:
    bed = Bed(num_pages=50, page_size=16)
    for start in range(10):
        bed.add(numbers(20, start))
    for _ in range(5):
        with pytest.raises(
            RequestError, match=r"^needs 63 pages, the pool has 50: shorten by 200 tokens or"
        ) as caught:
            bed.add(numbers(1000))
        assert caught.value.code == "prompt_too_long"
        assert caught.value.status == 400
        assert "--num-pages 63" in str(caught.value)
    late = bed.add(numbers(30, 500))
    bed.drain().assert_right()
    assert len(bed.output[late]) == 4
    assert bed.counters.rejected == 5
    bed.assert_idle()


def test_A1_example_of_the_interface_page() -> None:
    bed = Bed(num_pages=49, page_size=16)
    with pytest.raises(RequestError) as caught:
        bed.add(numbers(998))
    assert str(caught.value) == "needs 63 pages, the pool has 49: shorten by 214 tokens or --num-pages 63"
    bed.add(numbers(998 - 214), max_tokens=None)
    assert bed.drain().finish == {0: FinishReason.LENGTH}
    assert len(bed.output[0]) == 1


@pytest.mark.parametrize("caching", [True, False])
def test_A8_same_refusal_with_and_without_prefix_cache(caching: bool) -> None:
    bed = Bed(num_pages=4, page_size=16, prefix_caching=caching)
    bed.add(numbers(60))
    bed.drain()
    with pytest.raises(
        RequestError, match="needs 5 pages, the pool has 4: shorten by 6 tokens or --num-pages 5"
    ):
        bed.add(numbers(70))
    assert bed.output == {0: bed.output[0]}
    assert len(bed.output[0]) == 4


@pytest.mark.parametrize("depth", [1, 2])
def test_A3_long_prompt_among_decodes_is_not_thrashed(depth: int) -> None:
    """A prompt longer than the budget comes to a pool that decodes have nearly filled and go on filling."""
    bed = Bed(num_pages=64, page_size=4, max_num_batched_tokens=32, max_num_seqs=16, depth=depth)
    for index in range(8):
        bed.add(numbers(8, 100 * index), max_tokens=48)
    bed.step(16)
    bed.add(numbers(90, 900), max_tokens=30)
    bed.drain().assert_right()
    needed = sum(request.max_computed for request in bed.requests.values())
    assert bed.counters.preemptions > 0, "the pool was not tight"
    assert bed.counters.computed_tokens < 2 * needed
    assert max(request.num_preemptions for request in bed.requests.values()) <= 3


@pytest.mark.parametrize("max_preemptions", [0, 1, 3])
def test_A3_preemptions_of_one_request_are_bounded(max_preemptions: int) -> None:
    rng = random.Random(5)
    bed = Bed(
        num_pages=30, page_size=2, max_num_batched_tokens=16, max_num_seqs=16, max_preemptions=max_preemptions
    )
    for index in range(40):
        bed.add(numbers(rng.randrange(1, 20), 20 * index), max_tokens=rng.randrange(1, 40))
    bed.drain().assert_right()
    counts = [request.num_preemptions for request in bed.requests.values()]
    assert max(counts) == max_preemptions
    needed = sum(request.max_computed for request in bed.requests.values())
    assert bed.counters.computed_tokens < 2 * needed


@pytest.mark.parametrize("decode_interval", [1, 2, 4])
def test_A4_stream_of_prompts_does_not_hold_back_a_decode(decode_interval: int) -> None:
    bed = Bed(
        num_pages=2000,
        page_size=16,
        max_num_batched_tokens=512,
        max_num_seqs=512,
        decode_interval=decode_interval,
    )
    long = bed.add(numbers(100), max_tokens=60)
    bed.step(2)
    for index in range(58):
        bed.add(numbers(512, 1000 * index), max_tokens=4)
        bed.step()
    steps = bed.token_steps[long]
    assert len(steps) == 60, "the decode was held back"
    assert max(after - before for before, after in pairwise(steps)) == 1
    assert bed.counters.max_decode_gap == 1


@pytest.mark.parametrize("decode_interval", [2, 3, 5])
def test_A4_decodes_beyond_the_budget_take_turns(decode_interval: int) -> None:
    """More decodes than tokens in a step: each still advances at least every decode_interval steps."""
    budget = 4
    bed = Bed(
        num_pages=500,
        page_size=4,
        max_num_batched_tokens=budget,
        max_num_seqs=budget * decode_interval,
        decode_interval=decode_interval,
    )
    for index in range(budget * decode_interval - 1):
        bed.add(numbers(1, index), max_tokens=40)
    bed.add(numbers(400, 5000), max_tokens=1)
    bed.drain().assert_right()
    gaps = [after - before for steps in bed.token_steps.values() for before, after in pairwise(steps)]
    assert 1 < max(gaps) <= decode_interval
    assert bed.counters.max_decode_gap == max(gaps)


@pytest.mark.parametrize("decode_interval", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 4, 7])
def test_A4_more_places_than_the_interval_allows_still_keep_the_bound(
    budget: int, decode_interval: int
) -> None:
    """Whoever would make the decodes too many for the budget is admitted later, not sooner and slower."""
    bed = Bed(
        num_pages=500,
        page_size=4,
        max_num_batched_tokens=budget,
        max_num_seqs=64,
        decode_interval=decode_interval,
    )
    for index in range(40):
        bed.add(numbers(1 + index % 5, 10 * index), max_tokens=20)
    bed.drain().assert_right()
    assert bed.counters.max_decode_gap <= decode_interval


class CollidingKey(BlockKey):
    """Every key has the same hash: only comparing the tokens tells them apart."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 42


def test_A5_prefix_index_trusts_no_hash() -> None:
    kv = PagedKV(40, 4, make_key=CollidingKey)
    bed = Bed(kv=kv)
    first, other = numbers(13), [*numbers(4), 99, *numbers(8, 5)]
    bed.add(first)
    bed.drain()
    bed.add(other)
    bed.add(first)
    bed.drain().assert_right()
    assert bed.requests[1].num_cached == 4, "only the first block is common"
    assert bed.requests[2].num_cached == 12


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_A7_full_cache_hit(length: int) -> None:
    bed = Bed(num_pages=20, page_size=16)
    for _ in range(5):
        bed.add(numbers(length))
        bed.drain()
    bed.assert_right()
    cached = [request.num_cached for request in bed.requests.values()]
    assert cached == [0] + [(length - 1) // 16 * 16] * 4
    entries = [entry for plan in bed.plans for entry in plan.entries if entry.admission]
    assert all(entry.start + entry.n == length and entry.n >= 1 for entry in entries), "I3"


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_A9_five_hundred_requests_leave_no_block_behind(page_size: int) -> None:
    rng = random.Random(page_size)
    bed = Bed(
        num_pages=-(-320 // page_size) + 3,
        page_size=page_size,
        max_num_batched_tokens=64,
        max_num_seqs=12,
        watermark=0.01,
        depth=2,
    )
    for index in range(500):
        prompt = numbers(rng.randrange(1, 40), rng.randrange(4) * 50)
        bed.add(prompt, max_tokens=rng.randrange(0, 40), stop_token_ids=())
        if rng.random() < 0.3:
            bed.scheduler.abort(rng.randrange(max(0, index - 10), index + 1))
        if rng.random() < 0.1:
            bed.scheduler.finish(rng.randrange(max(0, index - 10), index + 1), FinishReason.STOP)
        bed.step(rng.randrange(3))
    bed.drain()
    bed.assert_idle()
    if page_size < 64:
        assert bed.counters.preemptions > 0


def test_A9_check_names_the_owner_of_a_leaked_block() -> None:
    bed = Bed(num_pages=8, page_size=4)
    bed.add(numbers(10), max_tokens=20)
    bed.step()
    lost = bed.requests[0].table.pop()
    with pytest.raises(
        AssertionError, match=rf"block {lost}: 1 references, held by no table, taken by request 0"
    ):
        bed.scheduler.check()


def test_C2_short_prompt_is_not_stuck_behind_a_huge_one() -> None:
    budget = 64
    bed = Bed(num_pages=200, page_size=16, max_num_batched_tokens=budget, max_num_seqs=8)
    huge = bed.add(numbers(20 * budget))
    bed.step()
    short = bed.add(numbers(10, 5000))
    came = bed.now
    bed.drain().assert_right()
    assert bed.first_step(short) <= came + 1
    assert bed.first_step(huge) <= 22, "the huge one keeps at least half of the budget"


def test_C2_short_prompt_overtakes_long_ones_that_wait() -> None:
    bed = Bed(num_pages=400, page_size=16, max_num_batched_tokens=64, max_num_seqs=8)
    long = [bed.add(numbers(20 * 64, 2000 * index)) for index in range(3)]
    bed.step()
    short = bed.add(numbers(10, 9000))
    bed.drain().assert_right()
    assert bed.first_step(short) <= 2
    assert bed.first_step(long[0]) < bed.first_step(long[1]) < bed.first_step(long[2])


def test_C2_long_prompt_survives_a_flood_of_short_ones() -> None:
    """Short prompts get half of the budget at most, so a long one takes about twice its time."""
    bed = Bed(num_pages=2000, page_size=16, max_num_batched_tokens=64, max_num_seqs=64)
    long = bed.add(numbers(20 * 64))
    for index in range(60):
        for each in range(4):
            bed.add(numbers(20, 2000 + 100 * (4 * index + each)), max_tokens=1)
        bed.step()
    assert bed.first_step(long) <= 40


def test_C2_flood_of_short_prompts_does_not_starve_a_waiting_long_one() -> None:
    """While one long prompt is computed a longer one waits; short ones may pass it only so often (P5)."""
    bed = Bed(num_pages=2_000, page_size=16, max_num_batched_tokens=64, max_num_seqs=64)
    bed.add(numbers(100 * 64))
    second = bed.add(numbers(101 * 64, 50_000))
    for index in range(80):
        bed.add(numbers(20, 70_000 + 100 * index), max_tokens=1)
        bed.step()
    starts = {e.request_id: plan.step for plan in bed.plans for e in plan.entries if e.admission}
    assert 60 < starts[second] < 70, "64 admissions may pass it over"
