"""Lines of an OpenAI batch file: `{"custom_id", "method", "url", "body"}`. May import `core`, `errors` and `rows`.

A body takes what the completions and chat completions endpoints take and this engine does; anything else is refused
by name, but for a few fields that clients send and that change no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedcli.cli.row_fields import (
    SAMPLING_FIELDS,
    RowKind,
    check_messages,
    check_names,
    check_prompt,
    check_template_args,
    check_token_ids,
    invalid,
    make_params,
)

_LINE_FIELDS = ("custom_id", "method", "url", "body")
# No effect here, as in `paged serve`; `model` too: the model is the one that was loaded.
_WITHOUT_EFFECT = ("model", "user", "metadata", "service_tier", "parallel_tool_calls")
# Taken only at the value that asks for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "stream": (False,),
    "stream_options": (),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "best_of": (1,),
    "suffix": ("",),
}
_CHAT_ONLY = ("messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs", "reasoning_effort")


def batch_kind(body: Mapping[str, Any]) -> RowKind:
    """Kind of a line that has a `custom_id`; one with an unknown url counts as a chat until it is refused."""
    return RowKind.COMPLETION if body.get("url") == RowKind.COMPLETION.value else RowKind.CHAT


def batch_fields(line: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What a line asks for, as fields of `Row`; RequestError if it cannot be served."""
    check_names(line, _LINE_FIELDS)
    if line.get("method", "POST") != "POST":
        raise invalid(f"method is {line['method']!r}: only POST", "method")
    urls = (RowKind.COMPLETION.value, RowKind.CHAT.value)
    if line.get("url") not in urls:
        raise invalid(f"url is {line.get('url')!r}: only {urls[0]} and {urls[1]}", "url", "unsupported_url")
    body = line.get("body")
    if not isinstance(body, dict):
        raise invalid("body: give an object", "body")
    body = _drop_neutral(body)
    if line["url"] == RowKind.CHAT.value:
        return _chat_fields(body, defaults)
    return _completion_fields(body, defaults)


def _drop_neutral(body: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls that say nothing and without the fields that have no effect."""
    rest = {}
    for name, value in body.items():
        if name in _WITHOUT_EFFECT or (name in _NEUTRAL and (value is None or value in _NEUTRAL[name])):
            continue
        if name in _NEUTRAL:
            raise invalid(f"{name} is not supported in a batch: leave it out", name, "unsupported_field")
        rest[name] = value
    return rest


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name in SAMPLING_FIELDS}


def _completion_fields(body: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    check_names(body, ("prompt", *SAMPLING_FIELDS))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        raise invalid("prompt: give one prompt in a line, not several", "prompt")
    checked = check_token_ids(prompt) if isinstance(prompt, list) else check_prompt(prompt)
    return {"prompt": checked, "params": make_params(defaults, _sampling(body))}


def _chat_fields(body: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    check_names(body, (*_CHAT_ONLY, *SAMPLING_FIELDS))
    variables = dict(check_template_args(body.get("chat_template_kwargs")))
    if body.get("reasoning_effort") is not None:
        variables["reasoning_effort"] = body["reasoning_effort"]
    sampling = _sampling(body)
    if body.get("max_completion_tokens") is not None:
        sampling["max_tokens"] = body["max_completion_tokens"]
    sampling["logprobs"] = _chat_logprobs(body)
    if sampling["logprobs"] is None:
        del sampling["logprobs"]
    return {
        "messages": check_messages(body.get("messages")),
        "template_args": variables,
        "params": make_params(defaults, sampling),
    }


def _chat_logprobs(body: Mapping[str, Any]) -> Any:
    """Chat asks with a switch and a count, completions with the count alone."""
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
    if wanted is not None and not isinstance(wanted, bool):
        raise invalid(
            f"logprobs is {wanted!r}: give true or false, and the number in top_logprobs", "logprobs"
        )
    if top is not None and not wanted:
        raise invalid("top_logprobs needs logprobs true", "top_logprobs")
    if not wanted:
        return None
    return 0 if top is None else top
