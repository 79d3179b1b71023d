"""Sampling parameters of one request, checked when they are made. Standard library only; may import `errors`.

A `SamplingParams` that exists is valid and in one form: numbers are int or float, sequences are tuples. Only
what needs the vocabulary (do these ids exist?) or the model (does it fit?) is checked later. The defaults are
those of `paged generate` and the Python API (greedy, 256 tokens); the server starts from OpenAI's.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex

from pagedcli.errors import RequestError

MAX_LOGPROBS = 20
MAX_N = 128
MAX_LOGIT_BIAS = 100.0
MAX_TEMPERATURE = 100.0
MAX_TOKEN_ID = 2**31 - 1

_SHOWN_CHARACTERS = 60

# Inclusive ranges: least, greatest, what the numbers mean. Messages and documentation print them.
_INT_RANGES: dict[str, tuple[int, int, str]] = {
    "top_k": (-1, MAX_TOKEN_ID, "0 or -1 keeps all tokens"),
    "seed": (-(2**63), 2**64 - 1, "64 bits"),
    "n": (1, MAX_N, "samples of one prompt"),
    "max_tokens": (0, MAX_TOKEN_ID, "null for as many as fit"),
    "min_tokens": (0, MAX_TOKEN_ID, "output tokens"),
    "logprobs": (0, MAX_LOGPROBS, "alternatives for each token; leave it out for none"),
    "prompt_logprobs": (0, MAX_LOGPROBS, "alternatives for each token; leave it out for none"),
    "priority": (-(2**31), 2**31 - 1, "lower runs earlier"),
    "max_pages": (1, MAX_TOKEN_ID, "leave it out for no cap"),
}
_FLOAT_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, MAX_TEMPERATURE, "0 is greedy"),
    "top_p": (0.0, 1.0, "above 0; temperature 0 takes the most probable token"),
    "min_p": (0.0, 1.0, "a part of the most probable token's probability"),
    "repetition_penalty": (0.01, 100.0, "1 is none"),
    "presence_penalty": (-2.0, 2.0, "0 is none"),
    "frequency_penalty": (-2.0, 2.0, "0 is none"),
    "deadline_s": (0.0, 1e9, "seconds above 0; leave it out for none"),
}
_ABOVE_ZERO = frozenset({"top_p", "deadline_s"})
_MAY_BE_NONE = frozenset(
    {"seed", "max_tokens", "logprobs", "prompt_logprobs", "max_pages", "deadline_s", "allowed_token_ids"}
)
_TEXTS = ("bad_words", "allowed_words", "stop")
_IDS = ("bad_token_ids", "stop_token_ids")
_SWITCHES = ("include_stop_str_in_output", "ignore_eos", "echo", "skip_special_tokens")


def field_range(field: str) -> tuple[float, float, str]:
    """Least and greatest value of a number (inclusive), and what the numbers mean; KeyError if it has no range."""
    return _INT_RANGES[field] if field in _INT_RANGES else _FLOAT_RANGES[field]


def _refuse(field: str, value: object, remedy: str) -> RequestError:
    try:
        shown = repr(value)
    except ValueError:  # Python writes no int of more than 4,300 digits.
        shown = "a number of very many digits"
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[: _SHOWN_CHARACTERS - 3] + "..."
    return RequestError(f"{field} is {shown}: {remedy}", code="invalid_value", field=field)


def _range_text(least: float, greatest: float, meaning: str) -> str:
    return f"from {least:g} to {greatest:g} ({meaning})"


def _as_int(field: str, value: object, remedy: str) -> int:
    """The value as an int; True, "5" and 5.0 are none, whole numbers of other libraries are."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise _refuse(field, value, f"give a whole number {remedy}")
    try:
        return operator.index(value)
    except TypeError:
        raise _refuse(field, value, f"give a whole number {remedy}") from None


def _as_float(field: str, value: object, remedy: str) -> float:
    """The value as a finite float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _refuse(field, value, f"give a number {remedy}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _refuse(field, value, f"give a finite number {remedy}")
    return number


def _ranged_int(field: str, value: object) -> int:
    least, greatest, meaning = _INT_RANGES[field]
    remedy = f"from {least} to {greatest} ({meaning})"
    number = _as_int(field, value, remedy)
    if not least <= number <= greatest:
        raise _refuse(field, value, f"give a whole number {remedy}")
    return number


def _ranged_float(field: str, value: object) -> float:
    least, greatest, meaning = _FLOAT_RANGES[field]
    remedy = _range_text(least, greatest, meaning)
    number = _as_float(field, value, remedy)
    if not least <= number <= greatest or (number == 0.0 and field in _ABOVE_ZERO):
        raise _refuse(field, value, f"give a number {remedy}")
    return number


def _items(field: str, value: object, of_what: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _refuse(field, value, f"give a list of {of_what}")
    return tuple(value)


def _token_id(field: str, value: object) -> int:
    number = _as_int(field, value, "for each token id")
    if not 0 <= number <= MAX_TOKEN_ID:
        raise _refuse(field, value, "a token id is from 0 up to the vocabulary's last")
    return number


def _token_ids(field: str, value: object) -> tuple[int, ...]:
    return tuple(_token_id(field, item) for item in _items(field, value, "token ids"))


def _one_text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise _refuse(field, value, "give text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _refuse(field, value, "it holds half a surrogate pair, which no text can contain") from None
    return value


def _texts(field: str, value: object) -> tuple[str, ...]:
    """One text or several; an empty one would match before anything is said (C1)."""
    items = (value,) if isinstance(value, str) else _items(field, value, "texts")
    texts = tuple(_one_text(field, item) for item in items)
    if "" in texts:
        raise _refuse(field, value, "it holds an empty text: leave that out")
    return texts


def _bias_id(field: str, key: object) -> int:
    """A token id as JSON object keys spell it ("42") or as a number (A14)."""
    if isinstance(key, str):
        if not (key.isascii() and key.isdigit()):
            raise _refuse(field, key, "keys are token ids, whole numbers from 0")
        return _token_id(field, int(key[:20]))
    return _token_id(field, key)


def _logit_bias(field: str, value: object) -> tuple[tuple[int, float], ...]:
    """Pairs in ascending order of id, from a mapping or from pairs."""
    pairs = tuple(value.items()) if isinstance(value, Mapping) else _items(field, value, "id and bias pairs")
    result: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _refuse(field, pair, "give pairs of a token id and its bias")
        token = _bias_id(field, pair[0])
        remedy = f"for token id {token} from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
        bias = _as_float(field, pair[1], remedy)
        if abs(bias) > MAX_LOGIT_BIAS:
            raise _refuse(field, pair[1], f"give a number {remedy}")
        if token in result:
            raise _refuse(field, value, f"token id {token} is given twice: keep one")
        result[token] = bias
    return tuple(sorted(result.items()))


def _bad_word_ids(field: str, value: object) -> tuple[tuple[int, ...], ...]:
    sequences = tuple(_token_ids(field, item) for item in _items(field, value, "token id lists"))
    if () in sequences:
        raise _refuse(field, value, "it holds an empty sequence: leave that out")
    return sequences


def _allowed_ids(field: str, value: object) -> tuple[int, ...]:
    ids = _token_ids(field, value)
    if not ids:
        raise _refuse(field, value, "nothing could be sampled: give at least one id, or leave it out")
    return ids


def _switch(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refuse(field, value, "give true or false")
    return value


_CHECKS: dict[str, Callable[[str, object], object]] = {
    **dict.fromkeys(_INT_RANGES, _ranged_int),
    **dict.fromkeys(_FLOAT_RANGES, _ranged_float),
    **dict.fromkeys(_TEXTS, _texts),
    **dict.fromkeys(_IDS, _token_ids),
    "logit_bias": _logit_bias,
    "bad_word_ids": _bad_word_ids,
    "cache_salt": _one_text,
    "allowed_token_ids": _allowed_ids,
    **dict.fromkeys(_SWITCHES, _switch),
}
"""What makes a field's value valid and brings it into its one form, for every field."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends.

    Attributes:
        temperature: 0 is argmax with ties to the lowest id, always; else logits are divided by it.
        top_k: Keep the k most probable tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of most probable tokens whose probabilities sum to at least top_p.
        min_p: Drop tokens less probable than min_p times the most probable one.
        repetition_penalty: Over prompt and output tokens (CTRL, Keskar et al. 2019); 1 is none.
        presence_penalty: Subtracted once for each token that occurs in the output.
        frequency_penalty: Subtracted for each occurrence of a token in the output.
        logit_bias: Added to the logits of token ids, -100 to 100: {"42": 1.5}, or (id, bias) pairs.
        allowed_token_ids: Only these may be sampled; none: all.
        bad_token_ids: These are never sampled.
        bad_words: Texts that never appear (they become `bad_word_ids`).
        allowed_words: Only tokens of these texts may be sampled (they become `allowed_token_ids`).
        bad_word_ids: Token sequences whose last token is never sampled after the others.
        seed: Makes a request reproducible alone and under load; none: one is made from the engine's seed.
        n: Samples of the prompt; they share the prompt's pages.
        max_tokens: Output tokens at most; None (null in a row): as many as fit.
        min_tokens: No stop token, stop text or end of sequence before so many output tokens.
        stop: Texts that end a request; cut from the output unless include_stop_str_in_output.
        stop_token_ids: Token ids that end a request, besides the model's own.
        include_stop_str_in_output: Keep the stop text in the output.
        ignore_eos: Do not end at the model's end-of-sequence tokens.
        logprobs: Number of top alternatives to return for each output token (0: its own only).
        prompt_logprobs: The same for prompt tokens.
        echo: Return the prompt's text before the output.
        skip_special_tokens: Leave special tokens out of the text.
        priority: Lower runs earlier under the priority policy.
        deadline_s: Seconds after arrival at which the request ends with what it has; none: never.
        max_pages: Pages of KV at which it ends with what it has (finish_reason page_cap); none: no cap.
        cache_salt: Requests share prefixes only with requests of the same salt.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    deadline_s: float | None = None
    max_pages: int | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            is_valid = value is _DEFAULTS[name] or (value is None and name in _MAY_BE_NONE)
            if not is_valid:
                object.__setattr__(self, name, check(name, value))
        self._check_together()

    def _check_together(self) -> None:
        """What no field can get wrong alone."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            remedy = f"max_tokens is {self.max_tokens}: lower min_tokens to that or raise max_tokens"
            raise _refuse("min_tokens", self.min_tokens, remedy)
        allowed = self.allowed_token_ids
        if allowed is not None and set(allowed) <= set(self.bad_token_ids):
            raise _refuse(
                "allowed_token_ids", allowed, "bad_token_ids forbids all of them: nothing could be sampled"
            )

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again; an unknown field is refused with a suggestion."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else "leave it out"
                raise RequestError(
                    f"{name} is no sampling parameter: {hint}", code="unknown_field", field=name
                )
        return dataclasses.replace(self, **changes)

    @property
    def is_greedy(self) -> bool:
        """Temperature 0: argmax, whatever the other fields say (C9)."""
        return self.temperature == 0.0


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
"""Valid as they are: nearly all fields of nearly all requests."""
