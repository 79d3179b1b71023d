"""Why a row could not be sampled, and how its user is told. Standard library only, for every backend."""

from __future__ import annotations

from enum import IntEnum


class Fault(IntEnum):
    """Why a row could not be sampled; the numbers are those of the kernels (PagedSample)."""

    NONE = 0
    NOT_FINITE = 1
    NOTHING_LEFT = 2

    def message(self) -> str:
        """One line for the user, who knows the request by another id than the core."""
        if self is Fault.NOT_FINITE:
            return "the model computed NaN or infinite logits: check the weights and the dtype"
        return (
            "no token is left to sample: allowed_token_ids, bad_token_ids, bad_words and "
            "min_tokens together forbid all of the vocabulary"
        )
