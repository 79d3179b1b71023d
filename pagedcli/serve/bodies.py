"""Answers in OpenAI's shapes: whole bodies, and the parts that whole bodies and events share.

May import `engine.outputs` and `core`. Pure: values in, dictionaries out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pagedcli.core.request import FinishReason
from pagedcli.engine.outputs import RequestOutput, SampleOutput, TokenLogprobs, Usage

# OpenAI's clients know only its own reasons: an end that the user set is a length.
_REASONS = {FinishReason.DEADLINE: "length", FinishReason.PAGE_CAP: "length"}
TokenBytes = Callable[[int], bytes | None]
"""Bytes of a token; None where it has none of its own."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What all bodies and events of one request have in common.

    Attributes:
        id: As answers carry it.
        model: The name that was asked for.
        created: Unix time.
        is_chat: Which endpoint it is.
        echo: The prompt is part of the answer.
        logprobs: Whether log-probabilities are wanted.
        prompt_logprobs: Whether those of the prompt are wanted by themselves.
        token_ids: Whether token ids are wanted.
        n: Choices for each prompt.
        token_bytes: Bytes of tokens.
    """

    id: str
    model: str
    created: int
    is_chat: bool
    echo: bool
    logprobs: bool
    prompt_logprobs: bool
    token_ids: bool
    n: int
    token_bytes: TokenBytes


def finish_reason(reason: FinishReason | None) -> str | None:
    """A reason as OpenAI's clients know it."""
    return None if reason is None else _REASONS.get(reason, reason.value)


def usage_body(usages: Iterable[Usage]) -> dict[str, Any]:
    """Token counts over all prompts of a request."""
    listed = list(usages)
    prompt = sum(usage.prompt_tokens for usage in listed)
    completion = sum(usage.completion_tokens for usage in listed)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in listed)},
    }


def completion_logprobs(items: Sequence[TokenLogprobs | None], prompt: str | None) -> dict[str, Any]:
    """As OpenAI's completions write them; the first token of a prompt has none."""
    after = items[1] if len(items) > 1 else None
    first = (prompt or "")[: after.offset if after else None]
    return {
        "tokens": [item.text if item else first for item in items],
        "token_logprobs": [item.logprob if item else None for item in items],
        "top_logprobs": [_by_text(item) if item else None for item in items],
        "text_offset": [item.offset if item else 0 for item in items],
    }


def _by_text(item: TokenLogprobs) -> dict[str, float]:
    """Alternatives by text, and the token itself; of tokens with one text the most probable counts."""
    result: dict[str, float] = {}
    for top in item.top:
        result.setdefault(top.text, top.logprob)
    result.setdefault(item.text, item.logprob)
    return result


def chat_logprobs(items: Sequence[TokenLogprobs], token_bytes: TokenBytes) -> dict[str, Any]:
    """As OpenAI's chat completions write them."""

    def entry(token_id: int, text: str, logprob: float) -> dict[str, Any]:
        data = token_bytes(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode() if data is None else data)}

    content = []
    for item in items:
        tops = [entry(top.token_id, top.text, top.logprob) for top in item.top]
        content.append(entry(item.token_id, item.text, item.logprob) | {"top_logprobs": tops})
    return {"content": content, "refusal": None}


def prompt_logprobs_body(items: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """VLLM's shape: for each prompt token its alternatives and itself by token id; none for the first."""
    return [None if item is None else _by_id(item) for item in items]


def _by_id(item: TokenLogprobs) -> dict[str, Any]:
    result = {
        str(top.token_id): {"logprob": top.logprob, "rank": rank, "decoded_token": top.text}
        for rank, top in enumerate(item.top, 1)
    }
    result.setdefault(
        str(item.token_id), {"logprob": item.logprob, "rank": item.rank, "decoded_token": item.text}
    )
    return result


def answer_body(shape: Shape, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The whole answer to a request, of one output for each prompt."""
    make_choice = _chat_choice if shape.is_chat else _completion_choice
    choices = [
        make_choice(shape, output, sample, position * shape.n + sample.index)
        for position, output in enumerate(outputs)
        for sample in output.samples
    ]
    body = {
        "id": shape.id,
        "object": "chat.completion" if shape.is_chat else "text_completion",
        "created": shape.created,
        "model": shape.model,
        "choices": choices,
        "usage": usage_body(output.usage for output in outputs),
    }
    return body | (_prompt_extras(shape, outputs[0]) if shape.is_chat else {})


def _prompt_extras(shape: Shape, output: RequestOutput) -> dict[str, Any]:
    """What was asked for about the prompt: in a chat's body, in each choice of a completion."""
    extras: dict[str, Any] = {}
    if shape.prompt_logprobs:
        extras["prompt_logprobs"] = prompt_logprobs_body(output.prompt_logprobs or ())
    if shape.token_ids:
        extras["prompt_token_ids"] = list(output.prompt_token_ids)
    return extras


def _chat_choice(shape: Shape, output: RequestOutput, sample: SampleOutput, index: int) -> dict[str, Any]:
    logprobs = chat_logprobs(sample.logprobs or (), shape.token_bytes) if shape.logprobs else None
    choice = {
        "index": index,
        "message": {"role": "assistant", "content": sample.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": finish_reason(sample.finish_reason),
        "stop_reason": sample.stop_reason,
    }
    return choice | ({"token_ids": list(sample.token_ids)} if shape.token_ids else {})


def _completion_choice(
    shape: Shape, output: RequestOutput, sample: SampleOutput, index: int
) -> dict[str, Any]:
    items: list[TokenLogprobs | None] = list(sample.logprobs or ())
    if shape.echo:
        items = [*(output.prompt_logprobs or ()), *items]
    choice = {
        "index": index,
        "text": sample.text,
        "logprobs": completion_logprobs(items, sample.text) if shape.logprobs else None,
        "finish_reason": finish_reason(sample.finish_reason),
        "stop_reason": sample.stop_reason,
    }
    own_ids = {"token_ids": list(sample.token_ids)} if shape.token_ids else {}
    return choice | own_ids | _prompt_extras(shape, output)
