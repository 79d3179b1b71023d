"""A picture of every block and every request, for the block map and for "why is my request waiting".

Standard library and `core` only. Values; taking one changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pagedcli.core.blocked import Blocked
from pagedcli.core.kv_manager import BlockCounts, KVManager
from pagedcli.core.request import Request
from pagedcli.core.roster import Roster


class BlockState(StrEnum):
    """What a block is at the moment."""

    FREE = "free"
    CACHED = "cached"
    USED = "used"
    SHARED = "shared"


class BlockView(NamedTuple):
    """One block: free, cached (free and findable), used by one request or shared by several.

    A named tuple, because a snapshot makes one for every block of the pool.
    """

    id: int
    state: BlockState
    refs: int
    owners: tuple[int, ...]
    findable: bool


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request: how far it is, what it holds, and what it waits for (None while it runs)."""

    id: int
    num_prompt: int
    num_output: int
    num_computed: int
    num_blocks: int
    reserved: int
    num_preemptions: int
    blocked: Blocked | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pool and the requests after `step` steps.

    Attributes:
        step: Plans issued so far.
        block_size: Tokens in a block.
        blocks: Every block, by id.
        counts: How many blocks are in which state.
        largest_hole: Blocks that the largest single request could get; below the free ones under fragmentation.
        running: Requests that run, in policy order.
        held: Ids of ended requests that keep their blocks until their static batch ends.
        waiting: Requests that wait, in the order in which they are considered.
    """

    step: int
    block_size: int
    blocks: tuple[BlockView, ...]
    counts: BlockCounts
    largest_hole: int
    running: tuple[RequestView, ...]
    held: tuple[int, ...]
    waiting: tuple[RequestView, ...]


def take_snapshot(step: int, roster: Roster, waiting: tuple[RequestView, ...]) -> Snapshot:
    """Everything after `step` steps; why requests wait is the caller's to say."""
    kv = roster.kv
    return Snapshot(
        step=step,
        block_size=kv.block_size,
        blocks=view_blocks(kv, roster.holders()),
        counts=kv.counts(),
        largest_hole=kv.largest_hole(),
        running=tuple(view_request(request, None) for request in roster.running),
        held=tuple(request.id for request in roster.held),
        waiting=waiting,
    )


def view_blocks(kv: KVManager, holders: Iterable[Request]) -> tuple[BlockView, ...]:
    """Every block with its owners."""
    owners: dict[int, tuple[int, ...]] = {}
    for request in holders:
        for block in request.table:
            owners[block] = (*owners.get(block, ()), request.id)
    facts = enumerate(zip(kv.block_refs(), kv.cached_blocks(), strict=True))
    return tuple(
        BlockView(block, _state(refs, findable), refs, owners.get(block, ()), findable)
        for block, (refs, findable) in facts
    )


def view_request(request: Request, blocked: Blocked | None) -> RequestView:
    """One request as a value."""
    return RequestView(
        id=request.id,
        num_prompt=request.num_prompt,
        num_output=request.num_output,
        num_computed=request.num_computed,
        num_blocks=len(request.table),
        reserved=request.reserved,
        num_preemptions=request.num_preemptions,
        blocked=blocked,
    )


def _state(refs: int, findable: bool) -> BlockState:
    if refs == 0:
        return BlockState.CACHED if findable else BlockState.FREE
    return BlockState.USED if refs == 1 else BlockState.SHARED
