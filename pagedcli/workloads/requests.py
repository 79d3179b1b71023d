"""A workload: requests as token ids with known output lengths, the same for every engine and mode.

Standard library only. A workload is a value: the same arguments give the same requests on every machine, since
`random.Random` is specified to.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request.

    Attributes:
        id: Unique within the workload.
        prompt_token_ids: The prompt, not empty.
        output_tokens: Tokens that it really produces; it ends there, as if at its end-of-sequence token.
        max_tokens: Limit that its sender set, at least `output_tokens`: all that an engine knows beforehand.
        arrival_s: Seconds after the start of the run.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    output_tokens: int
    max_tokens: int
    arrival_s: float = 0.0


def _tokens(rng: random.Random, num: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab_size) for _ in range(num))


def mixed_lengths(
    num_requests: int,
    *,
    seed: int,
    vocab_size: int,
    prompt_tokens: tuple[int, int] = (32, 256),
    output_tokens: tuple[int, int] = (16, 256),
) -> list[WorkloadRequest]:
    """Independent requests that arrive together, lengths drawn evenly from the two closed ranges.

    Every request carries the same `max_tokens`, the largest output: as in the field, a sender sets a limit and does
    not know where the model will stop.
    """
    rng = random.Random(seed)
    requests = []
    for index in range(num_requests):
        prompt = _tokens(rng, rng.randint(*prompt_tokens), vocab_size)
        output = rng.randint(*output_tokens)
        requests.append(WorkloadRequest(f"mixed-{index}", prompt, output, output_tokens[1]))
    return requests


def shared_prefix(
    num_requests: int,
    *,
    seed: int,
    vocab_size: int,
    prefix_tokens: int = 512,
    prompt_tokens: tuple[int, int] = (16, 64),
    output_tokens: tuple[int, int] = (16, 64),
) -> list[WorkloadRequest]:
    """Requests that begin with the same `prefix_tokens` tokens (a system prompt, say) and go on differently."""
    rng = random.Random(seed)
    prefix = _tokens(rng, prefix_tokens, vocab_size)
    requests = []
    for index in range(num_requests):
        prompt = prefix + _tokens(rng, rng.randint(*prompt_tokens), vocab_size)
        output = rng.randint(*output_tokens)
        requests.append(WorkloadRequest(f"prefix-{index}", prompt, output, output_tokens[1]))
    return requests
