"""What the scheduler tells of a request, as an event. Standard library and `core` only."""

from __future__ import annotations

from functools import partial

from pagedcli.core.plan import TokenEvent, TokenLogprob
from pagedcli.core.request import Request

event_of_items = partial(tuple.__new__, TokenEvent)
"""A `TokenEvent` of its items, at a third of the cost of calling the class."""


def make_event(
    request: Request, token: int | None, logprob: TokenLogprob | None = None, error: str | None = None
) -> TokenEvent:
    """A token that was taken, the end of the request as it stands, or both."""
    index = len(request.tokens) - request.num_prompt - (token is not None)
    prompt_logprobs = None
    collected = request.prompt_logprobs
    if collected is not None and len(collected) == request.num_prompt - 1:
        prompt_logprobs, request.prompt_logprobs = tuple(collected), None
    finish, cached, first = request.finish, request.num_cached, request.first_scheduled
    return event_of_items((request.id, token, index, logprob, prompt_logprobs, finish, error, cached, first))
