"""What `LLM` and `AsyncLLM` share: prompts and parameters in any accepted form become request specs.

May import `engine`, `core` and `errors`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

from pagedcli.core.sampling import SamplingParams
from pagedcli.engine.outputs import RequestOutput, Seconds, Usage
from pagedcli.engine.prompt import RequestSpec
from pagedcli.errors import EngineDead, RequestError

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""
Message: TypeAlias = Mapping[str, Any]
"""One message of a conversation: `{"role": "user", "content": "..."}`."""
Errors: TypeAlias = Literal["raise", "return"]
"""What to do about a request that is refused: raise, or return it with its `error`."""


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or many as a list; a flat list of numbers (arrays and tensors too) is one prompt.

    Raises:
        RequestError: It is none of these.
    """
    if isinstance(prompts, str):
        return [prompts]
    items = _listed("prompts", prompts, "text, token ids, or a list of these")
    if items and _is_number(items[0]):
        return [cast("Sequence[int]", items)]
    return cast("list[Prompt]", items)


def _is_number(item: Any) -> bool:
    """Whether it is one token id rather than a prompt; an array has `__index__` whatever its shape."""
    try:
        operator.index(item)
    except TypeError:
        return False
    return True


def as_conversations(messages: Iterable[Message] | Iterable[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation or many as a list.

    Raises:
        RequestError: It is neither.
    """
    items = _listed("messages", messages, 'a list of {"role": ..., "content": ...}, or a list of such lists')
    if items and isinstance(items[0], Mapping):
        return [cast("Sequence[Message]", items)]
    return cast("list[Sequence[Message]]", items)


def as_params(params: SamplingParams | Iterable[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Parameters for each of `count` requests.

    Raises:
        RequestError: There is not one for each.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = _listed("params", params, "SamplingParams, or a list of them")
    if len(each) != count:
        raise RequestError(
            f"{len(each)} sampling parameters for {count} prompts: give one, or one for each",
            code="invalid_value",
            field="params",
        )
    return [checked_params(item) for item in each]


def checked_params(params: object) -> SamplingParams:
    """The parameters of one request; None: the defaults.

    Raises:
        RequestError: They are something else.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise _wrong_type("params", params, "SamplingParams, such as SamplingParams(max_tokens=8)")
    return params


def check_errors(errors: object) -> None:
    """RequestError unless it is one of `Errors`."""
    if errors not in get_args(Errors):
        raise RequestError(
            f'errors is {errors!r}: give "raise" or "return"', code="invalid_value", field="errors"
        )


def _listed(field: str, value: object, wanted: str) -> list[Any]:
    """Any iterable but text, bytes and mappings as a list."""
    if isinstance(value, str | bytes | bytearray | Mapping):
        raise _wrong_type(field, value, wanted)
    try:
        return list(cast("Iterable[Any]", value))
    except TypeError:
        raise _wrong_type(field, value, wanted) from None


def _wrong_type(field: str, value: object, wanted: str) -> RequestError:
    kind = type(value).__name__
    return RequestError(f"{field} is of type {kind}: give {wanted}", code="invalid_value", field=field)


def prompt_specs(
    prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[RequestSpec]:
    """Specs of raw prompts, not streaming."""
    items = as_prompts(prompts)
    each = as_params(params, len(items))
    return [RequestSpec(prompt=item, params=one, stream=False) for item, one in zip(items, each, strict=True)]


def chat_specs(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    params: SamplingParams | Sequence[SamplingParams] | None,
    template_args: Mapping[str, Any] | None,
) -> list[RequestSpec]:
    """Specs of conversations, not streaming."""
    items = as_conversations(messages)
    each = as_params(params, len(items))
    return [
        RequestSpec(messages=item, params=one, template_args=template_args or {}, stream=False)
        for item, one in zip(items, each, strict=True)
    ]


def refused(spec: RequestSpec, error: RequestError | EngineDead) -> RequestOutput:
    """The output of a request that never reached the engine."""
    return RequestOutput(
        request_id=spec.request_id or "",
        prompt=spec.prompt if isinstance(spec.prompt, str) else None,
        prompt_token_ids=(),
        samples=(),
        prompt_logprobs=None,
        usage=Usage(0, 0, 0),
        seconds=Seconds(0.0, None, 0.0),
        error=error,
    )
