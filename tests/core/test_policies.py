"""Order of admission, budget split, and that no policy makes anybody wait forever (P5)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcli.core.policy import POLICIES, split_budget
from tests.core.bed import Bed, numbers


def admissions(bed: Bed) -> list[int]:
    return [entry.request_id for plan in bed.plans for entry in plan.entries if entry.admission]


@given(budget=st.integers(0, 60), needs=st.lists(st.integers(1, 30), max_size=6))
def test_split_is_max_min_fair(budget: int, needs: list[int]) -> None:
    """Against handing out one token at a time, each to whoever has least and still needs some."""
    wanted = [0] * len(needs)
    for _ in range(budget):
        open_ = [index for index, need in enumerate(needs) if wanted[index] < need]
        if open_:
            wanted[min(open_, key=lambda index: (wanted[index], index))] += 1
    assert split_budget(budget, needs) == wanted


def test_priority_runs_the_lower_number_first() -> None:
    bed = Bed(policy="priority", max_num_seqs=1)
    for index, priority in enumerate([3, -1, 0, 3, -1]):
        bed.add(numbers(4, 50 * index), priority=priority)
    bed.drain().assert_right()
    assert admissions(bed) == [1, 4, 2, 0, 3]


def test_priority_takes_memory_from_the_least_urgent() -> None:
    bed = Bed(policy="priority", num_pages=12, page_size=2, max_num_seqs=4)
    for index, priority in enumerate([5, 0, 0]):
        bed.add(numbers(4, 50 * index), priority=priority, max_tokens=12)
    bed.drain().assert_right()
    assert bed.requests[0].num_preemptions > 0
    assert bed.requests[1].num_preemptions == 0


def test_shortest_runs_the_least_work_first() -> None:
    bed = Bed(policy="shortest", max_num_seqs=1)
    for index, (length, max_tokens) in enumerate([(40, 4), (4, 4), (20, 4), (4, 40)]):
        bed.add(numbers(length, 100 * index), max_tokens=max_tokens)
    bed.drain().assert_right()
    assert admissions(bed) == [1, 2, 0, 3]  # 0 and 3 are equal, so by arrival


def test_longest_prefix_runs_what_is_cached_first() -> None:
    bed = Bed(policy="longest-prefix", page_size=4, max_num_seqs=1)
    bed.add(numbers(24))
    bed.drain()
    for prompt in (numbers(24, 500), numbers(9), numbers(24, 700), numbers(21)):
        bed.add(prompt)
    bed.drain().assert_right()
    assert admissions(bed) == [0, 4, 2, 1, 3]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_P5_no_policy_starves_a_request(policy: str) -> None:
    """One request that the policy likes least, and a stream without end of those that it likes best."""
    bed = Bed(policy=policy, num_pages=40, page_size=4, max_num_seqs=2, max_num_batched_tokens=64)
    bed.add(numbers(12, 9000), max_tokens=1)
    bed.drain()
    unloved = bed.add(numbers(60), max_tokens=40, priority=9)
    for index in range(900):
        bed.add(numbers(12, 9000), max_tokens=1 + index % 3, priority=-9)
        bed.step()
        if bed.finish.get(unloved):
            break
    assert bed.finish.get(unloved), "starved"
    passed_over = admissions(bed).index(unloved)
    assert passed_over <= POLICIES[policy].max_passed_over + 2
    bed.drain().assert_idle()


def test_P5_shortest_lets_short_ones_by_while_a_long_one_runs() -> None:
    """Long and short requests do not hold each other up: both kinds make progress all the time."""
    bed = Bed(policy="shortest", num_pages=200, page_size=4, max_num_seqs=4, max_num_batched_tokens=16)
    rng = random.Random(1)
    long = [bed.add(numbers(100, 1000 * index), max_tokens=60) for index in range(3)]
    waits = []
    for index in range(300):
        if index % 3 == 0:
            short = bed.add(numbers(rng.randrange(2, 8), 20_000 + 10 * index), max_tokens=4)
            waits.append((short, bed.now))
        bed.step()
    bed.drain().assert_right()
    assert max(bed.first_step(short) - came for short, came in waits) < 60
    assert max(bed.token_steps[each][-1] for each in long) < 600


def test_equal_prompts_are_not_made_late_together() -> None:
    """First come, first served: sharing the budget among equals would finish both at the end."""
    bed = Bed(page_size=4, max_num_seqs=4, max_num_batched_tokens=16)
    first, second = bed.add(numbers(32)), bed.add(numbers(32, 500))
    bed.drain().assert_right()
    assert (bed.first_step(first), bed.first_step(second)) == (1, 4), "16 + 16 tokens, then 15 + 15 + 2"


def test_requests_of_one_step_share_what_the_first_of_them_publishes() -> None:
    bed = Bed(page_size=4, max_num_seqs=8)
    for _ in range(4):
        bed.add(numbers(17))
    bed.drain().assert_right()
    assert bed.requests[3].num_cached == 16
    assert len(bed.plans[0].entries) == 4
    assert bed.counters.prompt_tokens == 17 + 3
