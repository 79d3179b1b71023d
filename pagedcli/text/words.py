"""Words and token ids of a request, checked against the vocabulary. May import `errors`, `core.sampling`, `text`.

The core and the sampler know token ids only; this is where texts become ids and where an id that the model does not
have is refused, before it can reach the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from pagedcli.core.sampling import SamplingParams
from pagedcli.errors import RequestError


class Encoder(Protocol):
    """What this needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""


def resolve_words(
    params: SamplingParams, tokenizer: Encoder, vocab_size: int | None = None
) -> SamplingParams:
    """The same parameters with words turned into token ids; RequestError names the field and the id or word.

    A bad word is forbidden as it is written and with a space before it. Doing it twice changes nothing.

    Args:
        params: Parameters of a request.
        tokenizer: The model's tokenizer.
        vocab_size: Number of logits of the model, if it differs from the tokenizer's vocabulary.
    """
    _check_ids(params, tokenizer.vocab_size if vocab_size is None else vocab_size)
    sequences = [ids for word in params.bad_words for ids in _spellings(word, "bad_words", tokenizer)]
    allowed = [ids for word in params.allowed_words for ids in _spellings(word, "allowed_words", tokenizer)]
    return replace(
        params,
        bad_token_ids=_unique([*params.bad_token_ids, *(ids[0] for ids in sequences if len(ids) == 1)]),
        bad_word_ids=tuple(
            dict.fromkeys([*params.bad_word_ids, *(ids for ids in sequences if len(ids) > 1)])
        ),
        allowed_token_ids=_allowed(params, [token_id for ids in allowed for token_id in ids]),
    )


def _allowed(params: SamplingParams, of_words: list[int]) -> tuple[int, ...] | None:
    if params.allowed_token_ids is None and not params.allowed_words:
        return None
    return _unique([*(params.allowed_token_ids or ()), *of_words])


def _unique(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))


def _spellings(word: str, field: str, tokenizer: Encoder) -> list[tuple[int, ...]]:
    """Token ids of a word as it is written and after a space, without what the tokenizer adds around texts."""
    spellings = [
        tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word, " " + word.lstrip(" "))
    ]
    found = [ids for ids in dict.fromkeys(spellings) if ids]
    if not word.strip() or not found:
        raise RequestError(
            f"{field} has {word!r}: give a word that is not empty", code="invalid_value", field=field
        )
    return found


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    fields: dict[str, Iterable[object]] = {
        "logit_bias": (token_id for token_id, _ in params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_token_ids": params.bad_token_ids,
        "stop_token_ids": params.stop_token_ids,
        "bad_word_ids": (token_id for ids in params.bad_word_ids for token_id in ids),
    }
    for field, ids in fields.items():
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"{field} has token id {token_id!r}: the vocabulary has ids 0 to {vocab_size - 1}",
                    code="invalid_value",
                    field=field,
                )
