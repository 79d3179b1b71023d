"""Block tables over the pool: who gets how many blocks, prefix hits, forks with copy-on-write, reservations.

Standard library and `core` only. A manager that cannot serve returns `Blocked` with the numbers and changes nothing.

A request that is admitted has its whole known length *reserved*, and takes blocks from that reservation chunk by
chunk, so that two admitted prefills can not starve each other:

    pool:  | referenced by tables | free, reserved for admitted requests | free and available |
                                    sum of request.reserved                available()

Only growth beyond the reservation (output tokens) can be refused, and then the scheduler preempts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagedcli.core.block_pool import ROOT_SERIAL, BlockKey, BlockPool
from pagedcli.core.blocked import Blocked, BlockedKind
from pagedcli.core.request import NEVER, Request

Copies = tuple[tuple[int, int], ...]
"""(source block, destination block) pairs for `StepPlan.copies`."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Where the blocks are; free + cached + used is all of them, shared are part of the used ones."""

    free: int
    cached: int
    used: int
    shared: int
    reserved: int


class KVManager(Protocol):
    """What the scheduler needs of an allocator; `PagedKV` here, the contiguous baselines in `kv_contiguous`.

    Attributes:
        block_size: Tokens in a block.
        num_blocks: Blocks of the pool.
        caching: Whether prefixes are published and matched.
        capacity_tokens: Longest KV that one request can have.
    """

    block_size: int
    num_blocks: int
    caching: bool
    capacity_tokens: int

    def match(self, request: Request) -> int:
        """Tokens of the request that are cached now, at most all but its last known one (I3). Changes nothing."""

    def admission_block(self, request: Request, num_tokens: int, spare: int) -> Blocked | None:
        """Why `admit` would refuse, or None. Changes nothing."""

    def admit(self, request: Request, num_tokens: int, spare: int) -> Blocked | None:
        """Give it its prefix hits and reserve blocks for num_tokens in all, leaving `spare` blocks available.

        Sets `table`, `keys`, `reserved` and `num_computed` (the tokens that need not be computed).
        """

    def fork(self, child: Request, parent: Request, num_tokens: int, spare: int) -> Blocked | Copies:
        """Like `admit`, with the parent's KV of all prompt tokens but the last; returns the copies to be made."""

    def grow(self, request: Request, num_tokens: int) -> Blocked | None:
        """Extend the table to hold num_tokens, from the reservation first."""

    def publish(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks of the first num_tokens findable; they must be known and issued (I11)."""

    def release(self, request: Request) -> None:
        """Take back its blocks and its reservation."""

    def gain(self, request: Request) -> int:
        """Blocks that would become available if it were released (I9)."""

    def allocated_tokens(self) -> int:
        """Token slots of all blocks that tables hold, shared ones counted once."""

    def duplicate_tokens(self) -> int:
        """Token slots that tables hold more than once: sum over the tables minus `allocated_tokens`."""

    def counts(self) -> BlockCounts:
        """Where the blocks are."""

    def block_refs(self) -> Sequence[int]:
        """References of every block."""

    def cached_blocks(self) -> Sequence[bool]:
        """For every block whether its content can be found by a prefix match."""

    def largest_hole(self) -> int:
        """Blocks that the largest single request could get now (external fragmentation shows here)."""

    def check(self, tables: Mapping[int, Sequence[int]], reserved: int) -> None:
        """Assert I1 against the tables of all owners and the sum of their reservations."""


class PagedKV:
    """Blocks on demand, prefix sharing, copy-on-write: the real thing.

    Args:
        num_blocks: Blocks of the pool.
        block_size: Tokens in a block.
        caching: Whether prefixes are shared between requests.
        make_key: Test hook: makes the keys of the prefix index.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        caching: bool = True,
        make_key: Callable[[int, tuple[int, ...], str], BlockKey] = BlockKey,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self.capacity_tokens = num_blocks * block_size
        self.pool = BlockPool(num_blocks, make_key)
        self.reserved = 0

    def available(self) -> int:
        """Free blocks that nobody has reserved."""
        return self.pool.num_free - self.reserved

    def match(self, request: Request) -> int:
        """See `KVManager.match`."""
        return len(self._hits(request)) * self.block_size

    def admission_block(self, request: Request, num_tokens: int, spare: int) -> Blocked | None:
        """See `KVManager.admission_block`."""
        return self._shortage(self._hits(request), num_tokens, spare)

    def admit(self, request: Request, num_tokens: int, spare: int) -> Blocked | None:
        """See `KVManager.admit`."""
        hits = self._hits(request)
        shortage = self._shortage(hits, num_tokens, spare)
        if shortage is None:
            request.keys = [self.pool.serials[block] for block in hits]
            self._start(request, hits, num_tokens)
            request.num_computed = len(hits) * self.block_size
        return shortage

    def fork(self, child: Request, parent: Request, num_tokens: int, spare: int) -> Blocked | Copies:
        """See `KVManager.fork`."""
        num_kept = parent.num_prompt - 1  # the last prompt token is computed again, for its logits (I3)
        num_shared = num_kept // self.block_size
        shared = parent.table[:num_shared]
        shortage = self._shortage(shared, num_tokens, spare)
        if shortage is not None:
            return shortage
        child.keys = parent.keys[:num_shared]
        self._start(child, shared, num_tokens)
        child.num_computed = num_kept
        if num_kept % self.block_size == 0:
            return ()
        self._take(child, 1)
        return ((parent.table[num_shared], child.table[num_shared]),)

    def grow(self, request: Request, num_tokens: int) -> Blocked | None:
        """See `KVManager.grow`."""
        need = blocks_for(num_tokens, self.block_size) - len(request.table)
        beyond = need - request.reserved
        if beyond > 0 and beyond > self.available():
            return Blocked(BlockedKind.MEMORY, beyond, self.available())
        self._take(request, need)
        return None

    def publish(self, request: Request, num_tokens: int) -> None:
        """See `KVManager.publish`."""
        if not self.caching:
            return
        size, keys, salt = self.block_size, request.keys, request.params.cache_salt
        for index in range(len(keys), num_tokens // size):
            tokens = tuple(request.tokens[index * size : (index + 1) * size])
            parent = keys[-1] if keys else ROOT_SERIAL
            keys.append(self.pool.publish(request.table[index], parent, tokens, salt))
        self._set_publish_at(request)

    def release(self, request: Request) -> None:
        """See `KVManager.release`. The tail goes first, so that the head of a prefix is evicted last."""
        for block in reversed(request.table):
            self.pool.release(block)
        self.reserved -= request.reserved
        request.table, request.keys, request.reserved = [], [], 0
        self._set_publish_at(request)

    def gain(self, request: Request) -> int:
        """See `KVManager.gain`."""
        refs = self.pool.refs
        return sum(refs[block] == 1 for block in request.table) + request.reserved

    def allocated_tokens(self) -> int:
        """See `KVManager.allocated_tokens`."""
        return (self.num_blocks - self.pool.num_free) * self.block_size

    def duplicate_tokens(self) -> int:
        """See `KVManager.duplicate_tokens`. Only full blocks are shared, so these are tokens stored, too."""
        pool = self.pool
        return (pool.num_refs + pool.num_free - self.num_blocks) * self.block_size

    def counts(self) -> BlockCounts:
        """See `KVManager.counts`."""
        pool = self.pool
        return BlockCounts(
            free=pool.num_free - pool.num_cached,
            cached=pool.num_cached,
            used=self.num_blocks - pool.num_free,
            shared=pool.num_shared,
            reserved=self.reserved,
        )

    def block_refs(self) -> Sequence[int]:
        """See `KVManager.block_refs`."""
        return tuple(self.pool.refs)

    def cached_blocks(self) -> Sequence[bool]:
        """See `KVManager.cached_blocks`."""
        return tuple(serial > 0 for serial in self.pool.serials)

    def largest_hole(self) -> int:
        """See `KVManager.largest_hole`: paging has no external fragmentation."""
        return self.available()

    def check(self, tables: Mapping[int, Sequence[int]], reserved: int) -> None:
        """See `KVManager.check`."""
        self.pool.check(tables)
        assert self.reserved == reserved, f"reserved is {self.reserved}, requests hold {reserved}"
        assert self.reserved <= self.pool.num_free, "more blocks are promised than free"

    def _hits(self, request: Request) -> list[int]:
        """Published blocks that hold the longest prefix of its tokens, its last token never among them (I2, I3)."""
        if not self.caching or request.prompt_logprobs is not None:
            return []
        size, tokens, salt, find = self.block_size, request.tokens, request.params.cache_salt, self.pool.find
        hits: list[int] = []
        parent = ROOT_SERIAL
        for start in range(0, (len(tokens) - 1) // size * size, size):
            block = find(parent, tuple(tokens[start : start + size]), salt)
            if block is None:
                break
            hits.append(block)
            parent = self.pool.serials[block]
        return hits

    def _shortage(self, shared: Sequence[int], num_tokens: int, spare: int) -> Blocked | None:
        """Why a request over these shared blocks can not have num_tokens in all; free shared ones count as needed."""
        refs = self.pool.refs
        revived = sum(refs[block] == 0 for block in shared)
        needs = blocks_for(num_tokens, self.block_size) - len(shared) + revived
        has = self.available() - spare
        return Blocked(BlockedKind.MEMORY, needs, max(has, 0)) if needs > has else None

    def _start(self, request: Request, shared: Sequence[int], num_tokens: int) -> None:
        for block in shared:
            self.pool.share(block)
        request.table = list(shared)
        request.reserved = blocks_for(num_tokens, self.block_size) - len(shared)
        self.reserved += request.reserved
        self._set_publish_at(request)

    def _set_publish_at(self, request: Request) -> None:
        request.publish_at = (len(request.keys) + 1) * self.block_size if self.caching else NEVER

    def _take(self, request: Request, num_blocks: int) -> None:
        """Append blocks to its table, from the reservation as long as there is one."""
        promised = min(num_blocks, request.reserved)
        request.reserved -= promised
        self.reserved -= promised
        request.table.extend(self.pool.take(request.id) for _ in range(num_blocks))
