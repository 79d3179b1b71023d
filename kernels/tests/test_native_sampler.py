"""The native sampler where it differs from the plain one in method: pruned noise, fronts of rankings, greedy search.

The reference is numpy written down plainly; that the engine's torch sampler agrees is tested in tests/cpu.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from native_support import Array, isas, runtime
from paged_kernels.native import FAULT_NOT_FINITE, FAULT_NOTHING_LEFT, SAMPLE_ROW, NativeError, SampleOutput
from sampling_rule import choose


def make_rows(count: int, **fields: Any) -> Array:
    """Rows that sample one row of logits each, greedy but for the fields."""
    rows = np.zeros(count, SAMPLE_ROW)
    rows["logit_row"] = np.arange(count)
    rows["top_p"], rows["repetition_penalty"], rows["num_allowed"], rows["num_top"] = 1.0, 1.0, -1, -1
    for name, value in fields.items():
        rows[name] = value
    return rows


def sampled(isa: str, logits: Array, rows: Array, max_top: int = 1, threads: int = 2) -> SampleOutput:
    out = SampleOutput(len(rows), max_top)
    runtime(isa, threads).sample(logits, rows, out)
    return out


@isas
@pytest.mark.parametrize("size", [1, 3, 17, 63, 64, 65, 257, 5000])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 300, "top_p": 0.99},
        {"top_p": 0.9999},
        {"top_p": 1e-9},
    ],
)
@pytest.mark.parametrize("scale", [0.02, 3.0])
def test_choices_equal_the_plain_rule(isa: str, size: int, filters: dict[str, Any], scale: float) -> None:
    generator = np.random.default_rng(size)
    count = 6
    logits = (generator.standard_normal((count, size)) * scale).astype(np.float32)
    rows = make_rows(
        count,
        temperature=generator.uniform(0.3, 2.0, count),
        seed=generator.integers(0, 2**63, count).astype(np.uint64) * 2 + 1,
        position=generator.integers(0, 10**6, count),
        sample_index=generator.integers(0, 128, count),
        **filters,
    )
    out = sampled(isa, logits, rows)
    assert out.tokens.tolist() == [choose(line, row) for line, row in zip(logits, rows, strict=True)]
    assert not out.faults.any()


@isas
def test_many_draws_of_flat_and_peaked_logits_equal_the_plain_rule(isa: str) -> None:
    """Gumbel-max over all tokens skips most noise: a bound too tight would show as another token here."""
    logits = np.zeros((40, 999), np.float32)
    logits[10:20, 5] = 4.0
    logits[20:30] = np.linspace(-30.0, 0.0, 999)
    logits[30:] = -np.inf
    logits[30:, [3, 700, 998]] = (1.0, 0.5, 1.0)
    rows = make_rows(40, temperature=1.0, seed=np.arange(40), position=np.arange(40))
    out = sampled(isa, logits, rows)
    assert out.tokens.tolist() == [choose(line, row) for line, row in zip(logits, rows, strict=True)]


@isas
def test_frequencies_follow_the_distribution(isa: str) -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    rows = make_rows(8000, logit_row=0, temperature=1.0, seed=3, position=np.arange(8000))
    counts = np.bincount(sampled(isa, logits, rows).tokens, minlength=4) / 8000
    np.testing.assert_allclose(counts, [0.5, 0.25, 0.125, 0.125], atol=0.02)


@isas
@pytest.mark.parametrize("size", [1, 15, 16, 63, 64, 129, 1000])
def test_greedy_takes_the_first_of_the_greatest(isa: str, size: int) -> None:
    generator = np.random.default_rng(0)
    logits = generator.integers(-3, 3, (50, size)).astype(np.float32)
    logits[0] = -5.0
    assert sampled(isa, logits, make_rows(50)).tokens.tolist() == logits.argmax(1).tolist()


@isas
@pytest.mark.parametrize("bad", [np.nan, np.inf, "all -inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_told(isa: str, bad: Any, temperature: float) -> None:
    logits = np.zeros((3, 70), np.float32)
    if bad == "all -inf":
        logits[1] = -np.inf
    else:
        logits[1, 69] = bad
    logits[2, :69] = -np.inf
    out = sampled(isa, logits, make_rows(3, temperature=temperature))
    assert out.faults.tolist() == [0, FAULT_NOT_FINITE, 0]
    assert out.tokens[2] == 69


@isas
def test_adjustments_in_their_order(isa: str) -> None:
    generator = np.random.default_rng(1)
    size = 40
    logits = np.repeat(generator.standard_normal((1, size)).astype(np.float32), 6, 0)
    tokens = np.array([3, 3, 7, 9, 3, 9, 11], np.int32)
    ids, bias = np.array([7, 12, 99], np.int32), np.array([2.5, -1.0, 50.0])
    banned, stops, allowed = (np.array(x, np.int32) for x in ([5, 99], [20, 21], [7, 20, 30]))
    heads, last = np.array([[-1, 11], [9, 11], [4, 11]], np.int32), np.array([1, 2, 3], np.int32)
    rows = make_rows(
        6, tokens=tokens.ctypes.data, position=7, num_prompt=2, repetition_penalty=1.7, presence_penalty=0.3,
        frequency_penalty=0.2, bias_ids=ids.ctypes.data, bias=bias.ctypes.data, num_bias=3,
        banned=banned.ctypes.data, num_banned=2, stop_ids=stops.ctypes.data, num_stop_ids=2, min_tokens=6,
        bad_heads=heads.ctypes.data, bad_last=last.ctypes.data, num_bad=3, bad_length=2, temperature=0.7,
        seed=np.arange(6),
    )  # fmt: skip
    rows["min_tokens"][3:] = 5  # five output tokens exist: stop tokens are free again
    rows["allowed"][5], rows["num_allowed"][5] = allowed.ctypes.data, 3
    want = []
    for index, row in enumerate(rows):
        wide = logits[index].astype(np.float64)
        for token in set(tokens.tolist()):
            wide[token] = wide[token] / 1.7 if wide[token] > 0 else wide[token] * 1.7
        for token, count in {7: 1, 9: 2, 3: 1, 11: 1}.items():
            wide[token] = wide[token] - count * 0.2 - 0.3
        wide[7] += 2.5
        wide[12] -= 1.0
        forbidden = [5, 1, 2] + ([20, 21] if index < 3 else [])
        if index == 5:
            forbidden += [token for token in range(size) if token not in (7, 20, 30)]
        wide[forbidden] = -np.inf
        want.append(choose(wide, row))
    assert sampled(isa, logits, rows).tokens.tolist() == want


@isas
def test_nothing_left_is_told(isa: str) -> None:
    banned = np.arange(20, dtype=np.int32)
    rows = make_rows(2, banned=banned.ctypes.data, num_banned=20)
    rows["num_banned"][1] = 19
    out = sampled(isa, np.zeros((2, 20), np.float32), rows)
    assert out.faults.tolist() == [FAULT_NOTHING_LEFT, 0]
    assert out.tokens.tolist() == [0, 19]


@isas
@pytest.mark.parametrize("size", [5, 64, 300, 5000])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_log_probabilities_ranks_and_alternatives(isa: str, size: int, num_top: int) -> None:
    generator = np.random.default_rng(2)
    logits = np.round(generator.standard_normal((8, size)) * 4, 1).astype(np.float32)  # with ties
    rows = make_rows(8, num_top=num_top, temperature=[0, 1] * 4, seed=np.arange(8))
    out = sampled(isa, logits, rows, max_top=20)
    again = SampleOutput(8, 20)
    runtime(isa).logprobs(logits, np.arange(8), out.tokens, np.full(8, num_top), again)
    wide = logits.astype(np.float64)
    best = wide.max(1, keepdims=True)
    want = wide - best - np.log(np.exp(wide - best).sum(1, keepdims=True))
    count = min(num_top, size)
    for row, token in enumerate(out.tokens):
        order = np.lexsort((np.arange(size), -wide[row]))
        for result in (out, again):
            np.testing.assert_allclose(result.logprobs[row], want[row, token], rtol=1e-13, atol=1e-14)
            assert result.ranks[row] == order.tolist().index(token) + 1
            assert result.top_ids[row, :count].tolist() == order[:count].tolist()
            np.testing.assert_allclose(
                result.top[row, :count], want[row, order[:count]], rtol=1e-13, atol=1e-14
            )


@isas
def test_a_row_is_sampled_alike_alone_and_among_others(isa: str) -> None:
    generator = np.random.default_rng(3)
    logits = (generator.standard_normal((30, 1000)) * 2).astype(np.float32)
    rows = make_rows(
        30, temperature=1.0, top_p=[1.0, 0.9, 0.5] * 10, top_k=[0, 0, 7] * 10, seed=np.arange(30), num_top=3
    )
    whole = sampled(isa, logits, rows, max_top=3)
    for row in range(30):
        one = sampled(isa, logits, rows[row : row + 1].copy(), max_top=3, threads=1)
        assert one.tokens[0] == whole.tokens[row]
        assert one.logprobs[0] == whole.logprobs[row]
        assert one.top[0].tolist() == whole.top[row].tolist()


def test_what_does_not_fit_is_refused() -> None:
    logits = np.zeros((2, 10), np.float32)
    with pytest.raises(NativeError, match="row 2 of 2 rows"):
        sampled("portable", logits, make_rows(1, logit_row=2))
    with pytest.raises(NativeError, match="5 alternatives, the output holds 1"):
        sampled("portable", logits, make_rows(1, num_top=5))
    with pytest.raises(NativeError, match="tokens has 1 elements, at least 3"):
        runtime("portable").sample(logits, make_rows(3, logit_row=0), SampleOutput(1, 1))
