"""Small tokenizers made on the spot, in the forms in which models carry them. Imports tokenizers and sentencepiece."""

from __future__ import annotations

import io
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import processors as post_processors

CORPUS = [
    "The quick brown fox jumps over the lazy dog; the dog sleeps, the fox doesn't.",
    "Paris is the capital of France. It amuses the visitors: 1234567890 of them in 2024!",
    "def function(argument):\n    return [argument ** 2 for _ in range(10)]\n\n",
    "Zürich, naïve café, Ελληνικά, русский текст, 한국어 텍스트, 中文文本, 日本語 🎉🎈 emoji",
    "  leading and    inner   spaces\tand tabs\r\nand line breaks\n\n\n",
] * 4
# What tokenizers stumble over: digits, code, CJK, emoji with joiners, runs of white space, case of contractions.
TEXTS = [
    "",
    " ",
    "a",
    "Hello, world!",
    "In 1999 and 2024: 3.14159, 1,000,000 and 0x1F; ²³ ½ ٣٤",
    "def f(x):\n\treturn x**2  # square\n\n\nprint(f(10))\r\n",
    "   three leading, two trailing  ",
    "a  b   c    d     e\n \n  \n\t\t\tx",
    "I'm, you're, he'll, she'd, we've, it's, don't; I'M, YOU'RE, HE'LL",
    "中文，日本語のテキスト、한국어 텍스트.",
    "emoji: 👩‍👩‍👧‍👦 🏳️‍🌈 🎉🎉 ❤️",
    "Ünïcödé, ﬁ ligature, e\u0301 combining, \u00a0nbsp\u2003em",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<s> [INST] x [/INST]</s>",
    "\x00\x01 control \x7f ￼ \u200b",
    "the the the Paris is the capital of France",
]

GPT2_SPLIT = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN_ADDED = ["<think>", "<tool>"]


def _split(regex: str) -> pre_tokenizers.PreTokenizer:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), behavior="isolated"), bytes_only])


def _digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


PRE_TOKENIZERS = {
    "gpt-2": lambda: _split(GPT2_SPLIT),
    "smollm": _digits,
    "llama-bpe": lambda: _split(LLAMA3_SPLIT),
    "qwen2": lambda: _split(QWEN2_SPLIT),
}


@lru_cache
def byte_level(pre: str = "gpt-2") -> Tokenizer:
    """A trained byte-level BPE tokenizer that splits text as the named family does."""
    backend = Tokenizer(models.BPE())
    # Learned without any splitting, so that there are merges across every border that a family splits at.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(
        [piece for line in CORPUS for piece in re.findall(r".{1,8}", line, re.DOTALL)], trainer
    )
    if pre == "llama-bpe":
        stored = json.loads(backend.to_str())
        stored["model"]["ignore_merges"] = True
        del stored["model"]["merges"][::3]  # these tokens are found as whole words only
        backend = Tokenizer.from_str(json.dumps(stored))
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.add_tokens([AddedToken(token, normalized=False) for token in PLAIN_ADDED])
    return backend


def gguf_metadata(backend: Tokenizer, pre: str, **fields: Any) -> dict[str, Any]:
    """What a GGUF file says of a byte-level tokenizer; `fields` are `tokenizer.ggml.` keys."""
    stored = json.loads(backend.to_str())
    by_id = {token_id: token for token, token_id in backend.get_vocab().items()}
    tokens = [by_id[token_id] for token_id in range(len(by_id))]
    kinds = [3 if token in SPECIAL else 4 if token in PLAIN_ADDED else 1 for token in tokens]
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": kinds,
        "merges": [" ".join(pair) for pair in stored["model"]["merges"]],
        "eos_token_id": tokens.index("<|im_end|>"),
        **fields,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@lru_cache
def sentencepiece_processor(add_dummy_prefix: bool = True) -> Any:
    """A trained SentencePiece BPE model with byte fallback, as Llama 2 has it."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.splitlines() if line]),
        model_writer=model,
        model_type="bpe",
        vocab_size=480,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_dummy_prefix,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(add_dummy_prefix: bool = True, **fields: Any) -> dict[str, Any]:
    """What a GGUF file says of that SentencePiece model."""
    model = sentencepiece_processor(add_dummy_prefix)
    ids = range(model.get_piece_size())
    kind = {0: 2, 1: 3, 2: 3}
    values = {
        "model": "llama",
        "tokens": [model.id_to_piece(i) for i in ids],
        "scores": [model.get_score(i) for i in ids],
        "token_type": [
            kind.get(i, 6 if model.is_byte(i) else 4 if model.id_to_piece(i) == "<tool>" else 1) for i in ids
        ],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": add_dummy_prefix,
        **fields,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def byte_fallback_backend() -> Tokenizer:
    """A tokenizer of the Llama 2 form: byte tokens, a few words and characters, no merges."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "b", "▁a", "▁▁", "é", "중", "▁한", "🎉", "<think>", "x▁y"]
    backend = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = post_processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def write_folder(
    path: Path, backend: Tokenizer, tokenizer_config: dict[str, Any] | None = None, **files: Any
) -> Path:
    """A model folder with a tokenizer; `files` are further JSON files by stem."""
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    for stem, value in {"tokenizer_config": tokenizer_config, **files}.items():
        if value is not None:
            (path / f"{stem}.json").write_text(json.dumps(value), encoding="utf-8")
    return path
