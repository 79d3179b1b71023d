"""The native sampler against brute force in Python floats, and row by row against itself in other batches."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_kernels.native import Runtime, SampleOutput, available_isas

from pagedcli.core.plan import Admission, TokenLogprob
from pagedcli.core.sampling import SamplingParams
from pagedcli.runtime.faults import Fault
from pagedcli.runtime.native_rows import SlotSampling, make_slot_sampling
from tests.cpu.sampler_helpers import MINUS_INFINITY, brute_adjusted, brute_choice
from tests.cpu.test_sampler import sampling_cases

RUNTIMES = [Runtime(threads, isa=isa) for isa in available_isas() for threads in (1, 2)]


def make(
    params: SamplingParams, vocab_size: int, tokens: list[int], *, num_prompt: int = 0, seed: int = 0,
    sample_index: int = 0, stop_ids: tuple[int, ...] = (), logit_row: int = 0,
) -> SlotSampling:  # fmt: skip
    admission = Admission((), (), num_prompt, sample_index, seed, params, stop_ids)
    store = np.array([*tokens, 0, 0], np.int32)
    made = make_slot_sampling(admission, vocab_size)
    made.row["tokens"], made.row["position"], made.row["logit_row"] = (
        store.ctypes.data,
        len(tokens),
        logit_row,
    )
    return dataclasses.replace(made, kept=(store, *made.kept))


def read_logprobs(tokens: np.ndarray, num_top: np.ndarray, out: SampleOutput) -> list[TokenLogprob | None]:
    """As plain values, one for each token; None where `num_top` is negative."""
    count = len(tokens)
    columns = (tokens, num_top, out.logprobs[:count], out.ranks[:count], out.top_ids[:count], out.top[:count])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        None
        if top < 0
        else TokenLogprob(token, value, rank, tuple(zip(ids[:top], values[:top], strict=True)))
        for token, top, value, rank, ids, values in rows
    ]


def run(
    logits: np.ndarray, rows: list[SlotSampling], runtime: Runtime = RUNTIMES[0]
) -> tuple[list[int], list[int], list[TokenLogprob | None]]:
    """Tokens, faults and log-probabilities; row i of the logits for row i unless it says otherwise."""
    joined = np.concatenate([row.row for row in rows])
    out = SampleOutput(len(rows), min(20, logits.shape[1]))
    runtime.sample(np.ascontiguousarray(logits, np.float32), joined, out)
    return out.tokens.tolist(), out.faults.tolist(), read_logprobs(out.tokens, joined["num_top"], out)


@given(st.lists(sampling_cases(), min_size=1, max_size=3), st.integers(-(2**63), 2**64 - 1))
@settings(max_examples=200, deadline=None)
def test_a_choice_is_what_brute_force_chooses(cases: list[Any], seed: int) -> None:
    for at, (logits, params, tokens, num_prompt, stop_ids) in enumerate(cases):
        narrow = np.array(logits, np.float32)
        adjusted = brute_adjusted(narrow.tolist(), params, tokens, num_prompt, stop_ids)
        rows = [
            make(params, len(logits), tokens, num_prompt=num_prompt, seed=seed, sample_index=3,
                 stop_ids=stop_ids, logit_row=row)
            for row in range(2)
        ]  # fmt: skip
        runtime = RUNTIMES[(seed + at) % len(RUNTIMES)]
        chosen, faults, _ = run(np.stack([narrow, narrow]), rows, runtime)
        if max(adjusted) == MINUS_INFINITY:
            assert faults == [Fault.NOTHING_LEFT] * 2
            continue
        signed = (seed + 2**63) % 2**64 - 2**63
        assert faults == [Fault.NONE] * 2
        assert chosen == [brute_choice(adjusted, params, signed, len(tokens), 3)] * 2


def mixed(vocab_size: int) -> list[SlotSampling]:
    fields: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 50, "logprobs": 3},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 1, "repetition_penalty": 1.2},
        {"temperature": 1.3, "min_p": 0.02, "logit_bias": {"3": 4}, "logprobs": 0},
        {"temperature": 1.0, "top_p": 0.999},
        {"presence_penalty": 1.0, "frequency_penalty": -0.5},
        {"temperature": 5.0, "top_k": 700, "top_p": 0.95, "logprobs": 20},
        {"allowed_token_ids": [5, 6], "temperature": 1.0},
        {"bad_token_ids": [1], "min_tokens": 100, "temperature": 2.0},
        {"temperature": 1.0, "bad_word_ids": [[2, 3], [4, 5, 6]]},
    ] * 3
    draw = np.random.default_rng(3)
    return [
        make(
            SamplingParams(**some), vocab_size, draw.integers(0, vocab_size, 5 + i).tolist(), seed=i, num_prompt=2,
            stop_ids=(0,), logit_row=i,
        )
        for i, some in enumerate(fields)
    ]  # fmt: skip


def test_a_row_samples_the_same_in_any_batch_on_any_threads_of_any_variant() -> None:
    rows = mixed(5003)
    logits = (np.random.default_rng(11).standard_normal((len(rows), 5003)) * 3).astype(np.float32)
    tokens, faults, logprobs = run(logits, rows)
    assert not any(faults)
    assert len(set(tokens)) > len(rows) // 2
    for runtime in RUNTIMES:
        assert run(logits, rows[::-1], runtime)[0] == tokens[::-1]
        some = rows[::3]
        assert run(logits, some, runtime)[2] == logprobs[::3]
        for i, row in enumerate(rows):
            assert run(logits, [row], runtime)[0] == [tokens[i]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    rows = mixed(500)
    logits = np.random.default_rng(1).standard_normal((len(rows), 500)).astype(np.float32)
    expected = run(logits, rows)[0]
    spoiled = logits.copy()
    spoiled[4, 50] = spoiled[0, 0] = spoiled[13] = bad
    for runtime in RUNTIMES:
        tokens, faults, _ = run(spoiled, rows, runtime)
        for i in range(len(rows)):
            assert faults[i] == (Fault.NOT_FINITE if i in (0, 4, 13) else Fault.NONE)
            assert tokens[i] == (0 if i in (0, 4, 13) else expected[i])


def test_all_minus_infinity_is_a_fault_of_the_model_and_forbidding_all_one_of_the_request() -> None:
    nothing = np.full((1, 8), MINUS_INFINITY, np.float32)
    assert run(nothing, [make(SamplingParams(), 8, [])])[1] == [Fault.NOT_FINITE]
    logits = np.arange(8, dtype=np.float32)[None]
    for temperature in (0.0, 1.0):
        forbids = SamplingParams(temperature=temperature, bad_token_ids=list(range(8)))
        waits = SamplingParams(temperature=temperature, allowed_token_ids=[2], min_tokens=1)
        beyond = SamplingParams(temperature=temperature, allowed_token_ids=[100])
        for row in (make(forbids, 8, []), make(waits, 8, [], stop_ids=(2,)), make(beyond, 8, [])):
            assert run(logits, [row])[1] == [Fault.NOTHING_LEFT]


def test_logprobs_equal_brute_force() -> None:
    """Of sampled and of given tokens, with ties (lowest id first)."""
    draw = np.random.default_rng(2)
    logits = draw.choice(np.array([-2.0, 0.0, 0.5, 0.5, 3.25], np.float32), (30, 73))
    tokens, num_top = draw.integers(0, 73, 30), draw.integers(0, 21, 30)
    for runtime in RUNTIMES:
        out = SampleOutput(30, 20)
        runtime.logprobs(logits, np.arange(30), tokens, num_top, out)
        for row, item in enumerate(read_logprobs(tokens, num_top, out)):
            assert item is not None
            values = logits[row].astype(np.float64)
            values -= values.max() + math.log(np.exp(values - values.max()).sum())
            order = sorted(range(73), key=lambda t: (-values[t], t))
            assert (item.token, item.rank) == (tokens[row], order.index(tokens[row]) + 1)
            assert [t for t, _ in item.top] == order[: num_top[row]]
            assert [item.logprob, *(v for _, v in item.top)] == pytest.approx(
                [values[tokens[row]], *values[order[: num_top[row]]]]
            )


def test_nan_logits_give_nan_logprobs() -> None:
    logits = np.zeros((2, 16), np.float32)
    logits[1, 3] = math.nan
    out = SampleOutput(2, 4)
    RUNTIMES[0].logprobs(logits, np.arange(2), np.array([1, 1]), np.array([2, 2]), out)
    assert out.logprobs[0] == pytest.approx(-math.log(16))
    assert math.isnan(out.logprobs[1])
