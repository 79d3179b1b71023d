"""Bodies that the API takes, as pydantic models: names, kinds and what each one means, for checks and for OpenAPI.

May import pydantic and `core.sampling`. Strict: "5" is no number, true is no number, an unknown name is refused.
Ranges are the sampling parameters' own, so they are checked there and only shown here.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from pagedcli.core.sampling import field_range

NO_EFFECT = ("user", "metadata", "service_tier", "parallel_tool_calls")
"""Taken because clients send them; no answer depends on them."""


def _ranged(name: str, doc: str, *, least: float | None = None) -> Any:
    """A field whose range is a sampling parameter's."""
    low, high, meaning = field_range(name)
    shown: dict[str, Any] = {"minimum": low if least is None else least, "maximum": high}
    return Field(None, description=f"{doc} ({meaning})", json_schema_extra=shown)


def _plain(doc: str, **schema: Any) -> Any:
    return Field(None, description=doc, json_schema_extra=schema or None)


Texts = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}},
                {"type": "null"},
            ]
        }
    ),
]
Prompts = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                },
            ]
        }
    ),
]
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string"},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "null"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
            ]
        },
    },
}
Messages = Annotated[Any, WithJsonSchema({"type": "array", "minItems": 1, "items": _MESSAGE})]
OnlyText = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "null"}, {"const": {"type": "text"}}]})]
NoTools = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "null"}, {"const": []}]})]
NoToolChoice = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "null"}, {"const": "none"}]})]
StreamOptions = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "include_usage": {"type": "boolean"},
                        "continuous_usage_stats": {"type": "boolean"},
                    },
                },
            ]
        }
    ),
]


class Body(BaseModel):
    """What every body has."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(None, description="A served name; may be left out.")


class TemplateBody(Body):
    """What a chat template takes besides messages."""

    add_generation_prompt: bool | None = _plain("End the prompt where the assistant begins to speak [true].")
    continue_final_message: bool | None = _plain("Leave the last message open and go on with it [false].")
    chat_template_kwargs: dict[str, Any] | None = _plain("Further variables for the chat template.")
    documents: list[dict[str, Any]] | None = _plain("Documents for the chat template.")
    reasoning_effort: str | None = _plain("Handed to the chat template.")
    add_special_tokens: bool | None = _plain(
        "Add the start token although the template writes its own [false]."
    )


class SamplingBody(Body):
    """What both completions endpoints have."""

    temperature: float | None = _ranged("temperature", "Logits are divided by it")
    top_p: float | None = _ranged("top_p", "Keep the smallest set of tokens with this probability")
    top_k: int | None = _ranged("top_k", "Keep the k most probable tokens")
    min_p: float | None = _ranged("min_p", "Drop what is less probable than")
    repetition_penalty: float | None = _ranged("repetition_penalty", "Over prompt and output tokens")
    presence_penalty: float | None = _ranged("presence_penalty", "Once for each token in the output")
    frequency_penalty: float | None = _ranged("frequency_penalty", "For each occurrence in the output")
    logit_bias: dict[str, float] | None = _plain("Added to the logits of token ids, -100 to 100.")
    allowed_token_ids: list[int] | None = _plain("Only these may be sampled.")
    bad_words: list[str] | None = _plain("Texts that never appear.")
    seed: int | None = _ranged("seed", "Makes the request repeatable")
    n: int | None = _ranged("n", "Choices")
    max_tokens: int | None = _ranged("max_tokens", "Output tokens at most")
    min_tokens: int | None = _ranged("min_tokens", "Output tokens at least")
    stop: Texts = _plain("Texts that end an answer; they are left out of it.")
    stop_token_ids: list[int] | None = _plain("Tokens that end an answer.")
    include_stop_str_in_output: bool | None = _plain("Keep the stop text [false].")
    ignore_eos: bool | None = _plain("Go on at the model's end of sequence [false].")
    skip_special_tokens: bool | None = _plain("Leave special tokens out of the text [true].")
    prompt_logprobs: int | None = _ranged("prompt_logprobs", "Alternatives for each prompt token")
    priority: int | None = _ranged("priority", "Counts under --policy priority")
    cache_salt: str | None = _plain("Share prefixes only with requests of the same salt.")
    max_pages: int | None = _ranged("max_pages", "Pages of KV at most")
    deadline_ms: float | None = _plain("Milliseconds after which the answer ends with what it has.")
    truncate_prompt_tokens: int | None = _plain(
        "Keep only so many tokens of the prompt's end; -1: as many as fit.", minimum=-1
    )
    return_token_ids: bool | None = _plain("Add the token ids of prompt and output [false].")
    request_id: str | None = _plain("Id of the request; letters, digits, '.', '_' and '-'.")
    stream: bool | None = _plain("Server-sent events instead of one JSON object [false].")
    stream_options: StreamOptions = _plain("include_usage, continuous_usage_stats; only with stream.")
    user: str | None = _plain("No effect.")
    metadata: dict[str, Any] | None = _plain("No effect.")
    service_tier: str | None = _plain("No effect.")
    parallel_tool_calls: bool | None = _plain("No effect.")
    store: bool | None = _plain("Only false: nothing is stored.", const=False)
    response_format: OnlyText = _plain('Only {"type": "text"}.')
    tools: NoTools = _plain("Only an empty list.")
    tool_choice: NoToolChoice = _plain('Only "none".')


class CompletionBody(SamplingBody):
    """`POST /v1/completions`."""

    prompt: Prompts = Field(description="Text, token ids, or a list of either.")
    echo: bool | None = _plain("Return the prompt before the answer [false].")
    logprobs: int | None = _ranged("logprobs", "Alternatives for each token")
    best_of: int | None = _plain("Only the value of n.", minimum=1)
    suffix: str | None = _plain("Only empty.", maxLength=0)
    add_special_tokens: bool | None = _plain("Add the start token that the model wants [true].")


class ChatBody(TemplateBody, SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: Messages = Field(description="The conversation.")
    max_completion_tokens: int | None = _ranged("max_tokens", "Output tokens at most", least=1)
    logprobs: bool | None = _plain("Return log-probabilities [false].")
    top_logprobs: int | None = _ranged("logprobs", "Alternatives for each token; only with logprobs")


class TokenizeBody(TemplateBody):
    """`POST /tokenize`: a prompt or messages."""

    prompt: str | None = _plain("Text.")
    messages: Messages = _plain("A conversation.")
    return_token_strs: bool | None = _plain("Add the text of each token [false].")


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    tokens: list[int] = Field(
        description="Token ids.", json_schema_extra={"items": {"type": "integer", "minimum": 0}}
    )


class ApplyTemplateBody(TemplateBody):
    """`POST /apply-template`."""

    messages: Messages = Field(description="The conversation.")
