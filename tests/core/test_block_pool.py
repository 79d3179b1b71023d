"""The block pool against a model of it made of plain dictionaries (I1, I2)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagedcli.core.block_pool import ROOT_SERIAL, BlockPool

NUM_BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, publish and release; the model knows the content of every published block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: dict[int, list[int]] = {0: [], 1: [], 2: []}
        self.content: dict[int, tuple[int, tuple[int, ...], str]] = {}
        self.serial_of: dict[int, int] = {}
        self.freed: list[int] = list(range(NUM_BLOCKS))  # eviction order
        self.last_serial = ROOT_SERIAL

    def held(self) -> list[int]:
        return [block for table in self.tables.values() for block in table]

    @precondition(lambda self: self.freed)
    @rule(owner=st.sampled_from([0, 1, 2]))
    def take(self, owner: int) -> None:
        block = self.pool.take(owner)
        assert block == self.freed.pop(0), "the next in eviction order"
        self.content.pop(block, None)
        self.serial_of.pop(block, None)
        self.tables[owner].append(block)

    @precondition(lambda self: self.content)
    @rule(owner=st.sampled_from([0, 1, 2]), data=st.data())
    def share(self, owner: int, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.content)))
        found = self.pool.find(*self.content[block])
        assert found == block, "I2: the index gives the block of exactly this content"
        if block in self.freed:
            self.freed.remove(block)
        self.pool.share(block)
        self.tables[owner].append(block)

    @rule(owner=st.sampled_from([0, 1, 2]))
    def release_all(self, owner: int) -> None:
        for block in reversed(self.tables[owner]):
            self.tables[owner].pop()
            self.pool.release(block)
            if block not in self.held():
                self.freed.insert(len(self.freed) if block in self.content else 0, block)

    @precondition(lambda self: any(block not in self.content for block in self.held()))
    @rule(
        tokens=st.tuples(st.integers(0, 1), st.integers(0, 1)),
        salt=st.sampled_from(["", "x"]),
        data=st.data(),
    )
    def publish(self, tokens: tuple[int, ...], salt: str, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({b for b in self.held() if b not in self.content})))
        parent = data.draw(st.sampled_from([ROOT_SERIAL, *self.serial_of.values()]))
        key = (parent, tokens, salt)
        twin = next((other for other, content in self.content.items() if content == key), None)
        serial = self.pool.publish(block, *key)
        if twin is None:
            assert serial > self.last_serial, "a serial is never used twice"
            self.last_serial = serial
            self.content[block] = key
            self.serial_of[block] = serial
        else:
            assert serial == self.serial_of[twin]

    @invariant()
    def agrees(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.eviction_order() == self.freed
        assert self.pool.num_cached == sum(block in self.content for block in self.freed)
        assert self.pool.refs == [self.held().count(block) for block in range(NUM_BLOCKS)]
        for block in range(NUM_BLOCKS):
            assert self.pool.is_published(block) == (block in self.content)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_I1_release_without_reference_is_caught_and_names_the_last_owner() -> None:
    pool = BlockPool(2)
    block = pool.take(owner=17)
    pool.release(block)
    with pytest.raises(AssertionError, match="released more often than taken \\(last by 17\\)"):
        pool.release(block)


def test_I1_check_sees_a_block_that_two_tables_hold_with_one_reference() -> None:
    pool = BlockPool(2)
    block = pool.take(owner=1)
    with pytest.raises(AssertionError, match=rf"block {block}: 1 references, held by \[1, 2\]"):
        pool.check({1: [block], 2: [block]})


def test_I2_child_of_an_evicted_parent_is_never_found_under_its_successor() -> None:
    pool = BlockPool(2)
    parent, child = pool.take(1), pool.take(1)
    serial = pool.publish(parent, ROOT_SERIAL, (1, 2), "")
    pool.publish(child, serial, (3, 4), "")
    pool.release(parent)  # head first, against the rule: the parent is evicted before its child
    pool.release(child)
    assert pool.take(2) == parent
    again = pool.publish(parent, ROOT_SERIAL, (1, 2), "")
    assert pool.find(ROOT_SERIAL, (1, 2), "") == parent
    assert pool.find(again, (3, 4), "") is None


def test_least_recently_used_prefix_is_evicted_first_and_its_tail_before_its_head() -> None:
    pool = BlockPool(4)
    old, new = [pool.take(1), pool.take(1)], [pool.take(2), pool.take(2)]
    for salt, table in (("old", old), ("new", new)):
        serial = pool.publish(table[0], ROOT_SERIAL, (1,), salt)
        pool.publish(table[1], serial, (2,), salt)
    for table in (old, new):
        for block in reversed(table):
            pool.release(block)
    assert pool.eviction_order() == [old[1], old[0], new[1], new[0]]
