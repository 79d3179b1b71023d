"""One request as the scheduler sees it. Standard library and `core` only.

A `Request` is the only mutable value of the core that outlives a step. Progress is counted, not phased: every request
catches up `num_computed` with its length, so a prefill chunk, a prefix hit and a decode step are the same thing.

    tokens known on the host                 sampled, value still on the device
    |<------------- len(tokens) ------------>|<- num_pending ->|
    |<------ num_computed (issued) ---->|<---- remaining ----->|   (the token at max_len - 1 is never computed)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pagedcli.core.sampling import SamplingParams

if TYPE_CHECKING:
    from pagedcli.core.plan import TokenLogprob


NEVER = 1 << 62
"""More tokens than any request has."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    PAGE_CAP = "page_cap"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and what came of it so far. The front end fills the first block of fields, the core all others.

    Attributes:
        id: Unique among the requests that an engine holds.
        tokens: Prompt token ids, then the output token ids that are known on the host. Owned by the core once added.
        num_prompt: How many of `tokens` are the prompt.
        params: Sampling parameters, with words already resolved to ids.
        stop_ids: Ids that end the request: the model's end-of-sequence ids unless ignore_eos, and stop_token_ids.
        seed: Resolved seed of the random numbers.
        sample_index: Which of the n samples of its prompt this is.
        fork_of: Id of sample 0 of the same prompt, for sample_index > 0; such a request shares its prompt's blocks.
        arrival: Seconds on the engine's clock; `Scheduler.add` fills it in when it is not given.
        seq: Order of arrival, unique; ties of the policy are broken by it (I10).
        rank: Policy rank; the smaller runs earlier.
        max_len: Prompt and output tokens at most, after clamping to what fits.
        max_computed: Positions that are ever computed: the last token sampled needs no KV, the whole prompt does.
        limit_reason: Why the request ends when it reaches max_len: length or page_cap.
        num_computed: Positions whose KV is issued: computed, or on the way to be.
        num_pending: Tokens sampled whose value is still on the device (I6).
        inflight: Plan entries issued and not yet applied (I6, I7).
        epoch: Raised by every preemption.
        slot: Executor slot while it runs, else -1.
        table: Blocks of KV while it runs.
        num_sent: How many blocks of `table` the executor was told of.
        keys: Serials of the published prefix blocks, one for each leading full block of `table` (I2).
        publish_at: Tokens that it must have, known and issued, before another block can be published (I11).
        reserved: Blocks promised to this request and not taken yet.
        served: Step in which it was last issued.
        prompt_step: Step in which its prompt was completely issued in this epoch, 0 before that.
        num_preemptions: How often it lost its blocks.
        peak_computed: Highest num_computed before its last preemption; positions below it are computed again.
        num_cached: Prompt tokens served from shared blocks when it was first admitted.
        first_scheduled: Time at which it was first admitted (NaN before).
        prompt_logprobs: Collected prompt log-probabilities; None when they were delivered.
        token_time: Time at which its last token came (NaN before the first; kept only if a pace is wanted).
        token_step: Step that sampled it.
        token_epoch: Epoch in which it was sampled.
        prompt_epoch: Epoch from which prompt log-probabilities are collected.
        finish: Why it ended, None while it lives.
    """

    id: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0
    sample_index: int = 0
    fork_of: int | None = None
    arrival: float = math.nan

    # Each decode of each step reads or writes these: side by side they take the fewest lines of memory.
    num_computed: int = 0
    num_pending: int = 0
    inflight: int = 0
    served: int = 0
    slot: int = -1
    epoch: int = 0
    publish_at: int = NEVER
    peak_computed: int = 0
    max_len: int = 0
    max_computed: int = 0
    finish: FinishReason | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    num_cached: int = 0
    first_scheduled: float = math.nan

    seq: int = -1
    rank: int = 0
    limit_reason: FinishReason = FinishReason.LENGTH
    table: list[int] = field(default_factory=list)
    num_sent: int = 0
    keys: list[int] = field(default_factory=list)
    reserved: int = 0
    prompt_step: int = 0
    num_preemptions: int = 0
    token_time: float = math.nan
    token_step: int = 0
    token_epoch: int = 0
    prompt_epoch: int = 0

    @property
    def length(self) -> int:
        """Tokens it has, those whose value is still on the device included."""
        return len(self.tokens) + self.num_pending

    @property
    def num_output(self) -> int:
        """Output tokens known on the host."""
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Positions that can be issued now; 0 when everything it may still emit is in flight."""
        return min(self.length, self.max_computed) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether the only position to issue is that of a token sampled in this run."""
        next_computed = self.num_computed + 1
        return self.num_prompt < next_computed == len(self.tokens) + self.num_pending <= self.max_computed

    @property
    def sort_key(self) -> tuple[int, int]:
        """Policy order: rank, then arrival (I10)."""
        return (self.rank, self.seq)

    @property
    def is_running(self) -> bool:
        """Whether it holds a slot and blocks and has not ended."""
        return self.slot >= 0 and self.finish is None
