"""From a JSON object to a checked body: every mistake becomes one line that names the field and what to write.

May import pydantic, `config_file` (for suggestions) and `errors`. What a field means is checked later, by those who
use it; here are names, kinds, and the fields that this server knows and does not serve.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pagedcli.config_file import suggestion
from pagedcli.errors import RequestError
from pagedcli.serve.schemas import Body

B = TypeVar("B", bound=Body)
_SHOWN_CHARACTERS = 60
# Taken only at a value that asks for nothing; null is one everywhere.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "suffix": ("",),
}
# Of OpenAI's and other servers' APIs, and not served here: an answer without them would not be what was asked for.
_UNSUPPORTED = frozenset(
    {
        "allowed_words",
        "audio",
        "bad_token_ids",
        "bad_word_ids",
        "chat_template",
        "deadline_s",
        "early_stopping",
        "ebnf",
        "extra_body",
        "function_call",
        "functions",
        "grammar",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "guided_decoding_backend",
        "include_reasoning",
        "json_schema",
        "kv_transfer_params",
        "length_penalty",
        "logits_processors",
        "lora_path",
        "mm_processor_kwargs",
        "modalities",
        "prediction",
        "prompt_cache_key",
        "prompt_embeds",
        "prompt_token_ids",
        "regex",
        "return_tokens_as_token_ids",
        "safety_identifier",
        "spaces_between_special_tokens",
        "structured_outputs",
        "typical_p",
        "use_beam_search",
        "verbosity",
        "vllm_xargs",
        "web_search_options",
    }
)
_INSTEAD = {
    "deadline_s": "write deadline_ms",
    "prompt_token_ids": "write the token ids as prompt",
    "max_new_tokens": "write max_tokens",
    "max_length": "write max_tokens",
    "num_predict": "write max_tokens",
    "n_predict": "write max_tokens",
    "stop_sequences": "write stop",
    "repeat_penalty": "write repetition_penalty",
    "num_return_sequences": "write n",
    "chat_template": "start the server with --chat-template FILE",
    "bad_token_ids": "write logit_bias or bad_words",
}
_WANTED = {
    "int_type": "give a whole number",
    "float_type": "give a number",
    "bool_type": "give true or false",
    "string_type": "give text",
    "string_unicode": "give text without half surrogate pairs",
    "list_type": "give a list",
    "dict_type": "give an object",
}


def checked(kind: type[B], value: Mapping[str, Any]) -> B:
    """The object as a body of the kind; RequestError for the first thing that is wrong with it."""
    _check_names(kind, value)
    given = {name: item for name, item in value.items() if not _says_nothing(name, item)}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=False)[0], given) from None


def _check_names(kind: type[Body], value: Mapping[str, Any]) -> None:
    known = kind.model_fields
    for name in value:
        if name in known:
            continue
        shown = printable(name)
        if name in _INSTEAD or name in _UNSUPPORTED:
            remedy = _INSTEAD.get(name, "leave it out")
            raise _invalid(f"{shown} is not supported here: {remedy}", shown, "unsupported_field")
        raise _invalid(
            f"unknown field {shown!r}: {suggestion(name, known, 'leave it out')}", shown, "unknown_field"
        )


def _says_nothing(name: str, value: Any) -> bool:
    """Whether a field may be dropped; what asks for something that is not served is refused here."""
    if name not in _NEUTRAL:
        return False
    # Compared by kind as well: 0 is not false.
    if value is None or any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL[name]):
        return True
    raise _invalid(
        f"{name} is {_shown(value)}: this server does not support that: leave it out",
        name,
        "unsupported_field",
    )


def _refusal(details: ErrorDetails, given: Mapping[str, Any]) -> RequestError:
    location = details["loc"]
    field = printable(str(location[0])) if location else "body"
    if details["type"] == "missing":
        return _invalid(f"{field} is missing: give it", field, "missing_field")
    where = field + "".join(f"[{printable(str(part))}]" for part in location[1:])
    wanted = _WANTED.get(details["type"], details["msg"])
    return _invalid(f"{where} is {_shown(details['input'])}: {wanted}", field)


def printable(text: str, limit: int = 40) -> str:
    """Text of a client as a message may repeat it: short, and without what cannot be written."""
    short = text if len(text) <= limit else text[: limit - 3] + "..."
    return short.encode("utf-8", "backslashreplace").decode()


def _shown(value: Any) -> str:
    try:
        return printable(
            repr(value) if not isinstance(value, dict | list) else _kind(value), _SHOWN_CHARACTERS
        )
    except ValueError:  # Python writes no int of more than 4,300 digits.
        return "a number of very many digits"


def _kind(value: dict[str, Any] | list[Any]) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    kind = value.get("type")
    return f"an object of type {kind!r}" if isinstance(kind, str) else "an object"


def _invalid(message: str, field: str, code: str = "invalid_value") -> RequestError:
    return RequestError(message, code=code, field=field)


def check_lengths(field: str, items: Iterable[Any], most: int, what: str) -> None:
    """Refuse more of something than the server takes."""
    count = len(list(items))
    if count > most:
        raise _invalid(f"{field} has {count:,} {what}: this server takes at most {most:,}", field)
