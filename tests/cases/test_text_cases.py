"""Cases from the field that the text layer answers: C6, A11 to A14, A16."""

from __future__ import annotations

from typing import Any

import pytest

from pagedcli.core.sampling import SamplingParams
from pagedcli.errors import RequestError
from pagedcli.text.chat import ChatTemplates
from pagedcli.text.parts import TokenizerParts
from pagedcli.text.stop import StopMatcher
from pagedcli.text.tokenizer import Tokenizer
from pagedcli.text.words import resolve_words
from tests.text_vocabularies import byte_fallback_backend, byte_level

ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if reasoning_effort is defined and reasoning_effort not in ['low', 'high'] %}"
    "{{ raise_exception('unknown reasoning_effort ' + reasoning_effort) }}{% endif %}{{ m.content }}{% endfor %}"
)


def bytes_tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerParts(byte_level("smollm"), (2,), {}))


def fallback_tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerParts(byte_fallback_backend(), (2,), {}))


def stream(tokens: list[str], stops: tuple[str, ...], include: bool = False) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops, include)
    shown: list[str] = []
    for token in tokens:
        text, matched = matcher.push(token)
        shown.append(text)
        if matched:
            return shown, True
    return [*shown, matcher.finish()], False


def test_A11_no_character_of_a_stop_over_four_tokens_is_shown() -> None:
    tokens = ["The", " cap", "ital", " of", " F", "rance"]
    shown, matched = stream(tokens, ("l of Fr",))
    assert matched
    assert shown == ["The", " cap", "ita", "", "", ""]
    # a beginning of a stop that comes to nothing is shown as soon as that is known
    shown, matched = stream(tokens, ("l of Fi",))
    assert not matched
    assert shown == ["The", " cap", "ita", "", "", "l of France", ""]


@pytest.mark.parametrize(
    ("tokens", "stop", "text"),
    [
        (["The", " Paris", "!"], "Pari", "The "),
        (["bring", " it", " am", " now"], "it am", "bring "),
        ([" Paris"], " Paris", ""),
    ],
)
def test_A12_a_stop_need_not_end_with_a_token(tokens: list[str], stop: str, text: str) -> None:
    shown, matched = stream(tokens, (stop,))
    assert ("".join(shown), matched) == (text, True)
    whole, matched = stream(["".join(tokens)], (stop,))
    assert ("".join(whole), matched) == (text, True)
    shown, matched = stream(tokens, (stop,), include=True)
    assert ("".join(shown), matched) == (text + stop, True)


KOREAN_AND_EMOJI = "한국어로 대답해 주세요 🎉 👩‍👩‍👧 日本語 ~ 끝"


@pytest.mark.parametrize("interval", [1, 2, 5])
@pytest.mark.parametrize("make", [bytes_tokenizer, fallback_tokenizer])
def test_A13_streamed_characters_are_whole(interval: int, make: Any) -> None:
    tokenizer = make()
    ids = tokenizer.encode(KOREAN_AND_EMOJI, add_special_tokens=False)
    assert len(ids) > len(KOREAN_AND_EMOJI)  # most characters take several tokens
    detokenizer = tokenizer.detokenizer()
    deltas = [detokenizer.push(token_id) for token_id in ids]
    sent = ["".join(deltas[i : i + interval]) for i in range(0, len(ids), interval)]
    assert "".join([*sent, detokenizer.finish()]) == tokenizer.decode(ids) == KOREAN_AND_EMOJI
    assert all("\ufffd" not in delta for delta in sent)


@pytest.mark.parametrize("make", [bytes_tokenizer, fallback_tokenizer])
def test_A13_only_what_is_unfinished_at_the_end_is_replaced(make: Any) -> None:
    tokenizer = make()
    ids = tokenizer.encode("끝끝", add_special_tokens=False)[:-1]
    text = tokenizer.decode(ids)
    assert text[0] == "끝"
    assert text[1:].strip("\ufffd") == ""
    assert len(text) > 1


@pytest.mark.parametrize(
    ("fields", "field", "token_id"),
    [
        ({"logit_bias": {"999999": 5}}, "logit_bias", "999999"),
        ({"logit_bias": ((422, 1.0),)}, "logit_bias", "422"),
        ({"allowed_token_ids": (5, 999999)}, "allowed_token_ids", "999999"),
        ({"bad_token_ids": (999999,)}, "bad_token_ids", "999999"),
        ({"stop_token_ids": (999999,)}, "stop_token_ids", "999999"),
        ({"bad_word_ids": ((5, 999999),)}, "bad_word_ids", "999999"),
    ],
)
def test_A14_an_id_out_of_the_vocabulary_is_refused(
    fields: dict[str, Any], field: str, token_id: str
) -> None:
    tokenizer = bytes_tokenizer()
    assert tokenizer.vocab_size == 422
    with pytest.raises(RequestError, match=f"{field} has token id {token_id}") as caught:
        resolve_words(SamplingParams(**fields), tokenizer)
    assert caught.value.field == field
    assert caught.value.status == 400


def test_A16_a_template_answers_with_its_own_message() -> None:
    templates = ChatTemplates({"default": ALTERNATING}, {})
    user = {"role": "user", "content": "x"}
    with pytest.raises(RequestError) as caught:
        templates.render([user, user])
    assert str(caught.value) == "Conversation roles must alternate user/assistant/user/assistant/..."
    assert (caught.value.status, caught.value.code) == (400, "template_error")
    with pytest.raises(RequestError, match="unknown reasoning_effort enormous"):
        templates.render([user], reasoning_effort="enormous")
    assert templates.render([user], reasoning_effort="low") == "x"


def test_C6_byte_tokens_are_characters() -> None:
    tokenizer = fallback_tokenizer()
    byte = {value: 3 + value for value in range(256)}
    assert tokenizer.decode([byte[0xEA], byte[0xB9], byte[0xB0]]) == "깰"
    assert tokenizer.decode([byte[0xEA]]) == "\ufffd"
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(byte[value]) for value in (0xEA, 0xB9, 0xB0)] == ["", "", "깰"]
    assert detokenizer.finish() == ""
