"""From what a caller gives to what the core takes: tokens, resolved sampling parameters, stop ids, seeds.

May import `text`, `core` and `errors`. Runs on the caller's thread, so that tokenizing never holds the loop up, and
refuses with `RequestError` all that can be judged without the state of the engine.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from pagedcli.core.sampling import SamplingParams
from pagedcli.errors import RequestError
from pagedcli.text.detokenizer import Detokenizer
from pagedcli.text.words import WordCodec, resolve_words

RESERVED_VARIABLES = ("messages", "template", "self")
SEED_MASK = (1 << 64) - 1


class TextCodec(WordCodec, Protocol):
    """What the engine needs of `text.tokenizer.Tokenizer`."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids at which the model ends."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""

    def token_text(self, token_id: int) -> str:
        """Text of one token alone."""

    def detokenizer(self, *, skip_special_tokens: bool = True, continuing: bool = False) -> Detokenizer:
        """A fresh incremental detokenizer; `continuing`: for an output that goes on after a prompt."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **options: Any,
    ) -> str:
        """Text of a conversation."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request as a caller makes it.

    Attributes:
        prompt: Raw text (the start token as the tokenizer says) or token ids; None if `messages` are given.
        messages: A conversation for the chat template; None if `prompt` is given.
        params: Sampling parameters.
        request_id: The caller's name for it, not that of an unfinished request; None: one is drawn.
        template_args: Further variables for the chat template.
        stream: Deliver a delta for each token; False: only the very last one, with the output.
        add_special_tokens: Put the start token (and others) round a text; None: for a prompt, not for messages,
            whose template writes it itself.
        truncate_prompt_tokens: Keep only so many tokens, the last ones; None: all.
    """

    prompt: str | Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str | None = None
    template_args: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = True
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request in the core's terms.

    Attributes:
        prompt: Its text; None if token ids were given.
        tokens: Token ids of the prompt, at least one.
        params: With words resolved to ids.
        stop_ids: The model's own end tokens (unless ignored) and the request's.
    """

    prompt: str | None
    tokens: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int]


def prepare(
    spec: RequestSpec, codec: TextCodec, *, vocab_size: int, chat_template: str | None = None
) -> Prepared:
    """Tokenize and check one request.

    Args:
        spec: The request.
        codec: The model's tokenizer.
        vocab_size: Rows of the model's embedding: token ids must be below it.
        chat_template: Used instead of the model's own.

    Raises:
        RequestError: The prompt is missing, doubled or empty, a template refuses it, or an id is not in the
            vocabulary.
    """
    text, tokens = _tokens(spec, codec, chat_template)
    if spec.truncate_prompt_tokens is not None and len(tokens) > spec.truncate_prompt_tokens:
        text, tokens = None, tokens[-spec.truncate_prompt_tokens :]
    if not tokens:
        raise RequestError(
            "the prompt is empty: give at least one token", code="empty_prompt", field="prompt"
        )
    for position, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"prompt_token_ids[{position}] is {token}: the vocabulary has ids 0 to {vocab_size - 1}",
                code="invalid_value",
                field="prompt_token_ids",
            )
    params = resolve_words(spec.params, codec, vocab_size)
    own_end = () if params.ignore_eos else codec.eos_token_ids
    return Prepared(text, tokens, params, _stop_ids(own_end, params.stop_token_ids))


@lru_cache(maxsize=64)
def _stop_ids(own_end: tuple[int, ...], asked: tuple[int, ...]) -> frozenset[int]:
    """One set for all requests that end alike: every token is looked up in it, and a set for each fills the cache."""
    return frozenset((*own_end, *asked))


def _tokens(
    spec: RequestSpec, codec: TextCodec, chat_template: str | None
) -> tuple[str | None, tuple[int, ...]]:
    if (spec.prompt is None) == (spec.messages is None):
        raise RequestError(
            "give a prompt or messages, one of the two", code="invalid_request", field="prompt"
        )
    if spec.messages is not None:
        _check_template_args(spec.template_args)
        text = codec.apply_chat_template(spec.messages, template=chat_template, **spec.template_args)
        # The template writes the start token itself where the model wants one.
        return text, tuple(codec.encode(text, add_special_tokens=spec.add_special_tokens is True))
    if isinstance(spec.prompt, str):
        return spec.prompt, tuple(
            codec.encode(spec.prompt, add_special_tokens=spec.add_special_tokens is not False)
        )
    assert spec.prompt is not None
    return None, _checked_ids(spec.prompt)


def _check_template_args(args: object) -> None:
    """Names under which the tokenizer takes what the request itself says are no variables of the caller."""
    if not isinstance(args, Mapping) or not all(isinstance(name, str) for name in args):
        raise RequestError(
            "template_args must be a mapping of names to values", code="invalid_value", field="template_args"
        )
    for name in RESERVED_VARIABLES:
        if name in args:
            raise RequestError(
                f"template_args: {name} is set by the request itself: leave it out",
                code="invalid_value",
                field="template_args",
            )


def _checked_ids(ids: Sequence[int]) -> tuple[int, ...]:
    try:
        if isinstance(ids, bytes | bytearray) or any(isinstance(token, bool) for token in ids):
            raise TypeError  # Bytes and truth values have an index too, which nobody means.
        return tuple(operator.index(token) for token in ids)
    except TypeError:
        raise RequestError(
            "the prompt is neither text nor a list of token ids (whole numbers)",
            code="invalid_value",
            field="prompt",
        ) from None


def mixed_seed(engine_seed: int, counter: int) -> int:
    """Seed of the counter-th unseeded request: splitmix64 of the engine's seed, so neighbours share nothing."""
    value = (engine_seed + counter * 0x9E3779B97F4A7C15) & SEED_MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & SEED_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & SEED_MASK
    return value ^ (value >> 31)
