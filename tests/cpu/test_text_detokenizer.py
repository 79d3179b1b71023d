"""Incremental detokenization: whatever the cuts, the deltas add up to the decoding of the whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedcli.text.detokenizer import Detokenizer, WholeDetokenizer
from pagedcli.text.parts import TokenizerParts
from pagedcli.text.tokenizer import Tokenizer
from tests.text_vocabularies import TEXTS, byte_fallback_backend, byte_level

A, SPACE_A, DOUBLE_SPACE = 260, 262, 263


@lru_cache
def byte_level_tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerParts(byte_level("smollm"), (), {}))


@lru_cache
def fallback_tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerParts(byte_fallback_backend(), (), {}))


def streamed(tokenizer: Tokenizer, ids: list[int], interval: int, *, skip: bool) -> list[str]:
    """What a client sees that is sent the new text after every `interval` tokens."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    deltas = [detokenizer.push(token_id) for token_id in ids]
    sent = ["".join(deltas[i : i + interval]) for i in range(0, len(ids), interval)]
    return [*sent, detokenizer.finish()]


@pytest.mark.parametrize("interval", [1, 2, 5])
@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 430), max_size=40), skip=st.booleans())
def test_byte_level_deltas_add_up_to_the_librarys_decoding(interval: int, ids: list[int], skip: bool) -> None:
    tokenizer = byte_level_tokenizer()
    whole = byte_level("smollm").decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(tokenizer, ids, interval, skip=skip)) == whole
    assert tokenizer.decode(ids, skip_special_tokens=skip) == whole


@pytest.mark.parametrize("interval", [1, 2, 5])
@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 272) | st.integers(259, 272), max_size=40), skip=st.booleans())
def test_byte_fallback_deltas_add_up_to_the_whole(interval: int, ids: list[int], skip: bool) -> None:
    tokenizer = fallback_tokenizer()
    assert "".join(streamed(tokenizer, ids, interval, skip=skip)) == tokenizer.decode(
        ids, skip_special_tokens=skip
    )


def letters(ids: Sequence[int]) -> str:
    return "".join([chr(ord("a") + token_id % 26) for token_id in ids])


@pytest.mark.parametrize(
    "make",
    [
        lambda: byte_level_tokenizer().detokenizer(),
        lambda: byte_level_tokenizer().detokenizer(skip_special_tokens=False, continuing=True),
        lambda: fallback_tokenizer().detokenizer(),
        lambda: fallback_tokenizer().detokenizer(skip_special_tokens=False, continuing=True),
        lambda: WholeDetokenizer(letters, stable=True),
        lambda: WholeDetokenizer(byte_level("smollm").decode, stable=False),
    ],
    ids=["bytes", "bytes-continuing", "pieces", "pieces-continuing", "whole", "whole-unstable"],
)
@settings(max_examples=60, deadline=None)
@given(runs=st.lists(st.lists(st.integers(0, 272), max_size=8), max_size=6))
def test_many_ids_at_once_give_what_they_give_one_by_one(
    make: Callable[[], Detokenizer], runs: list[list[int]]
) -> None:
    """Characters may be cut anywhere between the runs, and every second run comes id by id."""
    together, alone = make(), make()
    for index, run in enumerate(runs):
        expected = "".join([alone.push(token_id) for token_id in run])
        if index % 2:
            assert "".join([together.push(token_id) for token_id in run]) == expected
        else:
            assert together.push_all(run) == expected
    assert together.finish() == alone.finish()


BYTE_RUNS = st.text(min_size=1, max_size=6).map(lambda text: [3 + byte for byte in text.encode()])
PIECES = st.lists(BYTE_RUNS | st.integers(259, 273).map(lambda i: [i]), max_size=8)


@settings(max_examples=300, deadline=None)
@given(pieces=PIECES, skip=st.booleans())
def test_byte_fallback_equals_the_library_wherever_the_bytes_are_valid(
    pieces: list[list[int]], skip: bool
) -> None:
    ids = [token_id for piece in pieces for token_id in piece]
    expected = byte_fallback_backend().decode(ids, skip_special_tokens=skip)
    assert fallback_tokenizer().decode(ids, skip_special_tokens=skip) == expected


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=30))
@example(data=b"\xed\xa0\x80")
@example(data="기".encode() + b"\xff")
@example(data=b"\xf0\x9f\x8e")
def test_each_invalid_byte_is_one_replacement_character(data: bytes) -> None:
    """Against Python's own decoder, which passes each invalid byte on as one surrogate."""
    expected = re.sub("[\udc80-\udcff]", "\ufffd", data.decode("utf-8", "surrogateescape"))
    # an ordinary token in front, as the leading space is stripped from a whole text
    assert fallback_tokenizer().decode([A, *(3 + byte for byte in data)]) == "a" + expected


@settings(max_examples=300, deadline=None)
@given(text=st.text(min_size=1, max_size=20))
def test_a_character_is_shown_with_its_last_byte_and_never_split(text: str) -> None:
    """Nothing but the bytes of an unfinished character is held back."""
    byte_of = {tokenizer_bytes: i for i in range(420) if len(tokenizer_bytes := _bytes(i)) == 1}
    detokenizer = byte_level_tokenizer().detokenizer()
    fallback = fallback_tokenizer().detokenizer(continuing=True)
    for character in text:
        *first, last = character.encode()
        assert not any(detokenizer.push(byte_of[bytes((byte,))]) for byte in first)
        assert detokenizer.push(byte_of[bytes((last,))]) == character
        assert not any(fallback.push(3 + byte) for byte in first)
        assert fallback.push(3 + last) == character


def _bytes(token_id: int) -> bytes:
    return b"" if token_id < 3 else byte_level_tokenizer().token_bytes(token_id) or b""


@pytest.mark.parametrize("text", [text for text in TEXTS if "<" not in text])
def test_streamed_text_equals_the_text(text: str) -> None:
    tokenizer = byte_level_tokenizer()
    deltas = streamed(tokenizer, tokenizer.encode(text), 1, skip=True)
    assert "".join(deltas) == text
    assert "\ufffd" not in "".join(deltas)


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode("a<|im_end|>b<think>")
    assert tokenizer.decode(ids) == "ab<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b<think>"


def test_a_skipped_token_does_not_break_a_character() -> None:
    tokenizer = fallback_tokenizer()
    assert tokenizer.decode([A, 3 + 0xC3, 1, 3 + 0xA9]) == "aé"
    assert tokenizer.decode([A, 3 + 0xC3, 1, 3 + 0xA9], skip_special_tokens=False) == "a\ufffd<s>\ufffd"


def test_the_first_space_is_stripped_of_a_whole_text_and_kept_of_a_continuation() -> None:
    tokenizer = fallback_tokenizer()
    assert tokenizer.decode([SPACE_A, SPACE_A]) == "a a"
    assert tokenizer.decode([DOUBLE_SPACE, A]) == " a"
    continuing = tokenizer.detokenizer(continuing=True)
    assert [continuing.push(SPACE_A), continuing.push(SPACE_A), continuing.finish()] == [" a", " a", ""]


def test_ids_without_a_token_give_no_text() -> None:
    assert byte_level_tokenizer().decode([-1, 2**40, 10**6]) == ""
