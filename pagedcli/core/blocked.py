"""Why something cannot be served now: a value with numbers, never an exception. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
    BlockedKind.MEMORY: "needs {needs} pages, {has} are available",
    BlockedKind.SLOTS: "needs a place to run, {has} of them are free",
    BlockedKind.BUDGET: "needs {needs} tokens of the step's budget, {has} were left",
    BlockedKind.ORDER: "waits behind {needs} requests",
    BlockedKind.PENDING: "waits for {needs} tokens that are still on the device",
    BlockedKind.PARENT: "shares the prompt of a running request, of which {has} of {needs} tokens are computed",
    BlockedKind.BATCH: "waits until the {needs} requests of the static batch have ended",
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
        return _SENTENCES[self.kind].format(needs=self.needs, has=self.has)
