"""Bad and allowed words become token ids; ids that the vocabulary does not have are refused by name."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import pytest

from pagedcli.core.sampling import SamplingParams
from pagedcli.errors import RequestError
from pagedcli.text.parts import TokenizerParts
from pagedcli.text.tokenizer import Tokenizer
from pagedcli.text.words import resolve_words
from tests.text_vocabularies import byte_level, sentencepiece_metadata


@lru_cache
def byte_tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerParts(byte_level("smollm"), (2,), {}))


@lru_cache
def spm_tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata())


def forbidden(params: SamplingParams) -> set[tuple[int, ...]]:
    return {*params.bad_word_ids, *((token_id,) for token_id in params.bad_token_ids)}


@pytest.mark.parametrize("make", [byte_tokenizer, spm_tokenizer])
@pytest.mark.parametrize("word", ["dog", "Paris", "qu", "é", "🎉", "fox jumps"])
def test_every_way_to_write_a_bad_word_is_forbidden(make: object, word: str) -> None:
    tokenizer = byte_tokenizer() if make is byte_tokenizer else spm_tokenizer()
    found = forbidden(resolve_words(SamplingParams(bad_words=(word,)), tokenizer))
    for ids in found:
        data = b"".join(tokenizer.token_bytes(i) or b"" for i in ids)
        assert data in (word.encode(), b" " + word.encode())
    assert tuple(tokenizer.encode_inside(word)) in found
    assert tuple(tokenizer.encode_inside(" " + word)) in found


def test_all_short_spellings_are_found() -> None:
    """Against every sequence of up to four tokens, tried one by one."""
    tokenizer = byte_tokenizer()
    word = b"uses"
    parts = [i for i in range(3, tokenizer.vocab_size) if (tokenizer.token_bytes(i) or b"?") in word]
    every = {
        ids
        for n in (1, 2, 3, 4)
        for ids in product(parts, repeat=n)
        if b"".join(tokenizer.token_bytes(i) or b"" for i in ids) == word
    }
    assert len(every) > 2
    found = forbidden(resolve_words(SamplingParams(bad_words=("uses",)), tokenizer))
    assert {ids for ids in found if b"".join(tokenizer.token_bytes(i) or b"" for i in ids) == word} == every


def test_a_long_word_has_a_bounded_number_of_spellings() -> None:
    params = resolve_words(SamplingParams(bad_words=("the " * 40,)), byte_tokenizer())
    assert 2 <= len(params.bad_word_ids) <= 130


@pytest.mark.parametrize("make", [byte_tokenizer, spm_tokenizer])
def test_allowed_words_are_added_to_allowed_ids(make: object) -> None:
    tokenizer = byte_tokenizer() if make is byte_tokenizer else spm_tokenizer()
    params = resolve_words(SamplingParams(allowed_words=("dog", "Paris"), allowed_token_ids=(2,)), tokenizer)
    assert params.allowed_token_ids is not None
    expected = {2}
    for word in ("dog", " dog", "Paris", " Paris"):
        expected |= set(tokenizer.encode_inside(word))
    assert set(params.allowed_token_ids) == expected
    assert tokenizer.decode(tokenizer.encode_inside(" Paris")).strip() == "Paris"


def test_doing_it_twice_changes_nothing() -> None:
    params = SamplingParams(bad_words=("dog",), allowed_words=("fox",), bad_token_ids=(5,))
    once = resolve_words(params, byte_tokenizer())
    assert resolve_words(once, byte_tokenizer()) == once
    assert once.bad_token_ids[0] == 5


def test_without_words_nothing_changes() -> None:
    params = SamplingParams(allowed_token_ids=(1, 2), logit_bias=((3, 1.0),))
    assert resolve_words(params, byte_tokenizer()) is params


@pytest.mark.parametrize("field", ["bad_words", "allowed_words"])
def test_a_blank_word_is_refused(field: str) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        resolve_words(SamplingParams(**{field: ("  ",)}), byte_tokenizer())
    assert caught.value.field == field


def test_the_models_vocabulary_counts_where_it_is_larger_or_smaller() -> None:
    size = byte_tokenizer().vocab_size
    params = SamplingParams(stop_token_ids=(size,))
    assert resolve_words(params, byte_tokenizer(), vocab_size=size + 1) is params
    with pytest.raises(RequestError, match=f"token id {size}: the vocabulary has ids 0 to {size - 1}"):
        resolve_words(params, byte_tokenizer())
