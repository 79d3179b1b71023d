"""What is told of a request when something came of it. Standard library and `core` only."""

from __future__ import annotations

from pagedcli.core.plan import TokenEvent, TokenLogprob
from pagedcli.core.request import Request


def event_of(
    request: Request, token: int | None, logprob: TokenLogprob | None = None, error: str | None = None
) -> TokenEvent:
    """An event as of now; the prompt's log-probabilities go with the first one after they are complete."""
    index = request.num_output - (token is not None)
    prompt_logprobs = None
    collected = request.prompt_logprobs
    if collected is not None and len(collected) == request.num_prompt - 1:
        prompt_logprobs, request.prompt_logprobs = tuple(collected), None
    return TokenEvent(
        request.id,
        token,
        index,
        logprob,
        prompt_logprobs,
        request.finish,
        error,
        request.num_cached,
        request.first_scheduled,
    )
