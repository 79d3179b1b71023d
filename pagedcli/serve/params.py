"""From a checked body to sampling parameters and requests for the engine.

May import `core`, `engine.prompt` and `errors`. Which value counts: the body's own, then the server's `[sampling]`
settings and flags, then the model's generation_config, then OpenAI's defaults.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedcli.config import ServeConfig
from pagedcli.core.sampling import SamplingParams
from pagedcli.engine.prompt import RESERVED_VARIABLES, RequestSpec
from pagedcli.errors import RequestError
from pagedcli.serve.schemas import ChatBody, CompletionBody, SamplingBody, TemplateBody
from pagedcli.serve.validation import check_lengths

OPENAI_COMPLETION: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16}
OPENAI_CHAT: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": None}
"""What OpenAI's endpoints do where nothing is said; None: as many tokens as fit."""
_SAMPLING_FIELDS = frozenset(item.name for item in dataclasses.fields(SamplingParams))
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Fields of the body itself; as variables of a template they would say something else.
_OWN_VARIABLES = ("add_generation_prompt", "continue_final_message", "documents")


@dataclass(frozen=True, slots=True)
class Defaults:
    """Sampling values for requests that do not say their own.

    Attributes:
        model: Of the model's generation_config.
        server: Of the server's settings and flags; they count more.
    """

    model: Mapping[str, Any]
    server: Mapping[str, Any]

    def over(self, openai: Mapping[str, Any]) -> dict[str, Any]:
        """All of them, the later over the former."""
        return {**openai, **self.model, **self.server}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a completions request asks for, in terms of the engine.

    Attributes:
        specs: One request for each prompt.
        params: The sampling parameters of all of them.
        stream: Whether events are wanted.
        include_usage: Whether a stream ends with the token counts.
        continuous_usage: Whether every event has them.
        return_token_ids: Whether token ids are wanted.
        prompt_logprobs: Whether log-probabilities of the prompt are wanted by themselves (not as part of an echo).
        request_id: The caller's name for the request, if it has one.
    """

    specs: tuple[RequestSpec, ...]
    params: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    prompt_logprobs: bool
    request_id: str | None


def completion_request(
    body: CompletionBody, defaults: Defaults, config: ServeConfig, max_model_len: int
) -> Asked:
    """What `POST /v1/completions` asks for; RequestError naming the field that cannot be served."""
    params = _completion_params(body, defaults, config)
    prompts = _prompts(body.prompt, config)
    if len(prompts) * params.n > config.max_choices:
        raise _invalid(
            f"{len(prompts)} prompts with {params.n} choices each are {len(prompts) * params.n:,}: this server "
            f"gives at most {config.max_choices:,}",
            "n",
        )
    common = _common(body, params, max_model_len)
    add = body.add_special_tokens
    specs = tuple(RequestSpec(prompt=prompt, add_special_tokens=add, **common) for prompt in prompts)
    return _asked(body, specs, params)


def chat_request(body: ChatBody, defaults: Defaults, config: ServeConfig, max_model_len: int) -> Asked:
    """What `POST /v1/chat/completions` asks for; RequestError naming the field that cannot be served."""
    params = _chat_params(body, defaults, config)
    spec = RequestSpec(
        messages=checked_messages(body.messages, config),
        template_args=template_args(body),
        add_special_tokens=body.add_special_tokens,
        **_common(body, params, max_model_len),
    )
    return _asked(body, (spec,), params)


def _common(body: SamplingBody, params: SamplingParams, max_model_len: int) -> dict[str, Any]:
    return {
        "params": params,
        "stream": bool(body.stream),
        "truncate_prompt_tokens": _truncation(body.truncate_prompt_tokens, params, max_model_len),
    }


def _asked(body: SamplingBody, specs: tuple[RequestSpec, ...], params: SamplingParams) -> Asked:
    options = _stream_options(body)
    return Asked(
        specs=specs,
        params=params,
        stream=bool(body.stream),
        include_usage=options.get("include_usage") is True,
        continuous_usage=options.get("continuous_usage_stats") is True,
        return_token_ids=bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs is not None,
        request_id=_request_id(body.request_id),
    )


def _completion_params(body: CompletionBody, defaults: Defaults, config: ServeConfig) -> SamplingParams:
    own = _own_sampling(body, config)
    if own.get("echo") and own.get("logprobs") is not None:
        own.setdefault("prompt_logprobs", own["logprobs"])
    params = _make_params(own, defaults.over(OPENAI_COMPLETION), config)
    if params.max_tokens == 0 and not params.echo:
        raise _invalid(
            "max_tokens is 0: give at least 1, or echo true to have the prompt returned", "max_tokens"
        )
    if body.best_of is not None and body.best_of != params.n:
        raise _invalid(
            f"best_of is {body.best_of}: only the value of n ({params.n}) is served: leave it out", "best_of"
        )
    return params


def _chat_params(body: ChatBody, defaults: Defaults, config: ServeConfig) -> SamplingParams:
    own = _own_sampling(body, config)
    own.pop("logprobs", None)
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise _invalid(
                "max_tokens and max_completion_tokens differ: give one of them", "max_completion_tokens"
            )
        own["max_tokens"] = body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise _invalid("top_logprobs needs logprobs true", "top_logprobs")
    if body.logprobs:
        own["logprobs"] = body.top_logprobs or 0
    try:
        params = _make_params(own, defaults.over(OPENAI_CHAT), config)
    except RequestError as error:
        raise _renamed(error, "logprobs", "top_logprobs") from None
    if params.max_tokens == 0:
        raise _invalid("max_tokens is 0: give at least 1", "max_tokens")
    return params


def _renamed(error: RequestError, field: str, name: str) -> RequestError:
    """The same error under the name by which the caller knows the field."""
    if error.field != field:
        return error
    return RequestError(str(error).replace(field, name, 1), code=error.code, status=error.status, field=name)


def _own_sampling(body: SamplingBody, config: ServeConfig) -> dict[str, Any]:
    """Sampling fields that the body gives; null says nothing but for max_tokens, where it means "as many as fit"."""
    given = {name: getattr(body, name) for name in body.model_fields_set if name in _SAMPLING_FIELDS}
    own = {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
    if body.deadline_ms is not None:
        own["deadline_s"] = _deadline_s(body.deadline_ms)
    _check_bounds(body, config)
    return own


def _deadline_s(milliseconds: float) -> float:
    seconds = milliseconds / 1000.0
    if not 0.0 < seconds <= 1e9:
        raise _invalid(f"deadline_ms is {milliseconds:g}: give milliseconds above 0", "deadline_ms")
    return seconds


def _check_bounds(body: SamplingBody, config: ServeConfig) -> None:
    """What one request may ask for, so that it costs its own time and not everybody's."""
    for name in ("stop", "bad_words"):
        _check_texts(name, getattr(body, name), config)
    check_lengths("stop_token_ids", body.stop_token_ids or (), config.max_stop_sequences, "ids")
    check_lengths("logit_bias", body.logit_bias or (), config.max_logit_bias, "entries")
    check_lengths("allowed_token_ids", body.allowed_token_ids or (), config.max_logit_bias, "ids")


def _check_texts(name: str, value: Any, config: ServeConfig) -> None:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _invalid(f"{name}: give text or a list of texts", name)
    check_lengths(name, texts, config.max_stop_sequences, "texts")
    longest = max(map(len, texts), default=0)
    if longest > config.max_stop_chars:
        raise _invalid(
            f"{name} has a text of {longest:,} characters: this server takes at most {config.max_stop_chars:,}",
            name,
        )


def _make_params(own: Mapping[str, Any], defaults: Mapping[str, Any], config: ServeConfig) -> SamplingParams:
    merged = {**defaults, **own}
    if "min_tokens" in own and "max_tokens" not in own and isinstance(merged.get("max_tokens"), int):
        # A default must not be what refuses a request.
        merged["max_tokens"] = max(merged["max_tokens"], own["min_tokens"])
    params = SamplingParams(**merged)
    if params.n > config.max_n:
        raise _invalid(f"n is {params.n}: this server gives at most {config.max_n} choices", "n")
    return params


def _truncation(tokens: int | None, params: SamplingParams, max_model_len: int) -> int | None:
    if tokens is None:
        return None
    if tokens == -1:
        return max_model_len - (0 if params.max_tokens == 0 else 1)
    if tokens < 1:
        raise _invalid(
            f"truncate_prompt_tokens is {tokens}: give at least 1, or -1 for as many as fit",
            "truncate_prompt_tokens",
        )
    return tokens


def _stream_options(body: SamplingBody) -> dict[str, Any]:
    options = body.stream_options
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise _invalid('stream_options: give an object, such as {"include_usage": true}', "stream_options")
    if not body.stream:
        raise _invalid("stream_options needs stream true: leave it out", "stream_options")
    for name, value in options.items():
        if name not in ("include_usage", "continuous_usage_stats"):
            known = "include_usage and continuous_usage_stats"
            raise _invalid(
                f"stream_options has an unknown field: {known} are known", "stream_options", "unknown_field"
            )
        if not isinstance(value, bool | None):
            raise _invalid(f"stream_options.{name}: give true or false", "stream_options")
    return options


def _request_id(request_id: str | None) -> str | None:
    if request_id is not None and not _REQUEST_ID.fullmatch(request_id):
        raise _invalid("request_id: give 1 to 64 letters, digits, '.', '_' and '-'", "request_id")
    return request_id


def _prompts(prompt: Any, config: ServeConfig) -> list[str | list[int]]:
    """One prompt or many, each text or token ids."""
    if isinstance(prompt, str) or _is_ids(prompt):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _invalid("prompt: give text, token ids, or a list of either", "prompt")
    for index, item in enumerate(prompt):
        if not isinstance(item, str) and not _is_ids(item):
            raise _invalid(f"prompt[{index}]: give text or token ids", "prompt")
    check_lengths("prompt", prompt, config.max_prompts, "prompts")
    return prompt


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def checked_messages(messages: Any, config: ServeConfig) -> list[Any]:
    """The messages as far as they are checked before the template sees them."""
    if not isinstance(messages, list) or not messages:
        raise _invalid('messages: give a list of {"role": ..., "content": ...}', "messages")
    check_lengths("messages", messages, config.max_messages, "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _invalid(f'messages[{index}]: give an object with "role" and "content"', "messages")
    return messages


def template_args(body: TemplateBody) -> dict[str, Any]:
    """Everything that a chat template gets besides the messages."""
    arguments = dict(body.chat_template_kwargs or {})
    for name in (*_OWN_VARIABLES, *RESERVED_VARIABLES):
        if name in arguments:
            remedy = "write it there" if name in _OWN_VARIABLES else "leave it out"
            message = f"chat_template_kwargs: {name} is set by the request itself: {remedy}"
            raise _invalid(message, "chat_template_kwargs")
    if body.reasoning_effort is not None:
        arguments["reasoning_effort"] = body.reasoning_effort
    if body.documents is not None:
        arguments["documents"] = body.documents
    goes_on = bool(body.continue_final_message)
    given = body.add_generation_prompt
    arguments["continue_final_message"] = goes_on
    arguments["add_generation_prompt"] = not goes_on if given is None else given
    return arguments


def _invalid(message: str, field: str, code: str = "invalid_value") -> RequestError:
    return RequestError(message, code=code, field=field)


def check_defaults(defaults: Defaults) -> None:
    """RequestError if the server's own values are none that a request could have."""
    for openai in (OPENAI_COMPLETION, OPENAI_CHAT):
        SamplingParams(**defaults.over(openai))


def served_names(given: Sequence[str], model: str, path_name: str) -> tuple[str, ...]:
    """Names under which the model is served; the first is the one that answers carry where none was asked for.

    Args:
        given: Of `--served-model-name`; they replace all others.
        model: As the user named it.
        path_name: Name of its folder or file.
    """
    return tuple(dict.fromkeys(given or (model, path_name)))
