"""What `LLM` and `AsyncLLM` share: prompts and parameters in any accepted form become request specs.

May import `engine`, `core` and `errors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

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


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many as a list; a flat list of numbers is one prompt."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation or many as a list."""
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Parameters for each of `count` requests.

    Raises:
        RequestError: There is not one for each.
    """
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(
            f"{len(params)} sampling parameters for {count} prompts: give one, or one for each",
            code="invalid_value",
            field="params",
        )
    return list(params)


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
