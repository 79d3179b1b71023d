"""The one seam for policies: order of admission, choice of victims, and how a step's budget is shared.

Standard library and `core` only. Functions of state, without clock or randomness (I4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedcli.config import PolicyName
from pagedcli.core.request import Request

if TYPE_CHECKING:
    from pagedcli.core.kv_manager import KVManager

MAX_SHARING_PREFILLS = 4
"""Unfinished prefills that share a budget; beyond it only a prompt that completes at once may join."""

JOIN_WINDOW = 32
"""Waiting requests that are looked at, in a step, for one that may share the budget with a long prefill."""

PREFIX_WINDOW = 64
"""Waiting requests whose cached prefix is looked up in a step by the longest-prefix policy."""

MIN_CHUNK = 16
"""Prompt tokens that a step may compute beside decodes, whatever the pace wanted."""

PACE_MARGIN = 0.9
"""Part of the longest time between two tokens that a step is planned to take."""

LATE_SHARE = 0.25
"""Time for prompts, over that of the decodes, where these alone take longer than is wanted."""

FIRST_RANK = -(1 << 62)
"""Rank of a request that was passed over as often as allowed: before all others, and the last to be a victim."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to order requests.

    Attributes:
        rank: The smaller, the earlier; equal ranks go by arrival (I10). Fixed when the request is added.
        by_prefix: Order the first `PREFIX_WINDOW` waiting requests by the length of their cached prefix instead.
        max_passed_over: Admissions in a row that may pass over the request that has waited longest; then it is next,
            so that nobody waits forever (P5).
    """

    rank: Callable[[Request], int]
    by_prefix: bool
    max_passed_over: int


def _no_rank(request: Request) -> int:
    return 0


def _priority(request: Request) -> int:
    return request.params.priority


def _total_length(request: Request) -> int:
    return request.max_computed


POLICIES: dict[PolicyName, Policy] = {
    "fcfs": Policy(_no_rank, by_prefix=False, max_passed_over=64),
    "priority": Policy(_priority, by_prefix=False, max_passed_over=256),
    "shortest": Policy(_total_length, by_prefix=False, max_passed_over=16),
    "longest-prefix": Policy(_no_rank, by_prefix=True, max_passed_over=64),
}


def decode_order(decodes: list[Request], budget: int, kept: int, due_step: int) -> tuple[list[Request], int]:
    """The order of decodes, and how many tokens of the budget they leave to prompts.

    Policy order if all can be served; else least recently served first, and those that were last served in `due_step`
    or before are served even at the cost of what is kept. They fit: a step serves at most `budget` requests, so at
    most so many become due at once. Hence no decode waits more than decode_interval steps.
    """
    if len(decodes) <= budget - kept:
        return decodes, kept
    num_due = sum(request.served <= due_step for request in decodes)
    return sorted(decodes, key=lambda request: request.served), min(kept, budget - num_due)


def choose_victim(
    running: Sequence[Request], needy: Request, step: int, max_preemptions: int, kv: KVManager
) -> Request | None:
    """Who gives up its blocks so that `needy` can grow: the last in policy order, down to `needy` itself (I9).

    Never one that is in the plan being built, none that was preempted as often as allowed (it runs with all its
    blocks reserved), and none whose release would free nothing.
    """
    for request in reversed(running):
        if request.served < step and request.num_preemptions < max_preemptions and kv.gain(request) > 0:
            return request
        if request is needy:
            return None
    return None


def reservation(request: Request, max_preemptions: int) -> int:
    """Tokens to reserve at admission: the whole known length, and more of what may follow after each preemption.

    After max_preemptions it is the maximum length: such a request needs nothing more and is no victim, so the number
    of preemptions is bounded (A3).
    """
    known = min(len(request.tokens), request.max_computed)
    if request.num_preemptions >= max_preemptions:
        return request.max_computed
    return known + (request.max_computed - known) * request.num_preemptions // max_preemptions


def split_budget(budget: int, needs: Sequence[int]) -> list[int]:
    """Max-min fair shares: nobody gets more than it needs, and nobody less than another that got less than it needs.

    The earlier ones get the remainder of the division. Shares sum to min(budget, sum(needs)).
    """
    level, left = 0, budget
    for position, need in enumerate(sorted(needs)):
        level = left // (len(needs) - position)
        if need > level:
            left -= level * (len(needs) - position)
            break
        left -= need
    else:
        return list(needs)
    shares = []
    for need in needs:
        extra = 1 if need > level and left > 0 else 0
        left -= extra
        shares.append(min(need, level) + extra)
    return shares


def prompt_budget(wanted_s: float, decodes_s: float, token_s: float) -> int:
    """Prompt tokens of a step that is to take `wanted_s` at most, its decodes included.

    Some of the time is left for what cannot be foreseen. Where the decodes alone take too long, the pace is lost
    whatever prompts do, and they take a fixed share: holding them back would make everybody late. Never less than
    `MIN_CHUNK`: prompts that are never computed would wait forever (P5).
    """
    planned_s = wanted_s * PACE_MARGIN
    prompts_s = planned_s - decodes_s if decodes_s < planned_s else decodes_s * LATE_SHARE
    return max(MIN_CHUNK, int(prompts_s / token_s))


def may_join(need: int, room: int, prefills: Sequence[int], *, is_first: bool) -> bool:
    """Whether a waiting prompt may share the budget with prefills that would take all of it (C2).

    Only one that is shorter than the longest of them, since sharing among equals makes all late. It must complete at
    once, unless it is the first in this step (then a later step would have no more room for it) and few share.
    """
    completes = need <= room
    return need < max(prefills) and (completes or (is_first and len(prefills) < MAX_SHARING_PREFILLS))
