"""Reservations, copy-on-write and refusal of the paged manager; runs of consecutive blocks in the baselines."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedcli.core.blocked import Blocked, BlockedKind
from pagedcli.core.kv_contiguous import ContiguousKV, FirstFitKV
from pagedcli.core.kv_manager import KVManager, PagedKV
from pagedcli.core.limits import set_limits
from pagedcli.core.request import Request
from pagedcli.core.sampling import SamplingParams


def request(request_id: int, num_tokens: int, max_tokens: int = 4, **params: object) -> Request:
    made = Request(
        request_id, list(range(num_tokens)), num_tokens, SamplingParams(max_tokens=max_tokens, **params)
    )
    set_limits(made, PagedKV(1000, 4), 4000)
    return made


def test_admission_reserves_what_it_does_not_take() -> None:
    kv = PagedKV(10, 4)
    first, second = request(1, 24), request(2, 24)
    assert kv.admit(first, 24, 0) is None
    assert (len(first.table), first.reserved, kv.available()) == (0, 6, 4)
    assert kv.admit(second, 24, 0) == Blocked(BlockedKind.MEMORY, needs=6, has=4)
    assert kv.grow(first, 9) is None
    assert (len(first.table), first.reserved, kv.available()) == (3, 3, 4)
    kv.check({1: first.table}, first.reserved)


def test_growth_beyond_the_reservation_can_not_take_what_others_were_promised() -> None:
    kv = PagedKV(4, 4)
    first, second = request(1, 8), request(2, 8)
    assert kv.admit(first, 8, 0) is None
    assert kv.admit(second, 8, 0) is None
    assert kv.grow(first, 8) is None
    assert kv.grow(first, 9) == Blocked(BlockedKind.MEMORY, needs=1, has=0)
    assert kv.grow(second, 8) is None, "its blocks were promised"
    assert len(first.table) == 2, "a refusal changes nothing"


def test_the_watermark_keeps_blocks_free() -> None:
    kv = PagedKV(4, 4)
    assert kv.admit(request(1, 16), 16, 1) == Blocked(BlockedKind.MEMORY, needs=4, has=3)
    assert kv.admit(request(1, 16), 16, 0) is None


def test_hits_on_free_blocks_count_as_needed() -> None:
    kv = PagedKV(4, 4)
    first = request(1, 9)
    assert kv.admit(first, 9, 0) is None
    assert kv.grow(first, 9) is None
    kv.publish(first, 9)
    kv.release(first)
    other = request(2, 8)
    other.tokens = [50 + token for token in other.tokens]
    assert kv.admit(other, 8, 0) is None  # two of four blocks; the cached ones are still there
    again = request(3, 9)
    assert kv.match(again) == 8
    assert kv.admit(again, 9, 0) == Blocked(BlockedKind.MEMORY, needs=3, has=2)


def test_prompt_logprobs_take_no_hit() -> None:
    kv = PagedKV(10, 4)
    first = request(1, 9)
    kv.admit(first, 9, 0)
    kv.grow(first, 9)
    kv.publish(first, 9)
    again = request(2, 9)
    again.prompt_logprobs = []
    assert kv.match(again) == 0


def test_release_lets_the_tail_of_a_prefix_be_evicted_before_its_head() -> None:
    kv = PagedKV(4, 4)
    made = request(1, 12)
    kv.admit(made, 12, 0)
    kv.grow(made, 12)
    kv.publish(made, 12)
    head, middle, tail = made.table
    kv.release(made)
    assert kv.pool.eviction_order()[1:] == [tail, middle, head]


@pytest.mark.parametrize(
    ("length", "shared", "copied"), [(1, 0, 0), (4, 0, 1), (5, 1, 0), (6, 1, 1), (9, 2, 0)]
)
def test_fork_shares_full_blocks_and_copies_the_partial_one(length: int, shared: int, copied: int) -> None:
    kv = PagedKV(20, 4)
    parent, child = request(1, length), request(2, length)
    kv.admit(parent, length, 0)
    kv.grow(parent, length)
    copies = kv.fork(child, parent, length, 0)
    assert not isinstance(copies, Blocked)
    assert child.num_computed == length - 1, "the last prompt token is computed again"
    assert child.table[:shared] == parent.table[:shared]
    assert [source for source, _ in copies] == parent.table[shared : shared + copied]
    kv.grow(child, length)
    assert not set(child.table[shared:]) & set(parent.table), "what the child writes is its own"
    kv.check({1: parent.table, 2: child.table}, parent.reserved + child.reserved)


@pytest.mark.parametrize("kv", [ContiguousKV(20, 4, 40), FirstFitKV(20, 4)])
def test_contiguous_forks_copy_the_prompt(kv: KVManager) -> None:
    parent, child = request(1, 10), request(2, 10)
    assert kv.admit(parent, 10, 0) is None
    copies = kv.fork(child, parent, 10, 0)
    assert copies == tuple(zip(parent.table[:3], child.table[:3], strict=True))
    assert child.num_computed == 9


def test_contiguous_takes_the_longest_sequence_whatever_is_asked() -> None:
    kv = ContiguousKV(20, 4, 40)
    first, second, third = request(1, 3), request(2, 3), request(3, 3)
    assert kv.admit(first, 3, 0) is None
    assert kv.admit(second, 3, 0) is None
    assert len(first.table) == len(second.table) == 10
    assert kv.admit(third, 3, 0) == Blocked(BlockedKind.MEMORY, needs=10, has=0)


def test_first_fit_shows_external_fragmentation() -> None:
    kv = FirstFitKV(9, 4)
    made = [request(index, 9, 4) for index in range(3)]  # 12 tokens are computed: 3 blocks each
    for each in made:
        assert kv.admit(each, 9, 0) is None
    kv.release(made[0])
    kv.release(made[2])
    assert kv.counts().free == 6
    assert kv.largest_hole() == 3
    assert kv.admit(request(9, 12, 8), 12, 0) == Blocked(BlockedKind.MEMORY, needs=5, has=3)
    kv.release(made[1])
    assert kv.largest_hole() == 9


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=40), regions=st.booleans())
def test_I1_contiguous_runs_never_overlap(steps: list[tuple[bool, int]], regions: bool) -> None:
    kv: ContiguousKV | FirstFitKV = ContiguousKV(24, 2, 14) if regions else FirstFitKV(24, 2)
    holders: dict[int, Request] = {}
    for number, (is_admission, size) in enumerate(steps):
        if is_admission:
            made = request(number, size, 1)
            before = kv.largest_hole()
            blocked = kv.admit(made, size, 0)
            assert (blocked is None) == (before >= (7 if regions else -(-size // 2)))
            if blocked is None:
                holders[number] = made
        elif holders:
            kv.release(holders.pop(sorted(holders)[size % len(holders)]))
        kv.check({each.id: each.table for each in holders.values()}, 0)
        for each in holders.values():
            assert all(after == before + 1 for before, after in pairwise(each.table))
