"""Why a request waits: what `schedule()` would say of it now, as a value. Standard library and `core` only.

It changes nothing and decides nothing; the order of the reasons is that in which the scheduler meets them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedcli.core import policy
from pagedcli.core.blocked import Blocked, BlockedKind
from pagedcli.core.kv_manager import KVManager
from pagedcli.core.request import Request
from pagedcli.core.roster import Roster


@dataclass(frozen=True, slots=True)
class Doors:
    """What decides between two steps whether anybody is admitted.

    Attributes:
        kv: Where blocks come from.
        roster: Who runs, and the free slots.
        batch_closed: Whether a static batch runs that takes nobody in.
        spare: Blocks that an admission leaves free.
        max_preemptions: After which a request has its whole length reserved.
        budget: Tokens that the last step left.
    """

    kv: KVManager
    roster: Roster
    batch_closed: bool
    spare: int
    max_preemptions: int
    budget: int

    def why_closed(self, request: Request, ahead: int, *, waits_for_parent: bool) -> Blocked:
        """What a waiting request with so many ahead of it waits for."""
        roster = self.roster
        if request.num_pending:
            return Blocked(BlockedKind.PENDING, request.num_pending, 0)
        if waits_for_parent:
            computed = roster.requests[request.fork_of or 0].num_computed
            return Blocked(BlockedKind.PARENT, request.num_prompt, computed)
        if self.batch_closed:
            return Blocked(BlockedKind.BATCH, len(roster.running), 0)
        if ahead:
            return Blocked(BlockedKind.ORDER, ahead, 0)
        if not roster.free_slots:
            return Blocked(BlockedKind.SLOTS, 1, 0)
        num_tokens = policy.reservation(request, self.max_preemptions)
        shortage = self.kv.admission_block(request, num_tokens, self.spare)
        need = len(request.tokens) - self.kv.match(request)
        return shortage or Blocked(BlockedKind.BUDGET, need, self.budget)
