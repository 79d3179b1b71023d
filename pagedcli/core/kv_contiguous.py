"""The baselines of the benchmark: every sequence in one run of consecutive blocks, taken whole at admission.

Standard library and `core` only. Both hand out tables of consecutive block ids, so that executors need no change.
They share nothing: a fork copies its parent's blocks. `ContiguousKV` pre-allocates regions of the longest sequence;
`FirstFitKV` takes runs of prompt + max_tokens where the first hole is large enough, so that external fragmentation
shows: `largest_hole()` falls below the number of free blocks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence

from pagedcli.core.blocked import Blocked, BlockedKind
from pagedcli.core.kv_manager import BlockCounts, Copies, blocks_for
from pagedcli.core.request import Request


class _ConsecutiveKV:
    """What both baselines share: bookkeeping of runs; how a run is chosen is left to `_run_length` and `_holes`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = False
        self.capacity_tokens = num_blocks * block_size
        self._used = 0
        self._refs = [0] * num_blocks
        self._holes: list[tuple[int, int]] = [
            (0, num_blocks)
        ]  # (first block, blocks), ascending, never adjacent

    def _run_length(self, request: Request) -> int:
        return blocks_for(request.max_computed, self.block_size)

    def match(self, request: Request) -> int:
        """Nothing is shared."""
        return 0

    def admission_block(self, request: Request, num_tokens: int, spare: int) -> Blocked | None:
        """A run of the right length must be free; `spare` means nothing where no request grows."""
        needs, has = self._run_length(request), self.largest_hole()
        return Blocked(BlockedKind.MEMORY, needs, has) if needs > has else None

    def admit(self, request: Request, num_tokens: int, spare: int) -> Blocked | None:
        """Take the whole run."""
        shortage = self.admission_block(request, num_tokens, spare)
        if shortage is None:
            first = self._take_run(self._run_length(request))
            request.table = list(range(first, first + self._run_length(request)))
            request.num_computed = 0
            self._used += len(request.table)
            self._mark(request.table, 1)
        return shortage

    def fork(self, child: Request, parent: Request, num_tokens: int, spare: int) -> Blocked | Copies:
        """Take a run and copy the parent's prompt, all but its last token, into it."""
        shortage = self.admit(child, num_tokens, spare)
        if shortage is not None:
            return shortage
        child.num_computed = parent.num_prompt - 1
        num_copied = blocks_for(child.num_computed, self.block_size)
        return tuple(zip(parent.table[:num_copied], child.table[:num_copied], strict=True))

    def grow(self, request: Request, num_tokens: int) -> Blocked | None:
        """The run holds the longest sequence already."""
        assert num_tokens <= len(request.table) * self.block_size, "a request outgrew its run"
        return None

    def publish(self, request: Request, num_tokens: int) -> None:
        """Nothing is shared."""

    def release(self, request: Request) -> None:
        """Give the run back and merge it with the holes around it."""
        if request.table:
            self._used -= len(request.table)
            self._mark(request.table, 0)
            self._return_run(request.table[0], len(request.table))
        request.table = []

    def gain(self, request: Request) -> int:
        """The whole run."""
        return len(request.table)

    def allocated_tokens(self) -> int:
        """Token slots of all runs."""
        return self._used * self.block_size

    def duplicate_tokens(self) -> int:
        """Nothing is shared."""
        return 0

    def counts(self) -> BlockCounts:
        """Blocks are free or used."""
        return BlockCounts(free=self.num_blocks - self._used, cached=0, used=self._used, shared=0, reserved=0)

    def block_refs(self) -> Sequence[int]:
        """1 for the blocks of a run."""
        return tuple(self._refs)

    def cached_blocks(self) -> Sequence[bool]:
        """Nothing is cached."""
        return (False,) * self.num_blocks

    def largest_hole(self) -> int:
        """Blocks of the largest free run."""
        return max((length for _, length in self._holes), default=0)

    def check(self, tables: Mapping[int, Sequence[int]], reserved: int) -> None:
        """Assert I1: every block belongs to one table or to one hole."""
        held = [0] * self.num_blocks
        for table in tables.values():
            for block in table:
                held[block] += 1
        assert held == self._refs, f"I1: tables hold {held}, references are {self._refs}"
        assert sum(held) == self._used, "I1: used blocks"
        assert reserved == 0, "a contiguous run is taken whole, nothing is reserved"
        end = -1
        for first, length in self._holes:
            assert first > end, "holes overlap or were not merged"
            assert length > 0, "empty hole"
            assert not any(held[first : first + length]), f"hole {first}+{length} is in use"
            end = first + length
        assert self._used + sum(length for _, length in self._holes) == self.num_blocks, "I1: blocks are lost"

    def _mark(self, table: Sequence[int], refs: int) -> None:
        for block in table:
            assert self._refs[block] != refs, f"I1: block {block} is taken or released twice"
            self._refs[block] = refs

    def _take_run(self, length: int) -> int:
        """First fit: the lowest hole that is long enough."""
        index = next(i for i, (_, free) in enumerate(self._holes) if free >= length)
        first, free = self._holes.pop(index)
        if free > length:
            self._holes.insert(index, (first + length, free - length))
        return first

    def _return_run(self, first: int, length: int) -> None:
        insort(self._holes, (first, length))
        merged: list[tuple[int, int]] = []
        for start, size in self._holes:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((start, size))
        self._holes = merged


class FirstFitKV(_ConsecutiveKV):
    """Variable-size runs: prompt + max_tokens, first fit."""


class ContiguousKV(_ConsecutiveKV):
    """Pre-allocated regions, each for the longest sequence, whatever a request asks for.

    Args:
        num_blocks: Blocks of the pool.
        block_size: Tokens in a block.
        max_model_len: Tokens of the longest sequence.
    """

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        super().__init__(num_blocks, block_size)
        self._region = min(blocks_for(max_model_len, block_size), num_blocks)

    def _run_length(self, request: Request) -> int:
        return self._region
