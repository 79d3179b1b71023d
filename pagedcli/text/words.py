"""Words and token ids of a request, checked against the vocabulary. May import `errors` and `core.sampling`.

The core and the sampler know token ids only; this is where texts become ids and where an id that the model does not
have is refused, before it can reach the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Protocol

from pagedcli.core.sampling import SamplingParams
from pagedcli.errors import RequestError

# A bad word can be spelled with many tokens; the spellings with the fewest tokens are forbidden, up to these numbers.
MAX_SPELLINGS = 64
MAX_SEARCH = 4096

Ids = tuple[int, ...]


class WordCodec(Protocol):
    """What is needed of a tokenizer to turn words into ids."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def ids_by_bytes(self) -> Mapping[bytes, int]:
        """The id of each byte string that an ordinary token adds inside a text."""

    def encode_inside(self, text: str) -> list[int]:
        """Ids of a text as it is encoded in the middle of another one."""


def resolve_words(
    params: SamplingParams, tokenizer: WordCodec, vocab_size: int | None = None
) -> SamplingParams:
    """The same parameters with words turned into token ids; RequestError names the field and the id or word.

    A word counts as it is written and with a space before it. A bad word is forbidden in every way to spell it with
    tokens of the vocabulary (up to `MAX_SPELLINGS`), not only as the tokenizer writes it. Doing it twice changes
    nothing.

    Args:
        params: Parameters of a request.
        tokenizer: The model's tokenizer.
        vocab_size: Number of logits of the model, if it differs from the tokenizer's vocabulary.
    """
    _check_ids(params, tokenizer.vocab_size if vocab_size is None else vocab_size)
    if not params.bad_words and not params.allowed_words:
        return params
    bad = [ids for word in params.bad_words for ids in _bad_spellings(word, tokenizer)]
    allowed = [ids for word in params.allowed_words for ids in _spellings(word, "allowed_words", tokenizer)]
    return replace(
        params,
        bad_token_ids=_unique([*params.bad_token_ids, *(ids[0] for ids in bad if len(ids) == 1)]),
        bad_word_ids=tuple(dict.fromkeys([*params.bad_word_ids, *(ids for ids in bad if len(ids) > 1)])),
        allowed_token_ids=_allowed(params, [token_id for ids in allowed for token_id in ids]),
    )


def _allowed(params: SamplingParams, of_words: list[int]) -> Ids | None:
    if not params.allowed_words:
        return params.allowed_token_ids
    return _unique([*(params.allowed_token_ids or ()), *of_words])


def _unique(ids: Iterable[int]) -> Ids:
    return tuple(dict.fromkeys(ids))


def _variants(word: str) -> tuple[str, str]:
    return word, " " + word.lstrip(" ")


def _spellings(word: str, field: str, tokenizer: WordCodec) -> list[Ids]:
    """Token ids of a word inside a text, as it is written and after a space."""
    found = [tuple(tokenizer.encode_inside(variant)) for variant in _variants(word)] if word.strip() else []
    if not all(found) or not found:
        raise RequestError(
            f"{field} has {word!r}: give a word that is not empty", code="invalid_value", field=field
        )
    return list(dict.fromkeys(found))


def _bad_spellings(word: str, tokenizer: WordCodec) -> list[Ids]:
    usual = _spellings(word, "bad_words", tokenizer)
    known = tokenizer.ids_by_bytes
    every = [
        ids for text in _variants(word) for ids in islice(_segmentations(text.encode(), known), MAX_SPELLINGS)
    ]
    return list(dict.fromkeys(usual + every))


def _segmentations(data: bytes, ids: Mapping[bytes, int]) -> Iterator[Ids]:
    """Ways to put `data` together from tokens, those of the fewest tokens first."""
    longest = max(map(len, ids), default=0)
    paths: deque[tuple[int, Ids]] = deque([(0, ())])
    for _ in range(MAX_SEARCH):
        if not paths:
            return
        begin, path = paths.popleft()
        if begin == len(data):
            yield path
            continue
        for end in range(min(len(data), begin + longest), begin, -1):
            if data[begin:end] in ids:
                paths.append((end, (*path, ids[data[begin:end]])))


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
