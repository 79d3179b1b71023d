"""The sampler against brute force in Python floats, exact probabilities, and transformers' logits processors."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcli.core.sampling import SamplingParams
from pagedcli.runtime.sampler import Fault, LogprobRequest, SampleRequest, logprobs, sample
from pagedcli.runtime.sampling_rows import SamplingRow
from tests.cpu.sampler_helpers import (
    MINUS_INFINITY,
    brute_adjusted,
    brute_choice,
    brute_kept,
    make_row,
    one,
    run,
)


@st.composite
def sampling_cases(draw: st.DrawFn) -> tuple[list[float], SamplingParams, list[int], int, tuple[int, ...]]:
    vocab_size = draw(st.sampled_from([5, 17, 64, 65, 150]))
    # Few distinct values give many ties, as bfloat16 heads do.
    values = draw(st.sampled_from([st.integers(-3, 3).map(float), st.floats(-12, 12, width=32)]))
    logits = draw(st.lists(values, min_size=vocab_size, max_size=vocab_size))
    ids = st.integers(0, vocab_size - 1)
    tokens = draw(st.lists(ids, max_size=12))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-300, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, 5, 40, 1000])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-9])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4, -0.3])),
        logit_bias=draw(st.dictionaries(ids, st.floats(-5, 5), max_size=3)),
        bad_token_ids=draw(st.lists(ids, max_size=2)),
        bad_word_ids=draw(st.lists(st.lists(ids, min_size=1, max_size=3), max_size=2))
        + ([[*tokens[-2:], draw(ids)]] if len(tokens) > 1 else []),
        allowed_token_ids=draw(st.none() | st.just(tuple(range(0, vocab_size, 2)))),
        min_tokens=draw(st.sampled_from([0, 4])),
    )
    return logits, params, tokens, draw(st.integers(0, len(tokens))), tuple(draw(st.lists(ids, max_size=2)))


@given(st.lists(sampling_cases(), min_size=1, max_size=4), st.integers(-(2**63), 2**64 - 1))
@settings(max_examples=120, deadline=None)
def test_a_choice_is_what_brute_force_chooses(cases: list[Any], seed: int) -> None:
    """Rows of different vocabularies cannot share a batch; each is sampled alone and among copies of itself."""
    for logits, params, tokens, num_prompt, stop_ids in cases:
        adjusted = brute_adjusted(
            torch.tensor(logits, dtype=torch.float32).tolist(), params, tokens, num_prompt, stop_ids
        )
        row = make_row(
            params, len(logits), num_prompt=num_prompt, seed=seed, sample_index=3, stop_ids=stop_ids
        )
        both = torch.tensor(logits, dtype=torch.float32).expand(2, -1)
        chosen, faults = run(both, [row, row], [tokens, tokens])
        if max(adjusted) == MINUS_INFINITY:
            assert faults == [Fault.NOTHING_LEFT] * 2
            continue
        signed = (seed + 2**63) % 2**64 - 2**63
        assert faults == [Fault.NONE] * 2
        assert chosen == [brute_choice(adjusted, params, signed, len(tokens), 3)] * 2


@pytest.mark.parametrize("levels", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 63},
        {"top_k": 64},
        {"top_k": 65},
        {"top_k": 600, "top_p": 0.9},
        {"top_p": 0.05},
        {"top_p": 0.3},
        {"top_p": 0.97},
        {"min_p": 0.4},
        {"top_k": 300, "min_p": 0.01, "top_p": 0.7},
    ],
)
def test_cuts_far_down_and_among_ties_are_where_brute_force_cuts(fields: dict[str, Any], levels: int) -> None:
    """Over a vocabulary of which only a part is looked at first; few levels of logits make long ties."""
    generator = torch.Generator().manual_seed(levels)
    params = SamplingParams(temperature=1.5, **fields)
    for seed in range(12):
        logits = torch.randint(0, levels, (700,), generator=generator) * (4.0 / levels)
        assert one(logits, params, seed=seed) == brute_choice(logits.tolist(), params, seed, 0, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 7, "top_p": 0.9, "min_p": 0.05, "temperature": 1.4},
        {"logit_bias": {"3": 2.0}, "bad_token_ids": [0]},
    ],
)
def test_samples_are_distributed_as_the_exact_probabilities(fields: dict[str, Any]) -> None:
    """Chi-square over 4,000 draws with seeds of their own; fails by chance once in a million."""
    logits = torch.randn(24, generator=torch.Generator().manual_seed(5)) * 1.5
    params = SamplingParams(**{"temperature": 1.0, **fields})
    expected = brute_kept(brute_adjusted(logits.tolist(), params, [], 0, ()), params)
    draws = 4000
    rows = [make_row(params, 24, seed=seed) for seed in range(draws)]
    seen = Counter(run(logits.expand(draws, -1), rows)[0])
    assert set(seen) <= set(expected)
    bins = {token: p * draws for token, p in expected.items() if p * draws >= 5}
    rest = draws - sum(bins.values())
    statistic = sum((seen[token] - mean) ** 2 / mean for token, mean in bins.items())
    if rest > 5:
        statistic += (sum(n for token, n in seen.items() if token not in bins) - rest) ** 2 / rest
    freedom = max(1, len(bins) - (rest <= 5))
    # Wilson-Hilferty bound of the chi-square quantile at 1 - 1e-6 (z = 4.75).
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3


def test_samples_along_positions_and_sample_indices_are_independent() -> None:
    """One seed: the pairs (token at position p, token at p + 1) fill their product distribution."""
    logits = torch.zeros(4)
    params = SamplingParams(temperature=1.0)
    length = 4001
    row = make_row(params, 4, seed=99)
    store = torch.zeros(1, length + 1, dtype=torch.int32)
    requests = [SampleRequest(0, 0, position, row) for position in range(length)]
    tokens = sample(logits[None], requests, store)[0].tolist()
    pairs = Counter(pairwise(tokens))
    mean = (length - 1) / 16
    assert sum((pairs[a, b] - mean) ** 2 / mean for a in range(4) for b in range(4)) < 60
    across = [one(logits, params, seed=99, sample_index=i) for i in range(128)]
    assert min(Counter(across)[t] for t in range(4)) > 10


# ---- C9, greedy


@pytest.mark.parametrize("top_p", [1.0, 0.1])
@pytest.mark.parametrize("top_k", [-1, 0, 1])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_C9_temperature_0_is_argmax_with_ties_to_the_lowest_id(
    top_p: float, top_k: int, min_p: float
) -> None:
    params = SamplingParams(temperature=0, top_p=top_p, top_k=top_k, min_p=min_p, seed=4)
    generator = torch.Generator().manual_seed(2)
    for trial in range(20):
        logits = torch.randint(0, 3, (50257,), generator=generator).float()
        expected = int((logits == 2).nonzero()[0])
        chosen, _ = run(logits.expand(3, -1), [make_row(params, 50257, seed=trial * 7 + i) for i in range(3)])
        assert chosen == [expected] * 3
        penalized = params.replace(logit_bias={"50256": -0.5})
        assert one(logits, penalized) == expected


def test_top_k_1_takes_the_lowest_of_tied_ids_at_any_temperature() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0] * 30)
    for seed in range(20):
        assert one(logits, SamplingParams(temperature=2.0, top_k=1), seed=seed) == 1


# ---- penalties


@pytest.mark.parametrize(
    ("fields", "counts_prompt"),
    [
        ({"repetition_penalty": 2.0}, True),
        ({"presence_penalty": 2.0}, False),
        ({"frequency_penalty": 2.0}, False),
    ],
)
def test_C11_repetition_counts_prompt_and_output_the_others_output_only(
    fields: dict[str, float], counts_prompt: bool
) -> None:
    """ "Paris Paris Paris ..." as prompt and then as output; 9 is the runner-up."""
    logits = torch.zeros(12)
    logits[7], logits[9] = 3.0, 2.5
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    prompt = [7] * 6
    assert one(logits, params, prompt, num_prompt=6) == (9 if counts_prompt else 7)
    assert one(logits, params, [*prompt, 7], num_prompt=6) == 9
    assert one(logits, params, [1, 2, 7], num_prompt=2) == 9


def test_frequency_grows_with_each_occurrence_presence_does_not() -> None:
    logits = torch.zeros(12)
    logits[7], logits[9] = 3.0, 2.0
    for times, expected in ((0, 7), (1, 7), (2, 7), (3, 9)):
        assert one(logits, SamplingParams(frequency_penalty=0.4), [7] * times) == expected
        assert one(logits, SamplingParams(presence_penalty=0.4), [7] * times) == 7


# ---- transformers' logits processors


def processed(scores: torch.Tensor, ids: list[int], *processors: Any) -> torch.Tensor:
    batch = torch.tensor([ids], dtype=torch.long)
    scores = scores[None]
    for processor in processors:
        scores = processor(batch, scores)
    return scores[0]


def kept_by_draws(logits: torch.Tensor, params: SamplingParams, draws: int = 600) -> set[int]:
    rows = [make_row(params, len(logits), seed=seed) for seed in range(draws)]
    return set(run(logits.expand(draws, -1), rows)[0])


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "temperature"),
    [(4, 1.0, 0.0, 3.0), (0, 0.6, 0.0, 2.0), (0, 1.0, 0.2, 2.0), (6, 0.8, 0.1, 3.0), (3, 0.99, 0.0, 0.9)],
)
def test_filters_keep_what_transformers_keeps(
    top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(40, generator=torch.Generator().manual_seed(8))
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    scores = processed(logits, [1], *warpers)
    expected = {int(t) for t in torch.isfinite(scores).nonzero()[:, 0]}
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(brute_kept(logits.tolist(), params)) == expected
    assert kept_by_draws(logits, params) == expected


def test_repetition_penalty_and_bad_words_as_in_transformers() -> None:
    from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(3)
    for _ in range(30):
        logits = torch.randn(30, generator=generator) * 2
        ids = torch.randint(0, 30, (12,), generator=generator).tolist()
        words = [[int(logits.argmax())], [ids[-1], 5], [ids[-2], ids[-1], 6], [29, 28, 7]]
        scores = processed(
            logits,
            ids,
            RepetitionPenaltyLogitsProcessor(1.7),
            NoBadWordsLogitsProcessor(words, eos_token_id=[]),
        )
        params = SamplingParams(repetition_penalty=1.7, bad_word_ids=words)
        row = make_row(params, 30, num_prompt=4)
        adjusted = row.adjust(logits.double(), torch.tensor(ids, dtype=torch.int32))
        torch.testing.assert_close(adjusted, scores.double(), rtol=1e-6, atol=1e-6)
        assert one(logits, params, ids, num_prompt=4) == int(scores.argmax())


# ---- rows by themselves, faults


def mixed_rows(vocab_size: int) -> list[SamplingRow]:
    settings_of_rows: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 50},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 1, "repetition_penalty": 1.2},
        {"temperature": 1.3, "min_p": 0.02, "logit_bias": {"3": 4}},
        {"temperature": 1.0, "top_p": 0.999},
        {"presence_penalty": 1.0, "frequency_penalty": -0.5},
        {"temperature": 5.0, "top_k": 700, "top_p": 0.95},
        {"allowed_token_ids": [5, 6], "temperature": 1.0},
        {"bad_token_ids": [1], "min_tokens": 100, "temperature": 2.0},
    ]
    return [
        make_row(SamplingParams(**fields), vocab_size, seed=i, num_prompt=2, stop_ids=(0,))
        for i, fields in enumerate(settings_of_rows * 3)
    ]


def test_a_row_samples_the_same_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(11)
    rows = mixed_rows(5003)
    logits = torch.randn(len(rows), 5003, generator=generator) * 3
    tokens = [torch.randint(0, 5003, (5 + i,), generator=generator).tolist() for i in range(len(rows))]
    together, _ = run(logits, rows, tokens)
    assert len(set(together)) > len(rows) // 2
    for i, row in enumerate(rows):
        assert run(logits[i : i + 1], [row], [tokens[i]])[0] == [together[i]]
    backwards, _ = run(logits.flip(0), rows[::-1], tokens[::-1])
    assert backwards[::-1] == together
    some = list(range(0, len(rows), 3))
    assert run(logits[some], [rows[i] for i in some], [tokens[i] for i in some])[0] == [
        together[i] for i in some
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = torch.randn(33, 100, generator=torch.Generator().manual_seed(1))
    rows = mixed_rows(100)
    expected, _ = run(logits, rows)
    spoiled = logits.clone()
    spoiled[4, 50] = spoiled[0, 0] = spoiled[13] = bad
    tokens, faults = run(spoiled, rows)
    for i in range(33):
        assert faults[i] == (Fault.NOT_FINITE if i in (0, 4, 13) else Fault.NONE)
        assert tokens[i] == expected[i] or i in (0, 4, 13)
        assert 0 <= tokens[i] < 100


def test_all_minus_infinity_logits_are_a_fault_of_the_model() -> None:
    assert run(torch.full((1, 8), MINUS_INFINITY), [make_row(SamplingParams(), 8)])[1] == [Fault.NOT_FINITE]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidding_everything_fails_that_row_only(temperature: float) -> None:
    forbid = make_row(SamplingParams(temperature=temperature, bad_token_ids=list(range(8))), 8)
    waits = make_row(
        SamplingParams(temperature=temperature, allowed_token_ids=[2], min_tokens=1), 8, stop_ids=(2,)
    )
    other = make_row(SamplingParams(bad_token_ids=[7]), 8)
    tokens, faults = run(torch.arange(8.0).expand(3, -1), [forbid, other, waits])
    assert faults == [Fault.NOTHING_LEFT, Fault.NONE, Fault.NOTHING_LEFT]
    assert tokens[1] == 6
    assert "forbid" in Fault(faults[0]).message()


def test_ids_beyond_the_head_change_nothing() -> None:
    params = SamplingParams(
        logit_bias={"100": 50}, bad_token_ids=[100, 7], bad_word_ids=[[1, 100]], allowed_token_ids=[100, 7, 6]
    )
    assert one(torch.arange(8.0), params, [1]) == 6


def test_min_tokens_masks_stop_tokens_until_then() -> None:
    logits = torch.tensor([0.0, 5.0, 1.0])
    params = SamplingParams(min_tokens=2, max_tokens=9)
    assert one(logits, params, [0, 0], num_prompt=2, stop_ids=(1,)) == 2
    assert one(logits, params, [0, 0, 2], num_prompt=2, stop_ids=(1,)) == 2
    assert one(logits, params, [0, 0, 2, 2], num_prompt=2, stop_ids=(1,)) == 1


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-5])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature: float) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(4)) * 10
    for fields in ({}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        assert one(logits, SamplingParams(temperature=temperature, **fields)) == int(logits.argmax())


# ---- log-probabilities


@given(
    st.lists(st.sampled_from([-2.0, 0.0, 0.5, 0.5, 3.25]), min_size=3, max_size=120),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2)), min_size=1, max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_logprobs_equal_brute_force(values: list[float], asked: list[tuple[int, int]]) -> None:
    norm = math.log(math.fsum(math.exp(value) for value in values))
    order = sorted(range(len(values)), key=lambda t: (-values[t], t))
    logits = torch.tensor([values])
    tokens = torch.tensor([token for _, token in asked])
    results = logprobs(logits, [LogprobRequest(0, num_top) for num_top, _ in asked], tokens).read()
    for (num_top, token), result in zip(asked, results, strict=True):
        assert result.token == token
        assert result.logprob == pytest.approx(values[token] - norm, abs=1e-12)
        assert result.rank == order.index(token) + 1
        assert [t for t, _ in result.top] == order[:num_top]
        for top_token, value in result.top:
            assert value == pytest.approx(values[top_token] - norm, abs=1e-12)


@pytest.mark.parametrize("levels", [1, 2, 30, 1000])
def test_alternatives_among_ties_are_the_lowest_ids(levels: int) -> None:
    logits = torch.randint(0, levels, (1, 500), generator=torch.Generator().manual_seed(levels)).float()
    values = logits[0].tolist()
    order = sorted(range(500), key=lambda t: (-values[t], t))
    (result,) = logprobs(logits, [LogprobRequest(0, 20)], torch.tensor([order[7]])).read()
    assert [token for token, _ in result.top] == order[:20]
    assert result.rank == 8


def test_logprobs_are_the_same_in_any_batch() -> None:
    logits = torch.randn(40, 2003, generator=torch.Generator().manual_seed(6)) * 5
    tokens = logits.argmax(dim=1)
    requests = [LogprobRequest(i, i % 21) for i in range(40)]
    together = logprobs(logits, requests, tokens).read()
    for i, request in enumerate(requests):
        assert logprobs(logits, [request], tokens[i : i + 1]).read() == [together[i]]
        assert together[i].rank == 1
