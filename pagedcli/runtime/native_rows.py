"""What one slot's request wants of the native sampler: its row of `SAMPLE_ROW`, made at admission.

Imports numpy, `paged_kernels.native` and `core`. The order of operations is told in `sampling_rows`, whose torch code
gives the same result. A row holds addresses of arrays; `SlotSampling` keeps those alive. The slots of the kernels fill
in what changes from step to step: tokens, position, row of logits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from paged_kernels.native import SAMPLE_ROW

from pagedcli.core.plan import Admission
from pagedcli.core.sampling import SamplingParams

Array = np.ndarray[Any, Any]

ALL_ALLOWED = -1
NO_LOGPROBS = -1
_FILLING = -1
_COPIED = (
    *("temperature", "top_p", "min_p", "top_k"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"),
)


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """One slot's sampling.

    Attributes:
        row: [1] of SAMPLE_ROW.
        prompt_top: Alternatives for prompt tokens.
        kept: Arrays that `row` points into.
    """

    row: Array
    prompt_top: int
    kept: tuple[Array, ...]


def make_slot_sampling(admission: Admission, vocab_size: int) -> SlotSampling:
    """The sampling of a request that is admitted.

    Ids beyond the head's rows cannot be sampled, so that forbidding or biasing them is done already.

    Args:
        admission: What was asked for.
        vocab_size: Rows of the head.
    """
    params = admission.params
    row: dict[str, float] = {name: getattr(params, name) for name in _COPIED}
    row["seed"] = admission.seed & (2**64 - 1)
    row["sample_index"] = admission.sample_index
    row["num_prompt"] = admission.num_prompt
    row["num_top"] = NO_LOGPROBS if params.logprobs is None else min(params.logprobs, vocab_size)
    kept: list[Array] = []
    _point(row, kept, "banned", "num_banned", _ids(_banned(params), vocab_size))
    stop_ids = admission.stop_ids if params.min_tokens else ()
    _point(row, kept, "stop_ids", "num_stop_ids", _ids(stop_ids, vocab_size))
    _allow(row, kept, params, vocab_size)
    _bias(row, kept, params, vocab_size)
    _bad_words(row, kept, params, vocab_size)
    packed = bytearray(_ROW.pack(*[row.get(name, 0) for name in _FIELDS]))
    return SlotSampling(
        np.frombuffer(packed, SAMPLE_ROW), min(params.prompt_logprobs or 0, vocab_size), tuple(kept)
    )


_FIELDS = SAMPLE_ROW.names or ()
_ROW = struct.Struct("=" + "".join({"i": "q", "u": "Q", "f": "d"}[SAMPLE_ROW[name].kind] for name in _FIELDS))
"""One row, field by field; assigning the fields of an array takes ten times as long."""


def _point(row: dict[str, float], kept: list[Array], field: str, count: str, values: Array | None) -> None:
    """Let a field point to an array; None: to nothing."""
    if values is not None:
        row[field] = values.ctypes.data
        row[count] = len(values)
        kept.append(values)


def _ids(ids: Iterable[int], vocab_size: int) -> Array | None:
    found = sorted({token for token in ids if token < vocab_size})
    return np.array(found, np.int32) if found else None


def _banned(params: SamplingParams) -> Sequence[int]:
    return [*params.bad_token_ids, *(word[0] for word in params.bad_word_ids if len(word) == 1)]


def _allow(row: dict[str, float], kept: list[Array], params: SamplingParams, vocab_size: int) -> None:
    if params.allowed_token_ids is None:
        row["num_allowed"] = ALL_ALLOWED
    else:
        _point(row, kept, "allowed", "num_allowed", _ids(params.allowed_token_ids, vocab_size))


def _bias(row: dict[str, float], kept: list[Array], params: SamplingParams, vocab_size: int) -> None:
    known = {token: value for token, value in params.logit_bias if token < vocab_size}
    if known:
        _point(row, kept, "bias_ids", "num_bias", np.array(sorted(known), np.int32))
        _point(row, kept, "bias", "num_bias", np.array([known[token] for token in sorted(known)], np.float64))


def _bad_words(row: dict[str, float], kept: list[Array], params: SamplingParams, vocab_size: int) -> None:
    """Words of several tokens, right-aligned in one table."""
    words = [word for word in params.bad_word_ids if len(word) > 1 and word[-1] < vocab_size]
    if not words:
        return
    longest = max(len(word) - 1 for word in words)
    heads = np.full((len(words), longest), _FILLING, np.int32)
    for at, word in enumerate(words):
        heads[at, longest + 1 - len(word) :] = word[:-1]
    _point(row, kept, "bad_heads", "num_bad", heads)
    _point(row, kept, "bad_last", "num_bad", np.array([word[-1] for word in words], np.int32))
    row["bad_length"] = longest
