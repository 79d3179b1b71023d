"""Who holds which block of KV: reference counts, the free list in eviction order, and the exact prefix index.

Standard library only. Flat lists of ints, one item per block, so that every operation is O(1).

I1: a block is free (in the free list, no reference) or referenced, never both; its count equals the number of tables
that hold it. A *published* block stays findable while it is free ("cached") until it is taken for something else.

The free list is a ring through `_next` and `_prev` with a sentinel at index num_blocks:

    sentinel -> evicted next ... unpublished blocks | published blocks, least recently used first ... -> sentinel
    release():   unpublished go here ^                                   published go to the end here ^

The index maps (serial of the parent block's publication, the tokens themselves, salt) to a block. A serial is never
used twice, so an entry below an evicted parent can not be reached by accident, and since whole keys are compared there
is no hash to trust.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

ROOT_SERIAL = 0
"""Parent of a first block."""


class BlockKey(NamedTuple):
    """Identity of a published block: what it follows, what it holds, and for whom."""

    parent: int
    tokens: tuple[int, ...]
    salt: str


class BlockPool:
    """A fixed number of blocks, ids 0 to num_blocks - 1.

    Attributes:
        refs: References per block; 0 means free.
        serials: Serial of the block's publication, 0 if it is not published.
        takers: Who took the block last, for `check`.
        num_free: Blocks without references, cached ones included.
        num_cached: Free blocks that are published.
        num_shared: Blocks with more than one reference.
        num_refs: Sum of all references.
    """

    def __init__(
        self, num_blocks: int, make_key: Callable[[int, tuple[int, ...], str], BlockKey] = BlockKey
    ) -> None:
        self.num_blocks = num_blocks
        self.make_key = make_key
        self.refs = [0] * num_blocks
        self.serials: list[int] = [0] * num_blocks
        self.takers = [-1] * num_blocks
        self.num_free = num_blocks
        self.num_cached = 0
        self.num_shared = 0
        self.num_refs = 0
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._index: dict[BlockKey, int] = {}
        self._last_serial = ROOT_SERIAL
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]

    def take(self, owner: int) -> int:
        """Hand out the block that is evicted next, with one reference."""
        block = self._next[self.num_blocks]
        assert block != self.num_blocks, "no free block: the caller checks num_free"
        self._unlink(block)
        self._forget(block)
        self.refs[block] = 1
        self.num_refs += 1
        self.takers[block] = owner
        return block

    def share(self, block: int) -> None:
        """Add a reference to a published or referenced block."""
        if self.refs[block] == 0:
            self._unlink(block)
            self.num_cached -= 1
        self.num_shared += self.refs[block] == 1
        self.refs[block] += 1
        self.num_refs += 1

    def release(self, block: int) -> None:
        """Drop a reference; without any left the block becomes free. Callers release a table's tail before its head."""
        assert self.refs[block] > 0, (
            f"block {block} is released more often than taken (last by {self.takers[block]})"
        )
        self.num_shared -= self.refs[block] == 2
        self.refs[block] -= 1
        self.num_refs -= 1
        if self.refs[block] == 0:
            self._link(block, at_end=self._keys[block] is not None)

    def publish(self, block: int, parent: int, tokens: tuple[int, ...], salt: str) -> int:
        """Make a full block findable; return the serial under which its content is published.

        Another block may hold the same content already: then that one stays and its serial is returned.
        """
        key = self.make_key(parent, tokens, salt)
        known = self._index.get(key)
        if known is not None:
            serial: int = self.serials[known]
            return serial
        assert self._keys[block] is None, f"block {block} is published already"
        self._last_serial += 1
        self._index[key] = block
        self._keys[block] = key
        self.serials[block] = self._last_serial
        return self._last_serial

    def find(self, parent: int, tokens: tuple[int, ...], salt: str) -> int | None:
        """The block that holds exactly these tokens after that parent, or None."""
        return self._index.get(self.make_key(parent, tokens, salt))

    def is_published(self, block: int) -> bool:
        """Whether the block can be found by its content."""
        return self._keys[block] is not None

    def eviction_order(self) -> list[int]:
        """Free blocks, the one taken next first."""
        order = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            order.append(block)
            assert len(order) <= self.num_blocks, "I1: the free list has a loop"
            block = self._next[block]
        return order

    def check(self, tables: Mapping[int, Sequence[int]]) -> None:
        """Assert I1 and the index against the tables of all owners; names the owner of each leaked block."""
        holders: list[list[int]] = [[] for _ in range(self.num_blocks)]
        for owner, table in tables.items():
            for block in table:
                holders[block].append(owner)
        faults = [
            f"block {block}: {self.refs[block]} references, held by {held or 'no table'}, "
            f"taken by request {self.takers[block]}"
            for block, held in enumerate(holders)
            if self.refs[block] != len(held)
        ]
        assert not faults, "I1: " + "; ".join(faults)
        self._check_free_list()
        self._check_index()

    def _check_free_list(self) -> None:
        order = self.eviction_order()
        unreferenced = {block for block, refs in enumerate(self.refs) if refs == 0}
        assert set(order) == unreferenced, f"I1: free list {sorted(order)} is not {sorted(unreferenced)}"
        assert len(order) == self.num_free, f"I1: num_free is {self.num_free}, the list has {len(order)}"
        assert sum(self.refs) == self.num_refs, "I1: num_refs"
        assert sum(refs > 1 for refs in self.refs) == self.num_shared, "I1: num_shared"
        assert sum(self._keys[block] is not None for block in order) == self.num_cached, "I1: num_cached"

    def _check_index(self) -> None:
        published = {key: block for block, key in enumerate(self._keys) if key is not None}
        assert published == self._index, "I2: the index and the keys of the blocks differ"
        for block, key in enumerate(self._keys):
            assert (key is None) == (self.serials[block] == 0), f"I2: serial of block {block}"

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._index[key]
            self._keys[block] = None
            self.serials[block] = 0
            self.num_cached -= 1

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1

    def _link(self, block: int, *, at_end: bool) -> None:
        sentinel = self.num_blocks
        before = self._prev[sentinel] if at_end else sentinel
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self.num_free += 1
        self.num_cached += at_end
