"""`Tokenizer.from_gguf` against the tokenizers that the metadata was taken from, SentencePiece and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagedcli.errors import CheckpointError
from pagedcli.text.tokenizer import Tokenizer
from tests.text_vocabularies import (
    TEXTS,
    byte_level,
    gguf_metadata,
    sentencepiece_metadata,
    sentencepiece_processor,
)

FAMILIES = ["gpt-2", "smollm", "llama-bpe", "qwen2"]


@pytest.mark.parametrize("pre", FAMILIES)
def test_byte_level_vocabularies_split_as_their_family_does(pre: str) -> None:
    original = byte_level(pre)
    ours = Tokenizer.from_gguf(gguf_metadata(original, pre, add_bos_token=False))
    for text in [*TEXTS, "a <think>b</think> <|im_end|>", *TEXTS[4].split()]:
        ids = original.encode(text).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == original.decode(ids)
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("pre", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60) | st.text("aAbB 'sStT019\n\t.é中🎉", max_size=40))
def test_any_text_is_split_as_the_family_does(pre: str, text: str) -> None:
    original = byte_level(pre)
    assert _gguf_tokenizer(pre).encode(text) == original.encode(text).ids


_MADE: dict[str, Tokenizer] = {}


def _gguf_tokenizer(pre: str) -> Tokenizer:
    if pre not in _MADE:
        _MADE[pre] = Tokenizer.from_gguf(gguf_metadata(byte_level(pre), pre, add_bos_token=False))
    return _MADE[pre]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_byte_level_text_round_trip(text: str) -> None:
    tokenizer = _gguf_tokenizer("smollm")
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_the_families_differ_on_digits() -> None:
    digits = {pre: len(_gguf_tokenizer(pre).encode("1234567890")) for pre in FAMILIES}
    assert digits["smollm"] == digits["qwen2"] == 10
    assert digits["gpt-2"] < 10


@pytest.mark.parametrize("prefix", [True, False])
@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40) | st.text("ab Pisé中🎉12\n", max_size=40) | st.sampled_from(TEXTS))
def test_sentencepiece_vocabularies_encode_and_decode_like_sentencepiece(prefix: bool, text: str) -> None:
    model = sentencepiece_processor(prefix)
    key = f"sentencepiece {prefix}"
    if key not in _MADE:
        _MADE[key] = Tokenizer.from_gguf(sentencepiece_metadata(prefix))
    ours = _MADE[key]
    # Text that spells a control token or a user-defined one in the middle of a word is matched first by both engines,
    # but SentencePiece does not know control tokens in text; "\0" ends its texts, and "▁" is its own space.
    assume(not any(piece in text for piece in ("<unk>", "<s>", "</s>", "\0", "▁")))
    expected = model.encode(text)
    assert ours.encode(text, add_special_tokens=False) == expected
    assert ours.decode(expected) == model.decode(expected)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(3, 479) | st.integers(3, 262), max_size=20))
def test_any_ids_decode_like_sentencepiece(ids: list[int]) -> None:
    """Byte tokens included: valid characters are kept, each invalid byte is one U+FFFD.

    After a word: at the very start a space that is a byte token is stripped here (as transformers does), not there.
    """
    model = sentencepiece_processor()
    ids = [*model.encode("the"), *ids]
    key = "sentencepiece True"
    if key not in _MADE:
        _MADE[key] = Tokenizer.from_gguf(sentencepiece_metadata())
    assert _MADE[key].decode(ids) == model.decode(ids)


def test_user_defined_and_control_tokens_are_found_in_text() -> None:
    ours = Tokenizer.from_gguf(sentencepiece_metadata())
    tool = ours.encode("x<tool>y", add_special_tokens=False)
    tool_id = sentencepiece_processor().piece_to_id("<tool>")
    assert tool_id in tool
    assert 2 in ours.encode("a</s>", add_special_tokens=False)
    assert tool_id not in ours.special_ids
    assert {0, 1, 2} <= ours.special_ids


def test_the_start_token_is_added_once_and_only_if_the_file_says_so() -> None:
    metadata = gguf_metadata(byte_level(), "smollm", bos_token_id=1)
    assert Tokenizer.from_gguf(metadata).encode("a") == byte_level("smollm").encode("a").ids
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert 1 not in Tokenizer.from_gguf(metadata).encode("a")
    metadata["tokenizer.ggml.add_bos_token"] = True
    assert Tokenizer.from_gguf(metadata).encode("a").count(1) == 1
    assert 1 not in Tokenizer.from_gguf(metadata).encode("a", add_special_tokens=False)
    metadata["tokenizer.ggml.add_eos_token"] = True
    assert Tokenizer.from_gguf(metadata).encode("a")[-1] == 2
    # where the file says nothing: as llama.cpp has it
    silent = gguf_metadata(byte_level("llama-bpe"), "llama-bpe", bos_token_id=1)
    assert Tokenizer.from_gguf(silent).encode("a")[0] == 1
    assert Tokenizer.from_gguf(sentencepiece_metadata()).encode("a")[0] == 1
    assert Tokenizer.from_gguf(sentencepiece_metadata(add_bos_token=False)).encode("a")[0] != 1


def test_a_chat_starts_with_one_start_token() -> None:
    metadata = sentencepiece_metadata()
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]).count(1) == 1


def test_the_end_tokens_are_the_files() -> None:
    # <|endoftext|> is a control token that ends a text in every family that has it, but never the first of the list
    assert Tokenizer.from_gguf(gguf_metadata(byte_level(), "gpt-2")).eos_token_ids == (2, 0)
    metadata = gguf_metadata(byte_level(), "gpt-2", eos_token_id=5, eot_token_id=7)
    assert Tokenizer.from_gguf(metadata).eos_token_ids == (5, 7, 2, 0)
    assert Tokenizer.from_gguf(sentencepiece_metadata()).eos_token_ids == (2,)


def test_named_templates() -> None:
    metadata = gguf_metadata(byte_level(), "gpt-2")
    metadata |= {"tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T{{ tools|length }}"}
    metadata["tokenizer.chat_templates"] = ["tool_use"]
    tokenizer = Tokenizer.from_gguf(metadata)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.chat_template == "D"
    assert tokenizer.apply_chat_template(messages) == "D"
    assert tokenizer.apply_chat_template(messages, tools=[{"a": 1}]) == "T1"
    assert tokenizer.apply_chat_template(messages, template="tool_use", tools=[{"a": 1}, {}]) == "T2"


def test_an_unknown_way_to_split_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match=r"'tiktokken'.*known are .*llama-bpe.*qwen2.*smollm"):
        Tokenizer.from_gguf(gguf_metadata(byte_level(), "tiktokken"))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("model", "bert", "'bert'"),
        ("model", None, "None"),
        ("tokens", [], "no vocabulary"),
        ("tokens", None, "no vocabulary"),
        ("tokens", ["a", "a"], "twice"),
        ("tokens", ["a", 5], r"tokens\[1\]"),
        ("tokens", "abc", "no list"),
        ("token_type", [1], "has 1 entries"),
        ("merges", ["a"], r"merges\[0\]"),
        ("merges", ["Ġ xyz"], r"merges\[0\]"),
        ("merges", None, "merges is missing"),
        ("eos_token_id", 10**6, "eos_token_id is 1000000"),
        ("eos_token_id", "x", "eos_token_id"),
        ("bos_token_id", -1, "bos_token_id is -1"),
    ],
)
def test_malformed_metadata_is_refused_by_name(key: str, value: Any, says: str) -> None:
    metadata = gguf_metadata(byte_level(), "gpt-2")
    metadata[f"tokenizer.ggml.{key}"] = value
    if key == "tokens":
        metadata["tokenizer.ggml.token_type"] = None
    with pytest.raises(CheckpointError, match=says):
        Tokenizer.from_gguf(metadata)


def test_a_sentencepiece_vocabulary_without_scores_is_refused() -> None:
    with pytest.raises(CheckpointError, match="scores is missing"):
        Tokenizer.from_gguf(sentencepiece_metadata(scores=None))
    with pytest.raises(CheckpointError, match="not a number"):
        Tokenizer.from_gguf(sentencepiece_metadata(scores=[float("nan")] * 480))


VALUES = st.none() | st.booleans() | st.integers(-3, 500) | st.floats() | st.text(max_size=5)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_random_metadata_gives_a_checkpoint_error_or_a_tokenizer(data: st.DataObject) -> None:
    base = gguf_metadata(byte_level(), "gpt-2") if data.draw(st.booleans()) else sentencepiece_metadata()
    names = st.sampled_from([*sorted(base), "tokenizer.chat_template"])
    keys = data.draw(st.lists(names, min_size=1, max_size=3, unique=True))
    metadata = dict(base)
    for key in keys:
        value = metadata.get(key)
        if isinstance(value, list) and data.draw(st.booleans()):
            changed = list(value)
            changed[data.draw(st.integers(0, len(value) - 1))] = data.draw(VALUES)
            metadata[key] = changed
        else:
            metadata[key] = data.draw(VALUES | st.lists(VALUES, max_size=4))
    try:
        tokenizer = Tokenizer.from_gguf(metadata)
    except CheckpointError as error:
        message = str(error)
        assert "\n" not in message
    else:
        tokenizer.decode(tokenizer.encode("abc é"))


@pytest.mark.model
def test_smollm2_encodes_like_a_tokenizer_built_by_other_hands(smollm2_gguf: Path) -> None:
    """transformers reads the vocabulary; its splitting, decoder and start token are set right by hand."""
    from tokenizers import decoders, pre_tokenizers, processors
    from transformers import AutoTokenizer

    from pagedcli.checkpoint import open_checkpoint

    oracle = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name).backend_tokenizer
    bytes_split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), bytes_split]
    )
    oracle.decoder = decoders.ByteLevel()
    oracle.normalizer = None
    oracle.post_processor = processors.ByteLevel(trim_offsets=False)
    ours = open_checkpoint(smollm2_gguf).load_tokenizer()
    assert ours.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert ours.encode("12345") == [33, 34, 35, 36, 37]
    source = Path(__file__).read_text(encoding="utf-8")
    for text in [*TEXTS, source, *source.splitlines(), *(chr(code) for code in range(0x20, 0x3000, 97))]:
        ids = oracle.encode(text).ids
        assert ours.encode(text) == ids, text
        assert (
            ours.decode(ids, skip_special_tokens=False)
            == oracle.decode(ids, skip_special_tokens=False)
            == text
        )
    assert ours.eos_token_ids[0] == 2
    assert ours.bos_token_id == 1
    assert ours.vocab_size == 49152
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages).endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
