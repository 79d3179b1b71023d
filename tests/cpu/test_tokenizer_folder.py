"""`Tokenizer.from_folder` against transformers' AutoTokenizer on the same files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, processors

from pagedcli.errors import CheckpointError, RequestError
from pagedcli.text.tokenizer import Tokenizer
from tests.text_vocabularies import TEXTS, byte_fallback_backend, byte_level, write_folder


def with_start_token(backend: Backend) -> Backend:
    copied = copy.deepcopy(backend)
    copied.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[(token, copied.token_to_id(token)) for token in ("<|im_start|>", "<|im_end|>")],
    )
    return copied


FAST = "PreTrainedTokenizerFast"
NAMED = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
ADDED = {
    "0": {"content": "<|endoftext|>", "special": True, "normalized": False},
    "451": {"content": "<secret>", "special": True, "normalized": False},
    "450": {"content": "<new>", "special": False, "normalized": False, "lstrip": True},
}
FOLDERS: dict[str, tuple[Any, dict[str, Any] | None, dict[str, Any]]] = {
    "plain": (lambda: byte_level("qwen2"), {"tokenizer_class": FAST, **NAMED}, {}),
    "no configuration": (lambda: byte_level("gpt-2"), None, {}),
    "post-processor adds tokens": (
        lambda: with_start_token(byte_level("llama-bpe")),
        {"tokenizer_class": FAST, **NAMED},
        {},
    ),
    "add_bos_token without post-processor": (
        lambda: byte_level("smollm"),
        {"tokenizer_class": FAST, "add_bos_token": True, "add_eos_token": True, **NAMED},
        {},
    ),
    "add_bos_token false with post-processor": (
        lambda: with_start_token(byte_level("smollm")),
        {"tokenizer_class": FAST, "add_bos_token": False, **NAMED},
        {},
    ),
    "added tokens": (
        lambda: byte_level("qwen2"),
        {
            "tokenizer_class": FAST,
            "added_tokens_decoder": ADDED,
            "additional_special_tokens": ["<think>"],
            **NAMED,
        },
        {},
    ),
    "a special token that tokenizer.json does not know": (
        lambda: byte_level("gpt-2"),
        {"tokenizer_class": FAST, **NAMED, "sep_token": "<sep>"},
        {},
    ),
    "special_tokens_map": (
        lambda: byte_level("gpt-2"),
        {"tokenizer_class": FAST},
        {
            "special_tokens_map": {
                "eos_token": {"content": "<think>", "lstrip": False},
                "bos_token": "<|im_end|>",
            }
        },
    ),
    "byte fallback": (
        byte_fallback_backend,
        {"tokenizer_class": FAST, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        {},
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_encodes_decodes_and_names_tokens_like_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    backend, config, files = FOLDERS[name]
    folder = write_folder(tmp_path / "model", backend(), config, **files)
    oracle = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    for text in [*TEXTS, "a <new> b<secret>c <sep><think> <tool>"]:
        for add_special_tokens in (True, False):
            ids = oracle(text, add_special_tokens=add_special_tokens)["input_ids"]
            assert ours.encode(text, add_special_tokens=add_special_tokens) == ids, text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == oracle.decode(
                    ids, skip_special_tokens=skip
                )
    assert ours.bos_token_id == oracle.bos_token_id
    assert ours.eos_token_ids == (() if oracle.eos_token_id is None else (oracle.eos_token_id,))
    assert ours.special_tokens == oracle.special_tokens_map
    assert ours.special_ids == {i for i, token in oracle.added_tokens_decoder.items() if token.special}
    assert ours.vocab_size == len(oracle)


def test_the_generation_settings_name_further_end_tokens(tmp_path: Path) -> None:
    config = {"tokenizer_class": FAST, **NAMED}
    folder = write_folder(tmp_path / "a", byte_level(), config, generation_config={"eos_token_id": [0, 300]})
    assert Tokenizer.from_folder(folder).eos_token_ids == (0, 300, 2)
    folder = write_folder(tmp_path / "b", byte_level(), config, generation_config={"eos_token_id": 2})
    assert Tokenizer.from_folder(folder).eos_token_ids == (2,)
    folder = write_folder(tmp_path / "c", byte_level(), config, config={"eos_token_id": 7})
    assert Tokenizer.from_folder(folder).eos_token_ids == (7, 2)
    files: dict[str, Any] = {"config": {"eos_token_id": 7}, "generation_config": {}}
    folder = write_folder(tmp_path / "d", byte_level(), config, **files)
    assert Tokenizer.from_folder(folder).eos_token_ids == (2,)


def test_templates_come_from_files_before_the_configuration(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = write_folder(tmp_path / "a", byte_level(), {"chat_template": named})
    tokenizer = Tokenizer.from_folder(folder)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.chat_template == "D"
    assert tokenizer.apply_chat_template(messages, tools=[{"name": "f"}]) == "T"
    (folder / "chat_template.jinja").write_text("F", encoding="utf-8")
    assert Tokenizer.from_folder(folder).chat_template == "F"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R", encoding="utf-8")
    assert Tokenizer.from_folder(folder).apply_chat_template(messages, template="rag") == "R"


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    backend = copy.deepcopy(byte_level())
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("Zürich, naïve café")) == "Zürich, naïve café"


def test_without_tokenizer_json_the_error_says_how_to_convert(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json.*transformers.*save_pretrained") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["half \ud83d", None, 5, b"bytes"])
def test_what_is_not_unicode_text_is_refused(text: Any, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_level()))
    with pytest.raises(RequestError) as caught:
        tokenizer.encode(text)
    assert caught.value.field == "prompt"


def test_token_bytes_are_exact() -> None:
    from pagedcli.text.parts import TokenizerParts

    tokenizer = Tokenizer(TokenizerParts(byte_level(), (), {}))
    ids = tokenizer.encode("Zürich 中文 🎉\n")
    assert b"".join(tokenizer.token_bytes(i) or b"" for i in ids) == "Zürich 中文 🎉\n".encode()
    assert tokenizer.token_bytes(10**6) is None
    assert tokenizer.token_text(10**6) == ""
    fallback = Tokenizer(TokenizerParts(byte_fallback_backend(), (), {}))
    assert fallback.token_bytes(3 + 0xEA) == b"\xea"
    assert fallback.token_text(3 + 0xEA) == "\ufffd"
    assert [fallback.token_bytes(i) for i in (259, 262, 265)] == [b" ", b" a", "중".encode()]


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("post_processor", {"special_tokens": {}}),
        ("model", {"unk_token": "<gone>", "byte_fallback": False}),
    ],
)
def test_a_file_that_fails_only_in_use_is_refused_when_it_is_read(
    part: str, value: dict[str, Any], tmp_path: Path
) -> None:
    stored = json.loads(byte_fallback_backend().to_str())
    stored[part] |= value
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be used"):
        Tokenizer.from_folder(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 500) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["bos_token", "eos_token", "x_token", "added_tokens_decoder", "extra_special_tokens", "chat_template"]
FILES = ["tokenizer_config", "special_tokens_map", "generation_config"]


@settings(max_examples=150, deadline=None)
@given(
    file=st.sampled_from(FILES),
    value=JSON
    | st.dictionaries(st.sampled_from([*NAMES, "additional_special_tokens", "eos_token_id"]), JSON),
)
def test_malformed_settings_give_a_checkpoint_error_or_a_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, file: str, value: Any
) -> None:
    folder = write_folder(tmp_path_factory.mktemp("fuzz"), byte_level(), **{file: value})
    try:
        tokenizer = Tokenizer.from_folder(folder)
    except CheckpointError as error:
        message = str(error)
        assert "\n" not in message
    else:
        assert tokenizer.decode(tokenizer.encode("abc", add_special_tokens=False)) == "abc"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_malformed_tokenizer_json_gives_a_checkpoint_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    stored = json.loads(byte_fallback_backend().to_str())
    key = data.draw(st.sampled_from(sorted(stored)))
    if isinstance(stored[key], dict) and stored[key] and data.draw(st.booleans()):
        inner = data.draw(st.sampled_from(sorted(stored[key])))
        stored[key][inner] = data.draw(JSON)
    else:
        stored[key] = data.draw(JSON)
    text = json.dumps(stored)
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "tokenizer.json").write_text(text[: data.draw(st.sampled_from([len(text), len(text) // 2]))])
    try:
        tokenizer = Tokenizer.from_folder(folder)
    except CheckpointError as error:
        message = str(error)
        assert "\n" not in message
    else:
        tokenizer.decode(tokenizer.encode("abc"))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[1]", b"{", b'"x"', b"[" * 100_000])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "tokenizer.json"])
def test_broken_files_are_named(content: bytes, name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Metaspace(),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a▁", "x")]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]),
        decoders.CTC(),
        None,
    ],
)
@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 272), max_size=30), skip=st.booleans())
def test_other_decoders_are_equal_to_the_library(decoder: Any, ids: list[int], skip: bool) -> None:
    from pagedcli.text.parts import TokenizerParts

    backend = byte_fallback_backend()
    if decoder is None:
        stored = json.loads(backend.to_str())
        stored["decoder"] = None
        backend = Backend.from_str(json.dumps(stored))
    else:
        backend.decoder = decoder
    tokenizer = Tokenizer(TokenizerParts(backend, (), {}))
    whole = backend.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == whole
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    assert "".join([*map(detokenizer.push, ids), detokenizer.finish()]) == whole
