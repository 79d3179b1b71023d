"""Counters and gauges of the scheduler, as a value. Standard library and `core` only.

KV use = tokens stored over token slots allocated to running requests: shared blocks count once, evictable cached
blocks and blocks that are only reserved are left out. Under static batching, what finished requests still hold until
their batch ends counts as allocated and as stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from pagedcli.core.kv_manager import BlockCounts
from pagedcli.core.request import FinishReason


@dataclass(slots=True)
class Counters:
    """What was done since the scheduler was made; every value only grows.

    Attributes:
        steps: Plans issued.
        added: Requests accepted.
        rejected: Requests refused in `add`.
        finished: Requests ended, by reason.
        failed: Requests that the device could not go on with (counted under abort in `finished`, too).
        computed_tokens: Positions issued, of prompts and outputs, repeated work included.
        prompt_tokens: Positions of prompts issued.
        recomputed_tokens: Positions issued again after a preemption.
        generated_tokens: Output tokens delivered.
        dropped_tokens: Output tokens that came too late for a request that had ended.
        prefix_query_tokens: Prompt tokens that were looked up at first admissions.
        prefix_hit_tokens: Of these, tokens served from shared blocks.
        preemptions: Requests that lost their blocks.
        copied_blocks: Blocks copied for forks.
        max_decode_gap: Most steps between two tokens issued for a running decode (1: one in every step).
        itl_misses: Tokens that came later than wanted after the one before, by cause (`pacing.MissCause`).
    """

    steps: int = 0
    added: int = 0
    rejected: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    failed: int = 0
    computed_tokens: int = 0
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    dropped_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    copied_blocks: int = 0
    max_decode_gap: int = 0
    itl_misses: dict[str, int] = field(default_factory=dict)

    def copy(self) -> Counters:
        """A value that does not change any more."""
        copied = Counters(*_counter_values(self))
        copied.finished = dict(self.finished)
        copied.itl_misses = dict(self.itl_misses)
        return copied


_counter_values: Callable[[Counters], tuple[Any, ...]] = attrgetter(*[item.name for item in fields(Counters)])


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counters and gauges at one moment; cheap enough to be taken in every step and kept as a series.

    Attributes:
        counters: What was done so far.
        running: Requests that run.
        waiting: Requests that wait.
        stored_tokens: Tokens whose KV running requests hold, shared ones counted once.
        allocated_tokens: Token slots allocated to running requests, shared blocks counted once.
        peak_running: Most requests that ran at once.
        peak_allocated_tokens: Most token slots allocated at once.
        peak_stored_tokens: Most tokens stored at once.
        blocks: Where the blocks are.
    """

    counters: Counters
    running: int
    waiting: int
    stored_tokens: int
    allocated_tokens: int
    peak_running: int
    peak_allocated_tokens: int
    peak_stored_tokens: int
    blocks: BlockCounts

    @property
    def kv_use(self) -> float:
        """Tokens stored over token slots allocated, 0 to 1; 0 when nothing runs."""
        return self.stored_tokens / self.allocated_tokens if self.allocated_tokens else 0.0

    @property
    def pool_use(self) -> float:
        """Blocks in use over all blocks, 0 to 1 (what vLLM calls kv_cache_usage_perc)."""
        total = self.blocks.free + self.blocks.cached + self.blocks.used
        return self.blocks.used / total

    @property
    def prefix_hit_rate(self) -> float:
        """Prompt tokens served from shared blocks over prompt tokens looked up, 0 to 1."""
        queried = self.counters.prefix_query_tokens
        return self.counters.prefix_hit_tokens / queried if queried else 0.0


@dataclass(slots=True)
class Gauges:
    """The peaks and the running sum that `SchedulerStats` is made from.

    Attributes:
        table_tokens: Sum of num_computed over the requests that hold blocks; shared tokens count every time.
        peak_running: See `SchedulerStats`.
        peak_allocated_tokens: See `SchedulerStats`.
        peak_stored_tokens: See `SchedulerStats`.
    """

    table_tokens: int = 0
    peak_running: int = 0
    peak_allocated_tokens: int = 0
    peak_stored_tokens: int = 0

    def note(self, running: int, stored: int, allocated: int) -> None:
        """Raise the peaks to these values."""
        self.peak_running = max(self.peak_running, running)
        self.peak_stored_tokens = max(self.peak_stored_tokens, stored)
        self.peak_allocated_tokens = max(self.peak_allocated_tokens, allocated)
