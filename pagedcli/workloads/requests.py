"""A workload: requests as token ids with known output lengths, the same for every engine and mode.

Standard library only. A workload is a value: the same arguments give the same requests on every machine, since
`random.Random` is specified to.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

Messages = tuple[tuple[str, str], ...]
"""(role, content) of each message of a conversation."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request.

    Attributes:
        id: Unique within the workload.
        prompt_token_ids: The prompt; empty only where a workload was read as text, without a tokenizer.
        output_tokens: Tokens that it really produces; it ends there, as if at its end-of-sequence token.
        max_tokens: Limit that its sender set, at least `output_tokens`: all that an engine knows beforehand.
        arrival_s: Seconds after the start of the run.
        text: The prompt as text, where the workload has one; of a later turn the new message alone.
        messages: The same as the messages of a chat, where it has those.
        follows: The request whose answer this one comes after, a turn of the same conversation: it is sent
            `think_s` after that is over, with the real answer in its prompt (`prompt_after`). None: it is due at
            `arrival_s`.
        new_tokens: Of a later turn, the tokens at the end of `prompt_token_ids` that are new; before them stand the
            earlier turns, with answers of the expected length as stand-ins for the real ones.
        think_s: Seconds between the earlier answer and a later turn.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    output_tokens: int
    max_tokens: int
    arrival_s: float = 0.0
    text: str | None = None
    messages: Messages | None = None
    follows: str | None = None
    new_tokens: int = 0
    think_s: float = 0.0


def prompt_after(
    request: WorkloadRequest, earlier_prompt: Sequence[int], answer: Sequence[int]
) -> tuple[int, ...]:
    """The prompt of a later turn: the earlier one as it was sent, the answer that really came, and what is new."""
    new = request.prompt_token_ids[len(request.prompt_token_ids) - request.new_tokens :]
    return (*earlier_prompt, *answer, *new)


def at(requests: Sequence[WorkloadRequest], times_s: Sequence[float]) -> list[WorkloadRequest]:
    """The requests with other arrivals: `times_s` go to those that follow no other, in their order."""
    times = iter(times_s)
    return [
        request if request.follows is not None else replace(request, arrival_s=next(times))
        for request in requests
    ]


def num_arriving(requests: Sequence[WorkloadRequest]) -> int:
    """How many of them have an arrival of their own."""
    return sum(request.follows is None for request in requests)


def most_turns(requests: Sequence[WorkloadRequest]) -> int:
    """Turns of the longest conversation; 1 where there are none."""
    turns: dict[str, int] = {}
    for request in requests:
        turns[request.id] = 1 + (turns.get(request.follows, 0) if request.follows is not None else 0)
    return max(turns.values(), default=1)


def _tokens(rng: random.Random, num: int, vocab_size: int, first: int = 0) -> tuple[int, ...]:
    return tuple(rng.randrange(first, vocab_size) for _ in range(num))


def mixed_lengths(
    num_requests: int,
    *,
    seed: int,
    vocab_size: int,
    prompt_tokens: tuple[int, int] = (32, 256),
    output_tokens: tuple[int, int] = (16, 256),
    first_token: int = 0,
) -> list[WorkloadRequest]:
    """Independent requests that arrive together, lengths drawn evenly from the two closed ranges.

    Every request carries the same `max_tokens`, the largest output: as in the field, a sender sets a limit and does
    not know where the model will stop. Token ids are drawn from `first_token` to `vocab_size` - 1.
    """
    rng = random.Random(seed)
    requests = []
    for index in range(num_requests):
        prompt = _tokens(rng, rng.randint(*prompt_tokens), vocab_size, first_token)
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
    first_token: int = 0,
) -> list[WorkloadRequest]:
    """Requests that begin with the same `prefix_tokens` tokens (a system prompt, say) and go on differently."""
    rng = random.Random(seed)
    prefix = _tokens(rng, prefix_tokens, vocab_size, first_token)
    requests = []
    for index in range(num_requests):
        prompt = prefix + _tokens(rng, rng.randint(*prompt_tokens), vocab_size, first_token)
        output = rng.randint(*output_tokens)
        requests.append(WorkloadRequest(f"prefix-{index}", prompt, output, output_tokens[1]))
    return requests


def chats(
    num_requests: int,
    *,
    seed: int,
    vocab_size: int,
    turns: int = 4,
    prompt_tokens: tuple[int, int] = (16, 64),
    output_tokens: tuple[int, int] = (16, 64),
    think_s: float = 0.0,
    first_token: int = 0,
) -> list[WorkloadRequest]:
    """Conversations of `turns` turns that begin together; the last one is shorter where the number does not divide.

    Each turn's prompt is the whole conversation so far and a new message of `prompt_tokens` tokens.
    """
    rng = random.Random(seed)
    requests: list[WorkloadRequest] = []
    history: tuple[int, ...] = ()
    for index in range(num_requests):
        conversation, turn = divmod(index, turns)
        new = _tokens(rng, rng.randint(*prompt_tokens), vocab_size, first_token)
        output = rng.randint(*output_tokens)
        prompt = new if turn == 0 else history + new
        request = WorkloadRequest(f"chat-{conversation}-{turn}", prompt, output, output_tokens[1])
        if turn > 0:
            request = replace(request, follows=requests[-1].id, new_tokens=len(new), think_s=think_s)
        requests.append(request)
        history = prompt + _tokens(rng, output, vocab_size, first_token)
    return requests
