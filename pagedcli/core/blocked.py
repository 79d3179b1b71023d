"""Why something cannot be served now: a value with numbers, never an exception. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pagedcli.core.words import counted


class BlockedKind(StrEnum):
    """What a waiting request waits for; the unit of `needs` and `has` follows from it."""

    MEMORY = "memory"
    SLOTS = "slots"
    BUDGET = "budget"
    ORDER = "order"
    PENDING = "pending"
    PARENT = "parent"
    BATCH = "batch"


_SENTENCES = {
    BlockedKind.MEMORY: "needs {pages}, {has} are available",
    BlockedKind.SLOTS: "needs a place to run, {has} of them are free",
    BlockedKind.BUDGET: "needs {tokens} of the step's budget, {has} were left",
    BlockedKind.ORDER: "waits behind {requests}",
    BlockedKind.PENDING: "waits for {tokens} still on the device",
    BlockedKind.PARENT: "shares the prompt of a running request, of which {has} of {tokens} are computed",
    BlockedKind.BATCH: "waits for the end of the static batch of {requests}",
}


@dataclass(frozen=True, slots=True)
class Blocked:
    """A reason, what it takes and what there is.

    Attributes:
        kind: What is missing.
        needs: How much of it is needed.
        has: How much of it there is.
    """

    kind: BlockedKind
    needs: int
    has: int

    def __str__(self) -> str:
        words = {f"{noun}s": counted(self.needs, noun) for noun in ("page", "token", "request")}
        return _SENTENCES[self.kind].format(has=self.has, **words)
