"""The numbers under the sampler: Philox against published vectors, noise, sums, ranks; each row by itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_kernels.sampling import (
    NOISE_HIGH,
    NOISE_LOW,
    gumbel_noise,
    log_normalizer,
    philox,
    ranked,
    running_sum,
    tree_sum,
    vocabulary_noise,
)

# kat_vectors of Random123: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def python_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """From the paper, in Python's unbounded integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(c0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(c2 * 0xCD9E8D57, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def words(values: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert python_philox(counter, key) == expected
    assert tuple(int(word) for word in philox(words(counter), words(key))) == expected


@given(st.tuples(*[st.integers(0, 2**32 - 1)] * 4), st.tuples(*[st.integers(0, 2**32 - 1)] * 2))
@settings(max_examples=100, deadline=None)
def test_philox_equals_the_paper_in_python_integers(counter: tuple[int, ...], key: tuple[int, ...]) -> None:
    assert tuple(int(word) for word in philox(words(counter), words(key))) == python_philox(counter, key)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345678])
def test_noise_is_keyed_as_the_contract_says(seed: int) -> None:
    position, sample_index = 77, 5
    noise = gumbel_noise(
        torch.arange(11)[None], torch.tensor([seed]), torch.tensor([position]), torch.tensor([sample_index])
    )
    bits = seed % 2**64
    for token in range(11):
        word = python_philox((token >> 2, position, sample_index, 0), (bits % 2**32, bits >> 32))[token & 3]
        v = (word + 0.5) / 2**32
        assert noise[0, token].item() == pytest.approx(-math.log(-math.log1p(-v)), rel=1e-14, abs=1e-14)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 320, 1023])
def test_noise_of_a_vocabulary_is_that_of_its_tokens(vocab_size: int) -> None:
    seeds, positions, samples = torch.tensor([3, -9]), torch.tensor([0, 2**31]), torch.tensor([0, 127])
    whole = vocabulary_noise(vocab_size, seeds, positions, samples)
    single = gumbel_noise(torch.arange(vocab_size)[None].expand(2, -1), seeds, positions, samples)
    assert torch.equal(whole, single)
    assert whole.dtype == torch.float64


def test_noise_differs_by_seed_position_sample_and_token() -> None:
    columns = torch.arange(64)[None]
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32, 0, 0)]
    rows = [gumbel_noise(columns, *(torch.tensor([part]) for part in key)) for key in keys]
    values = torch.cat(rows).flatten()
    assert len(set(values.tolist())) == len(values)


def test_noise_is_standard_gumbel() -> None:
    noise = vocabulary_noise(200_000, torch.tensor([42]), torch.tensor([7]), torch.tensor([0]))[0].numpy()
    assert noise.min() >= NOISE_LOW
    assert noise.max() <= NOISE_HIGH
    assert abs(noise.mean() - 0.5772156649) < 5 * 1.2825 / math.sqrt(len(noise))
    # Kolmogorov-Smirnov at a level of 1 in a million.
    cumulative = np.exp(-np.exp(-np.sort(noise)))
    distance = np.abs(cumulative - (np.arange(len(noise)) + 0.5) / len(noise)).max()
    assert distance < math.sqrt(math.log(2 / 1e-6) / 2 / len(noise))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=70))
@settings(max_examples=100, deadline=None)
def test_sums(values: list[float]) -> None:
    row = torch.tensor([values], dtype=torch.float64)
    assert tree_sum(row).item() == pytest.approx(math.fsum(values), rel=1e-12, abs=1e-8)
    fronts = running_sum(row)[0].tolist()
    for index, front in enumerate(fronts):
        assert front == pytest.approx(math.fsum(values[: index + 1]), rel=1e-12, abs=1e-8)
        assert front == running_sum(row[:, : index + 1])[0, -1].item()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.data())
@settings(max_examples=200, deadline=None)
def test_ranked_orders_by_value_then_column(values: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(values)))
    best, columns = ranked(torch.tensor([values], dtype=torch.float64), count)
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert best[0].tolist() == [values[i] for i in expected]
    # Only within the run of values that is cut through may the columns differ.
    firm = [i for i in expected if values[i] > values[expected[-1]] or count == len(values)]
    assert columns[0, : len(firm)].tolist() == firm
    assert [values[i] for i in columns[0].tolist()] == best[0].tolist()
    assert columns[0].tolist() == sorted(columns[0].tolist(), key=lambda i: (-values[i], i))


def test_a_row_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(7, 1003, dtype=torch.float64, generator=generator) * 4
    seeds = torch.arange(7)
    for count in (1, 2, 7):
        part = rows[:count]
        assert torch.equal(log_normalizer(part), torch.cat([log_normalizer(row[None]) for row in part]))
        noise = vocabulary_noise(1003, seeds[:count], seeds[:count], seeds[:count])
        alone = [vocabulary_noise(1003, *[seeds[i : i + 1]] * 3) for i in range(count)]
        assert torch.equal(noise, torch.cat(alone))
