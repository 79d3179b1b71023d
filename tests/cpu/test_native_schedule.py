"""The same answer under any schedule, natively: logits compared with `==` for every variant that this machine runs.

Unwritten cells of the KV pool are NaN, so that reading one anywhere is noticed too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from paged_kernels.native import available_isas

from tests.cpu.test_models_schedule import LENGTHS, SHAPES, random_steps
from tests.native_support import Array, NativeModel, run_native
from tests.tables import chunked

DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module", params=available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Path:
    family, settings = SHAPES[request.param]
    return tiny_checkpoint(family, **settings)


@pytest.fixture(scope="module")
def model(folder: Path, dtype: str, isa: str) -> NativeModel:
    return NativeModel.load(folder, dtype, isa=isa)


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(320) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def alone(model: NativeModel, sequences: list[list[int]]) -> list[Array]:
    """Every sequence by itself, in one prefill, block size 16."""
    return [run_native(model, [tokens], [[(0, len(tokens))]])[0] for tokens in sequences]


def assert_same_bits(actual: list[Array], expected: list[Array]) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        assert np.isfinite(theirs).all()
        np.testing.assert_array_equal(mine, theirs)


def test_batched_prefill_equals_each_alone(
    model: NativeModel, sequences: list[list[int]], alone: list[Array]
) -> None:
    assert_same_bits(run_native(model, sequences, [list(enumerate(LENGTHS))]), alone)


def test_chunk_size_changes_nothing(
    model: NativeModel, sequences: list[list[int]], alone: list[Array]
) -> None:
    for size in (1, 5, 16, 33, 128):
        assert_same_bits(run_native(model, sequences[:1], chunked(0, LENGTHS[0], size)), alone[:1])


def test_block_size_changes_nothing(
    model: NativeModel, sequences: list[list[int]], alone: list[Array]
) -> None:
    for block_size in (1, 3, 8, 16, 32, 64, 256):
        steps = random_steps(LENGTHS, seed=block_size)
        assert_same_bits(run_native(model, sequences, steps, block_size), alone)


def test_continuous_batching_equals_each_alone(
    model: NativeModel, sequences: list[list[int]], alone: list[Array]
) -> None:
    for seed in range(3):
        assert_same_bits(run_native(model, sequences, random_steps(LENGTHS, 100 + seed)), alone)


def test_many_decodes_equal_each_alone(
    model: NativeModel, sequences: list[list[int]], alone: list[Array]
) -> None:
    copies = [sequences[0][:20]] * 70
    steps = [[(index, 18) for index in range(70)], *[[(index, 1) for index in range(70)]] * 2]
    assert_same_bits(run_native(model, copies, steps), [alone[0][:20]] * 70)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_change_nothing(
    folder: Path, dtype: str, isa: str, sequences: list[list[int]], alone: list[Array], threads: int
) -> None:
    model = NativeModel.load(folder, dtype, isa=isa, threads=threads)
    assert_same_bits(run_native(model, sequences, random_steps(LENGTHS, 7)), alone)
