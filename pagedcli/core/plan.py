"""What passes between the core and an executor: a `StepPlan` of plain values down, a `StepResult` back.

Standard library and `core` only. Nothing here holds a tensor or a live request, so that a plan can be sent to another
process or rank as bytes (`wire`).

A plan is carried out in this order, and executors run plans in the order of submission (I10):

    freed slots -> copies (src block -> dst block) -> entries (admission first, then new blocks, then compute)

Entries of one plan may read KV that other entries of the same plan write (a prefix published in this very step), so
in every layer the K and V of all entries are written before any attention of that layer is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from pagedcli.core.request import FinishReason
from pagedcli.core.sampling import SamplingParams

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Admission:
    """All that a slot needs to know of a request that (again) starts to run in it.

    Attributes:
        tokens: Every token known on the host: prompt, then output so far (not empty after a preemption).
        table: Block ids that hold, or will hold, positions 0, block_size, 2 * block_size, ...; prefix hits first.
        num_prompt: How many of `tokens` are the prompt (penalties and min_tokens count output tokens).
        sample_index: Which of the n samples of its prompt this is; part of the random numbers' key.
        seed: Resolved seed; part of the random numbers' key.
        params: Sampling parameters. `params.seed` may be None: `seed` counts.
        stop_ids: Token ids that end the request; masked while fewer than `params.min_tokens` tokens were sampled.
    """

    tokens: tuple[int, ...]
    table: tuple[int, ...]
    num_prompt: int
    sample_index: int
    seed: int
    params: SamplingParams
    stop_ids: tuple[int, ...]


class PlanEntry(NamedTuple):
    """The work of one request in one step: compute positions `start` to `start + n - 1`.

    A named tuple, like all that is made in every step: a frozen dataclass costs three times as much.

    Attributes:
        request_id: For logs and results; executors key their state by `slot`.
        slot: Index into the executor's batch state, 0 <= slot < max_num_seqs; constant while the request runs.
        epoch: Raised by every preemption; tells a late result of an earlier run from one of this run.
        start: First position computed.
        n: Number of positions computed, at least 1 (I3).
        samples: Whether a token is sampled from the last row; it becomes the token at position `start + n`.
        logit_rows: Rows of this entry, 0 to n - 1 and ascending, whose logits are needed. The last row if `samples`;
            for prompt log-probabilities also every row r whose next token, at position start + r + 1, is prompt.
        new_blocks: Blocks appended to the slot's table before computing (empty if `admission` is given).
        admission: Given when the request starts to run in `slot`, else None.
    """

    request_id: int
    slot: int
    epoch: int
    start: int
    n: int
    samples: bool
    logit_rows: tuple[int, ...]
    new_blocks: tuple[int, ...] = ()
    admission: Admission | None = None


_num_positions: Callable[[PlanEntry], int] = attrgetter("n")


class StepPlan(NamedTuple):
    """One forward pass.

    Attributes:
        step: Counts from 1.
        entries: At least one.
        copies: (source block, destination block) pairs, whole blocks of every layer, all read before any is written.
        freed_slots: Slots that hold no request any more since the previous plan.
    """

    step: int
    entries: tuple[PlanEntry, ...]
    copies: tuple[tuple[int, int], ...] = ()
    freed_slots: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Positions computed in this step."""
        return sum(map(_num_positions, self.entries))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token under the model's own distribution (before temperature and penalties).

    Attributes:
        token: Token id.
        logprob: Natural logarithm of its probability.
        rank: 1 for the most probable token.
        top: The most probable (token id, logprob) pairs, as many as were asked for, best first, ties to the lowest id.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class StepResult(NamedTuple):
    """What came of a plan; every tuple has one item per entry, in the plan's order.

    It is an executor's handle of its own step, too: of one that is done, so that an inline step makes no other object.

    Attributes:
        step: The plan's.
        tokens: Token id sampled, or NO_TOKEN for an entry with `samples` false.
        logprobs: Of the sampled token, where the request asked for logprobs, else None.
        prompt_logprobs: For the rows of `logit_rows` that predict a prompt token, in order; else empty.
        seconds: Time that the device was busy with this plan.
        errors: Why a request failed in this step (one line for its user), per entry, or empty if none did. A failed
            entry has NO_TOKEN and no logprobs; its request can only be ended, the others are not affected.
    """

    step: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...]
    seconds: float
    errors: tuple[str | None, ...] = ()

    def done(self) -> bool:
        """Always."""
        return True

    def result(self) -> StepResult:
        """Itself."""
        return self


class TokenEvent(NamedTuple):
    """What the scheduler tells of one request: a token, its end, or both.

    Attributes:
        request_id: Which request.
        token: Token id; None if the request ends without one (deadline, or max_tokens 0).
        index: Output tokens before this one.
        logprob: Of `token`, where the request asked for logprobs.
        prompt_logprobs: Of the second to the last prompt token, all of them, once, where the request asked for them.
        finish: Set in the last event of a request. `abort` and `finish` of the scheduler make no event.
        error: Why the device could not go on with this request (its `finish` is then abort), for its user.
        cached_tokens: Prompt tokens that were served from shared blocks at its first admission.
        first_scheduled: Time on the engine's clock at which it was first admitted; NaN if it never was.
    """

    request_id: int
    token: int | None
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0
    first_scheduled: float = math.nan
