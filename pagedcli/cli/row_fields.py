"""Fields of input rows, shared by rows of our own and OpenAI batch lines: their kinds and their checks.

May import `core`, `config_file` and `errors`. A check returns what it accepts and raises `RequestError` naming the
field otherwise.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from pagedcli.config_file import suggestion
from pagedcli.core.sampling import SamplingParams
from pagedcli.errors import RequestError

SAMPLING_FIELDS = tuple(item.name for item in dataclasses.fields(SamplingParams))
# Fields in which null means something; in any other it means that the field is not given.
NULLABLE_FIELDS = frozenset(
    item.name for item in dataclasses.fields(SamplingParams) if "None" in str(item.type)
)
# Names under which the tokenizer takes what is no variable of the user.
_RESERVED_VARIABLES = frozenset({"messages", "template", "self"})


class RowKind(Enum):
    """Which shape a row came in; its output takes the same."""

    PLAIN = "plain"
    COMPLETION = "/v1/completions"
    CHAT = "/v1/chat/completions"


def invalid(message: str, field_name: str | None = None, code: str = "invalid_row") -> RequestError:
    """An error of one row."""
    return RequestError(message, code=code, field=field_name)


def is_text(value: object) -> bool:
    """Whether it is text that can be written: half a surrogate pair cannot."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_messages(value: object) -> list[dict[str, Any]]:
    """The messages of a conversation, checked as far as no template is needed."""
    if not isinstance(value, list) or not value:
        raise invalid('messages: give a list of {"role": ..., "content": ...}', "messages")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise invalid(f'messages[{index}]: give an object with "role" and "content"', "messages")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise invalid("messages holds half a surrogate pair, which no text can contain", "messages") from None
    return value


def check_token_ids(value: object) -> tuple[int, ...]:
    """The token ids of a prompt."""
    whole = isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) for item in value
    )
    if not isinstance(value, list) or not whole or not value:
        raise invalid("prompt_token_ids: give a list of at least one token id", "prompt_token_ids")
    return tuple(value)


def check_prompt(value: object) -> str:
    """The text of a prompt."""
    if not isinstance(value, str):
        raise invalid("prompt: give text (token ids go into prompt_token_ids)", "prompt")
    if not is_text(value):
        raise invalid("prompt holds half a surrogate pair, which no text can contain", "prompt")
    return value


def make_params(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> SamplingParams:
    """The row's own fields over the defaults; log-probabilities of an echoed prompt come with it (as OpenAI's)."""
    own = {name: value for name, value in given.items() if value is not None or name in NULLABLE_FIELDS}
    merged = {**defaults, **own}
    if merged.get("echo") is True and merged.get("logprobs") is not None:
        merged.setdefault("prompt_logprobs", merged["logprobs"])
    return SamplingParams(**merged)


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a field that nobody would read."""
    known = list(known)
    for name in given:
        if name not in known:
            shown = name if len(name) <= 40 else name[:37] + "..."
            shown = shown.encode("ascii", "backslashreplace").decode()
            hint = suggestion(name, known, "leave it out")
            raise invalid(f"unknown field {shown!r}: {hint}", name, code="unknown_field")


def check_template_args(value: object) -> dict[str, Any]:
    """Further variables of a chat template."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise invalid("chat_template_kwargs: give an object", "chat_template_kwargs")
    for name in _RESERVED_VARIABLES & value.keys():
        raise invalid(
            f"chat_template_kwargs: {name} is set by the row itself: leave it out", "chat_template_kwargs"
        )
    return value
