"""The sampler's CUDA kernels, emulated, against the plain rule in numpy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from paged_kernels import cuda_abi
from sampling_rule import Array, choose, noise
from sampling_support import Changes, logprobs, make_rows, sampled

NOT_FINITE, NOTHING_LEFT = 1, 2
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"top_k": 300, "top_p": 0.99},
    {"top_k": 700},
    {"top_k": 900, "top_p": 0.5, "min_p": 0.01},
]


def chosen(logits: Array, rows: Array) -> list[int]:
    return [choose(line, row) for line, row in zip(logits, rows, strict=True)]


@pytest.mark.parametrize("size", [1, 3, 64, 1023, 5003])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_choices_equal_the_plain_rule(emulated: ctypes.CDLL, size: int, filters: dict[str, Any]) -> None:
    generator = np.random.default_rng(size)
    count = 6
    scales = np.array([0.02, 3.0] * 3)[:, None]
    logits = (generator.standard_normal((count, size)) * scales).astype(np.float32)
    rows = make_rows(
        count,
        temperature=generator.uniform(0.3, 2.0, count),
        seed=generator.integers(0, 2**63, count).astype(np.uint64) * 2 + 1,
        position=generator.integers(0, 10**6, count),
        sample_index=generator.integers(0, 128, count),
        **filters,
    )
    assert sampled(emulated, logits, rows) == (chosen(logits, rows), [0] * count)


@pytest.mark.parametrize(
    "filters", [{"top_k": 5}, {"top_k": 900}, {"top_k": 40, "top_p": 0.4}, {"top_p": 0.3}]
)
def test_ties_are_cut_by_id(emulated: ctypes.CDLL, filters: dict[str, Any]) -> None:
    """More tokens tie than a list holds; whole numbers; and logits near each other beside a far greater one."""
    logits = np.zeros((12, 3001), np.float32)
    logits[4:8] = np.random.default_rng(1).integers(-2, 3, (4, 3001))
    logits[8:] = np.linspace(0, 1e-18, 3001)
    logits[8:, 2000] = 3.0
    rows = make_rows(12, temperature=3.0, seed=np.arange(12), **filters)
    assert sampled(emulated, logits, rows)[0] == chosen(logits, rows)


def test_a_race_that_only_double_decides(emulated: ctypes.CDLL) -> None:
    """Logits that undo the noise: all scores are equal but for the rounding of the logits."""
    size = 2500
    rows = make_rows(8, temperature=1.0, seed=np.arange(8), top_p=[1.0, 0.7] * 4)
    logits = np.stack([-noise(size, row, 0, 0) for row in range(8)]).astype(np.float32)
    assert sampled(emulated, logits, rows)[0] == chosen(logits, rows)


def test_sums_that_only_double_decides(emulated: ctypes.CDLL) -> None:
    """Of 64 equal weights top_p keeps 32, or, a part in 10^9 over a half, 33."""
    seeds = [seed for seed in range(220) if noise(64, seed, 0, 0)[:33].argmax() == 32][:10]
    rows = make_rows(20, temperature=1.0, seed=seeds * 2, top_p=np.repeat([0.5 - 1e-9, 0.5 + 1e-9], 10))
    logits = np.zeros((20, 64), np.float32)
    tokens = sampled(emulated, logits, rows)[0]
    assert tokens == chosen(logits, rows)
    assert tokens[10:] == [32] * 10
    assert 32 not in tokens[:10]


def test_greedy_takes_the_first_of_the_greatest(emulated: ctypes.CDLL) -> None:
    for size in (1, 5, 2048, 2051):
        logits = np.random.default_rng(size).integers(-3, 3, (20, size)).astype(np.float32)
        assert sampled(emulated, logits, make_rows(20))[0] == logits.argmax(1).tolist()


@pytest.mark.parametrize("size", [49_152, 120_000, 128_256, 151_936, 200_000])
def test_vocabularies_of_models(emulated: ctypes.CDLL, size: int) -> None:
    """The larger, the more shared memory: from some size on it has to be asked for."""
    logits = (np.random.default_rng(size).standard_normal((1, size)) * 3).astype(np.float32)
    rows = make_rows(1, temperature=1.0, seed=5)
    assert sampled(emulated, logits, rows) == (chosen(logits, rows), [0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, "all -inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_told(emulated: ctypes.CDLL, bad: Any, temperature: float) -> None:
    logits = np.zeros((3, 2070), np.float32)
    if bad == "all -inf":
        logits[1] = -np.inf
    else:
        logits[1, 2069] = bad
    logits[2, :2069] = -np.inf
    tokens, faults = sampled(emulated, logits, make_rows(3, temperature=temperature))
    assert faults == [0, NOT_FINITE, 0]
    assert tokens[1:] == [0, 2069]


CHANGES = [
    Changes([3, 3, 7, 9, 3, 9, 11], 2, (1.7, 0.3, 0.2), {7: 2.5, 12: -1.0}),
    Changes([3, 3, 7, 9, 3, 9, 11], 7, (1.7, 0.3, 0.2)),
    Changes([3, 3, 7, 9], 2, (1.0, 0.0, -0.7), early=[20, 21], min_tokens=3),
    Changes([3, 3, 7, 9], 1, early=[20, 21], min_tokens=3),
    Changes([4, 9, 11], 3, words=[([11], 1), ([9, 11], 2), ([4, 11], 3), ([1, 4, 9, 11], 4)]),
    Changes(forbidden=list(range(0, 2000, 3)), bias={1: 9.0, 3: 9.0, 1999: -4.0}),
    Changes(list(range(2000)), 1000, (0.3, 2.0, 2.0), {5: 100.0}, forbidden=[5, 6]),
    Changes([1999] * 3000, 0, (1.1, 0.0, 0.001)),
]


WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 30},
    {"temperature": 2.0, "top_k": 800, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.6},
]


@pytest.mark.parametrize("filters", WAYS, ids=str)
def test_changes_in_their_order(emulated: ctypes.CDLL, filters: dict[str, Any]) -> None:
    size, count = 2000, 3 * len(CHANGES)
    logits = np.random.default_rng(5).standard_normal((count, size)).astype(np.float32)
    rows, kept = make_rows(count, seed=np.arange(count), **filters), []
    for at in range(count):
        CHANGES[at % len(CHANGES)].fill(rows, at, size, kept)
    adjusted = [CHANGES[at % len(CHANGES)].apply(logits[at]) for at in range(count)]
    want = [
        choose(line, row) if row["temperature"] else int(line.argmax())
        for line, row in zip(adjusted, rows, strict=True)
    ]
    assert sampled(emulated, logits, rows) == (want, [0] * count)


def test_nothing_left_is_told(emulated: ctypes.CDLL) -> None:
    rows, kept = make_rows(2, temperature=1.0), []
    for at, last in enumerate((40, 39)):
        Changes(forbidden=list(range(last))).fill(rows, at, 40, kept)
    assert sampled(emulated, np.zeros((2, 40), np.float32), rows) == ([0, 39], [NOTHING_LEFT, 0])


def test_ids_beyond_the_vocabulary_are_ignored(emulated: ctypes.CDLL) -> None:
    rows, kept = make_rows(1), []
    outside = [30, 41, 2**31 - 1]
    Changes(outside, 0, (2.0, 2.0, 2.0), dict.fromkeys(outside, -50.0), outside, outside, [([], 41)], 9).fill(
        rows, 0, 40, kept
    )
    logits = np.zeros((1, 40), np.float32)
    logits[0, 30] = 100.0
    assert sampled(emulated, logits, rows) == ([0], [0])


@pytest.mark.parametrize("size", [1, 5, 300, 5003])
@pytest.mark.parametrize("decimals", [0, 1, 7])
def test_log_probabilities_ranks_and_alternatives(emulated: ctypes.CDLL, size: int, decimals: int) -> None:
    """With few ties, with many, and, of 5,003 whole numbers, with more than a list holds."""
    generator = np.random.default_rng(2)
    logits = np.round(generator.standard_normal((6, size)) * 4, decimals).astype(np.float32)
    logits[5] = np.minimum(logits[5], 0.0)
    tokens, num_top = generator.integers(0, size, 6), np.array([0, 1, 5, 20, 20, 20])
    found = logprobs(emulated, logits, tokens, num_top)
    wide = logits.astype(np.float64)
    best = wide.max(1, keepdims=True)
    want = wide - best - np.log(np.exp(wide - best).sum(1, keepdims=True))
    for row, token in enumerate(tokens):
        order, count = np.lexsort((np.arange(size), -wide[row])), min(num_top[row], size)
        assert found.logprobs[row] == pytest.approx(want[row, token], abs=1e-6)
        assert found.ranks[row] == order.tolist().index(token) + 1
        assert found.ids[row, :count].tolist() == order[:count].tolist()
        np.testing.assert_allclose(found.top[row, :count], want[row, order[:count]], rtol=0, atol=1e-6)
        assert (found.ids[row, count:] == -9).all()


def test_log_probabilities_of_what_is_no_number_are_none(emulated: ctypes.CDLL) -> None:
    logits = np.zeros((3, 40), np.float32)
    logits[0, 3], logits[1, 3], logits[2] = np.nan, np.inf, -np.inf
    found = logprobs(emulated, logits, np.arange(3), np.full(3, 2))
    assert np.isnan(found.logprobs).all()
    assert np.isnan(found.top[:, :2]).all()


def test_a_row_is_sampled_alike_alone_and_among_others(emulated: ctypes.CDLL) -> None:
    """Alone it lies at another address too, where its logits are not aligned."""
    logits = (np.random.default_rng(3).standard_normal((9, 1001)) * 2).astype(np.float32)
    rows = make_rows(
        9,
        temperature=1.0,
        top_p=[1.0, 0.9, 0.5] * 3,
        top_k=[0, 0, 0, 7, 7, 7, 600, 600, 600],
        seed=np.arange(9),
    )
    together, _ = sampled(emulated, logits, rows)
    several = logprobs(emulated, logits, np.array(together), np.full(9, 3))
    for row in range(9):
        line, one = logits[row : row + 1].copy(), rows[row : row + 1].copy()
        one["logit_row"] = 0
        assert sampled(emulated, line, one)[0] == [together[row]]
        single = logprobs(emulated, line, np.array([together[row]]), np.array([3]))
        assert single.logprobs[0] == several.logprobs[row]
        assert single.top[0].tolist() == several.top[row].tolist()


def test_what_no_kernel_takes_is_refused(emulated: ctypes.CDLL) -> None:
    most = emulated.paged_cuda_sample_max_vocabulary()
    assert emulated.paged_cuda_sample_room() == 24
    sample = cuda_abi.PagedSample(None, None, None, None, 0, 1, most + 1)
    assert emulated.paged_cuda_sample(sample, None) == cuda_abi.NO_KERNEL
    wanted = cuda_abi.PagedLogprobs(*[None] * 8, 0, 1, 10, 33)
    assert emulated.paged_cuda_logprobs(wanted, None) == cuda_abi.NO_KERNEL


def test_the_largest_vocabulary(emulated: ctypes.CDLL) -> None:
    """All ways of choosing, with changes."""
    size = emulated.paged_cuda_sample_max_vocabulary()
    logits = (np.random.default_rng(9).standard_normal((4, size)) * 2).astype(np.float32)
    rows, kept = make_rows(4, temperature=1.0, top_k=[0, 0, 40, 0], top_p=[1.0, 0.8, 0.9, 1.0]), []
    changes = Changes(list(range(0, size, 1000)), 5, (1.3, 0.1, 0.2), {size - 1: 3.0}, [size - 2])
    for at in range(4):
        changes.fill(rows, at, size, kept)
    rows["temperature"][3] = 0.0
    adjusted = [changes.apply(line) for line in logits]
    want = [
        *(choose(line, row) for line, row in zip(adjusted[:3], rows[:3], strict=True)),
        adjusted[3].argmax(),
    ]
    assert sampled(emulated, logits, rows)[0] == want
