"""The sampler by brute force: what SamplingParams documents, one token after the other, in Python floats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from paged_kernels.sampling import vocabulary_noise

from pagedcli.core.plan import Admission
from pagedcli.core.sampling import SamplingParams
from pagedcli.runtime.sampler import Fault, SampleRequest, sample
from pagedcli.runtime.sampling_rows import SamplingRow, make_sampling_row

CPU = torch.device("cpu")
MINUS_INFINITY = -math.inf


def make_row(
    params: SamplingParams, vocab_size: int, *, num_prompt: int = 0, seed: int = 0, sample_index: int = 0,
    stop_ids: tuple[int, ...] = (),
) -> SamplingRow:  # fmt: skip
    admission = Admission((), (), num_prompt, sample_index, seed, params, stop_ids)
    return make_sampling_row(admission, vocab_size, CPU)


def run(
    logits: torch.Tensor, rows: Sequence[SamplingRow], tokens: Sequence[Sequence[int]] | None = None
) -> tuple[list[int], list[int]]:
    """Tokens and faults; one row of logits and one token list per sampling row."""
    tokens = tokens or [[]] * len(rows)
    store = torch.zeros(len(rows), max(len(t) for t in tokens) + 3, dtype=torch.int32)
    for slot, known in enumerate(tokens):
        store[slot, : len(known)] = torch.tensor(known, dtype=torch.int32)
    requests = [SampleRequest(i, i, len(tokens[i]), row) for i, row in enumerate(rows)]
    chosen, faults = sample(logits, requests, store)
    return chosen.tolist(), faults.tolist()


def one(logits: torch.Tensor, params: SamplingParams, tokens: Sequence[int] = (), **row: Any) -> int:
    chosen, faults = run(logits[None], [make_row(params, len(logits), **row)], [tokens])
    assert faults == [Fault.NONE]
    return chosen[0]


def brute_adjusted(
    logits: list[float],
    params: SamplingParams,
    tokens: Sequence[int],
    num_prompt: int,
    stop_ids: Sequence[int],
) -> list[float]:
    counts = Counter(tokens[num_prompt:])
    result = []
    for token, value in enumerate(logits):
        if token in tokens:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= counts[token] * params.frequency_penalty
        value -= params.presence_penalty if counts[token] else 0.0
        value += dict(params.logit_bias).get(token, 0.0)
        early = len(tokens) - num_prompt < params.min_tokens and token in stop_ids
        outside = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        word = any(
            bad[-1] == token and list(bad[:-1]) == list(tokens[len(tokens) - len(bad) + 1 :])
            for bad in params.bad_word_ids
            if len(bad) - 1 <= len(tokens)
        )
        result.append(MINUS_INFINITY if early or outside or word or token in params.bad_token_ids else value)
    return result


def brute_kept(adjusted: list[float], params: SamplingParams) -> dict[int, float]:
    """Token -> probability of what top_k, top_p and min_p keep."""
    best = max(adjusted)
    scaled = {t: (v - best) / params.temperature for t, v in enumerate(adjusted) if v > MINUS_INFINITY}
    order = sorted(scaled, key=lambda t: (-scaled[t], t))
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = {token: math.exp(scaled[token]) for token in order}
    total = math.fsum(weights.values())
    kept, front = [], 0.0
    for token in order:
        if params.top_p < 1.0 and front >= params.top_p * total:
            break
        kept.append(token)
        front += weights[token]
    kept = [token for token in kept if weights[token] >= params.min_p * weights[order[0]]]
    total = math.fsum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def brute_choice(
    adjusted: list[float], params: SamplingParams, seed: int, position: int, sample_index: int
) -> int:
    if params.temperature == 0:
        return min(range(len(adjusted)), key=lambda t: (-adjusted[t], t))
    noise = vocabulary_noise(
        len(adjusted), torch.tensor([seed]), torch.tensor([position]), torch.tensor([sample_index])
    )[0].tolist()
    best = max(adjusted)
    kept = brute_kept(adjusted, params)
    return min(kept, key=lambda t: (-((adjusted[t] - best) / params.temperature + noise[t]), t))
