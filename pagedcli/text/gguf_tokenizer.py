"""A tokenizer built from the metadata of a GGUF file. May import tokenizers, `errors` and `text`.

A GGUF file stores a vocabulary, not a tokenizer: how text is split is only named (`tokenizer.ggml.pre`), and how a
SentencePiece vocabulary merges follows from its scores. Two traps: the start token is added only if the file says so
(where it says nothing, as llama.cpp does), and the end token is the file's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pagedcli.errors import CheckpointError
from pagedcli.text.parts import TokenizerParts, checked, try_out, unique

PREFIX = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
SPACE = "▁"
NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # spelled like this in the format
    "mask_token": "mask_token_id",
}
# Control tokens that end a turn or a text in the families that have them; llama.cpp ends an output at these too.
END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
)

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a byte-level vocabulary's text is prepared.

    Attributes:
        regex: Text is split into its matches; None: as GPT-2 does.
        digits: Every digit is split off first.
        compose: Text is brought into Unicode's composed form (NFC).
        whole_words: A word that is in the vocabulary is not merged from its bytes (`ignore_merges`).
        start_token: Whether a start token is added where the file says nothing about it.
    """

    regex: str | None = None
    digits: bool = False
    compose: bool = False
    whole_words: bool = False
    start_token: bool = False


_GPT2_SPLIT = Splitting()
_DIGITS_SPLIT = Splitting(digits=True)
_LLAMA3_SPLIT = Splitting(_LLAMA3, whole_words=True, start_token=True)
_QWEN2_SPLIT = Splitting(_QWEN2, compose=True)
SPLITTINGS: dict[str, Splitting] = {
    **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "jais", "phi-2", "trillion"), _GPT2_SPLIT),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS_SPLIT),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2"), _LLAMA3_SPLIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2_SPLIT),
    "stablelm2": Splitting(_QWEN2),
    "tekken": Splitting(_TEKKEN, whole_words=True, start_token=True),
}


def gguf_parts(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Build the tokenizer that a GGUF file describes.

    Args:
        metadata: Values of the file's `tokenizer.*` keys, as stored.
    """
    fields = Fields(metadata)
    vocabulary = Vocabulary.read(fields)
    if vocabulary.model == "gpt2":
        splitting = _splitting(fields)
        backend = _byte_level_backend(vocabulary, fields, splitting)
        start_token = splitting.start_token
    else:
        backend = _sentencepiece_backend(vocabulary, fields)
        start_token = True
    _add_special_tokens(backend, vocabulary)
    try_out("the tokenizer of the GGUF file", backend)
    ids = {name: fields.token_id(key, len(vocabulary.tokens)) for name, key in NAMED_TOKENS.items()}
    bos, eos = ids["bos_token"], ids["eos_token"]
    return TokenizerParts(
        backend=backend,
        eos_token_ids=_eos_token_ids(fields, vocabulary, eos),
        special_tokens={name: vocabulary.tokens[i] for name, i in ids.items() if i is not None},
        chat_templates=_chat_templates(fields),
        prefix_ids=(bos,) if bos is not None and fields.flag("add_bos_token", start_token) else (),
        suffix_ids=(eos,) if eos is not None and fields.flag("add_eos_token", False) else (),
    )


class Fields:
    """Typed access to the metadata: a value of another type than expected is a CheckpointError with the key's name."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def get(self, key: str) -> Any:
        """The raw value of `tokenizer.ggml.KEY` or None."""
        return self._metadata.get(PREFIX + key)

    def text(self, name: str) -> str | None:
        """A text under its whole name."""
        value = self._metadata.get(name)
        _require(value is None or isinstance(value, str), f"{name} is {value!r}: it must be a text")
        return value

    def templates(self) -> list[str]:
        """Names of the further chat templates."""
        begin = "tokenizer.chat_template."
        return [key.removeprefix(begin) for key in self._metadata if key.startswith(begin)]

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        value = self.get(key)
        return default if value is None else bool(value)

    def token_id(self, key: str, num_tokens: int) -> int | None:
        """A token id of the vocabulary; None if the key is not there."""
        value = self.get(key)
        if value is None:
            return None
        ok = isinstance(value, Integral) and 0 <= int(value) < num_tokens
        _require(ok, f"{PREFIX}{key} is {value!r}: the vocabulary has ids 0 to {num_tokens - 1}")
        return int(value)

    def items(self, key: str, kind: type, length: int | None = None) -> list[Any] | None:
        """A list of `kind`, of the given length if one is given; None if the key is not there."""
        value = self.get(key)
        if value is None:
            return None
        _require(
            hasattr(value, "__iter__") and not isinstance(value, (str, Mapping)), f"{PREFIX}{key} is no list"
        )
        found = list(value)
        if not all(issubclass(found_kind, kind) for found_kind in set(map(type, found))):
            wrong = next(i for i, item in enumerate(found) if not isinstance(item, kind))
            raise CheckpointError(f"{PREFIX}{key}[{wrong}] is not of type {kind.__name__.lower()}")
        ok = length is None or len(found) == length
        _require(ok, f"{PREFIX}{key} has {len(found)} entries, {PREFIX}tokens has {length}")
        return found


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file by id, their kinds, and the id of each token."""

    model: str
    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]

    @classmethod
    def read(cls, fields: Fields) -> Vocabulary:
        """Read and check the lists of tokens."""
        model = fields.text(PREFIX + "model")
        _require(model in ("gpt2", "llama"), f"{PREFIX}model is {model!r}: known are gpt2 and llama")
        tokens = fields.items("tokens", str) or []
        _require(bool(tokens), f"{PREFIX}tokens is missing or empty: the file has no vocabulary")
        kinds = fields.items("token_type", Integral, len(tokens)) or [1] * len(tokens)
        ids = dict(zip(tokens, range(len(tokens)), strict=True))
        if len(ids) < len(tokens):
            twice, last = next((token, ids[token]) for i, token in enumerate(tokens) if ids[token] != i)
            first = tokens.index(twice)
            raise CheckpointError(f"{PREFIX}tokens has {twice!r} twice, as ids {first} and {last}")
        return cls(str(model), tokens, [int(kind) for kind in kinds], ids)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise CheckpointError(message)


def _splitting(fields: Fields) -> Splitting:
    name = fields.text(PREFIX + "pre") or "default"
    known = ", ".join(sorted(SPLITTINGS))
    _require(
        name in SPLITTINGS,
        f"{PREFIX}pre is {name!r}, an unknown way to split text: known are {known}",
    )
    return SPLITTINGS[name]


def _byte_level_backend(vocabulary: Vocabulary, fields: Fields, splitting: Splitting) -> Backend:
    merges = _stored_merges(vocabulary, fields)
    _require(
        merges is not None, f"{PREFIX}merges is missing: a byte-level vocabulary cannot be used without it"
    )
    backend = _bpe(vocabulary, merges or [], ignore_merges=splitting.whole_words)
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.digits else []
    if splitting.regex is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.regex is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if splitting.compose:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece_backend(vocabulary: Vocabulary, fields: Fields) -> Backend:
    merges = _stored_merges(vocabulary, fields)
    if merges is None:
        scores = fields.items("scores", Real, len(vocabulary.tokens))
        _require(
            scores is not None,
            f"{PREFIX}scores is missing: a SentencePiece vocabulary cannot be used without it",
        )
        merges = _merges_from_scores(vocabulary, [float(score) for score in scores or []])
    unknown = fields.token_id("unknown_token_id", len(vocabulary.tokens)) or 0
    backend = _bpe(
        vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=vocabulary.tokens[unknown]
    )
    prefix = fields.flag("add_space_prefix", True)
    to_marks = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_marks]) if prefix else to_marks
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: Any) -> Backend:
    model = checked(
        "the vocabulary of the GGUF file", lambda: models.BPE(vocab=vocabulary.ids, merges=merges, **options)
    )
    return Backend(model)


def _stored_merges(vocabulary: Vocabulary, fields: Fields) -> list[tuple[str, str]] | None:
    """The merge list; each entry is two tokens with one space between them."""
    lines = fields.items("merges", str)
    if lines is None:
        return None
    ids, merges = vocabulary.ids, []
    for index, line in enumerate(lines):
        middle = line.find(" ", 1)
        left, right = line[:middle], line[middle + 1 :]
        if middle < 1 or left not in ids or right not in ids or left + right not in ids:
            raise CheckpointError(f"{PREFIX}merges[{index}] is {line!r}: not two tokens that join to a third")
        merges.append((left, right))
    return merges


def _merges_from_scores(vocabulary: Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joint token has the highest score: all such pairs, best first."""
    _require(not any(map(math.isnan, scores)), f"{PREFIX}scores has a value that is not a number")
    ids, merges = vocabulary.ids, []
    for token_id, token in enumerate(vocabulary.tokens):
        if vocabulary.kinds[token_id] in (UNKNOWN, CONTROL, USER_DEFINED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((-scores[token_id], ids[left], ids[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _add_special_tokens(backend: Backend, vocabulary: Vocabulary) -> None:
    """Control tokens are special and never cut; user-defined ones are found in text as they are, but shown."""
    added = [
        AddedToken(token, normalized=False, special=kind != USER_DEFINED)
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
    ]
    checked("the special tokens of the GGUF file", lambda: backend.add_tokens(added))


def _eos_token_ids(fields: Fields, vocabulary: Vocabulary, eos: int | None) -> tuple[int, ...]:
    """The file's end token, its end-of-turn tokens, and control tokens known to end a turn."""
    named = [eos, *(fields.token_id(key, len(vocabulary.tokens)) for key in ("eot_token_id", "eom_token_id"))]
    known = [vocabulary.ids[token] for token in END_TOKENS if token in vocabulary.ids]
    control = [token_id for token_id in known if vocabulary.kinds[token_id] == CONTROL]
    return unique([token_id for token_id in named if token_id is not None] + control)


def _chat_templates(fields: Fields) -> dict[str, str]:
    names = {"default": "tokenizer.chat_template"}
    names |= {name: f"tokenizer.chat_template.{name}" for name in fields.templates()}
    found = {name: fields.text(key) for name, key in names.items()}
    return {name: text for name, text in found.items() if text is not None}
