"""The same answer under any schedule: logits of the torch executor compared with `==`, float32 and bfloat16."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pagedcli.checkpoint import open_checkpoint
from pagedcli.models.load import Model, load_model
from pagedcli.ops.select import make_ops
from tests.forward_support import chunked, run_steps

LENGTHS = (150, 37, 290, 1, 129)
SHAPES = {
    # hidden and inner sizes that are no multiple of a vector, head sizes of real models
    "gqa3-head64": ("llama", {"hidden_size": 72, "intermediate_size": 100, "head_dim": 64}),
    "mha-head80-gelu": (
        "llama",
        {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_act": "gelu"},
    ),
    "window": ("mistral", {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 1}),
    "gqa7-head128-norms": (
        "qwen3",
        {"head_dim": 128, "num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 56},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, dtype: str, tiny_checkpoint: Callable[..., Path]) -> Model:
    family, settings = SHAPES[request.param]
    return load_model(open_checkpoint(tiny_checkpoint(family, **settings)), make_ops("cpu", dtype), 512)


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(320) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def alone(model: Model, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Every sequence by itself, in one prefill, block size 16."""
    return [run_steps(model, [tokens], [[(0, len(tokens))]])[0] for tokens in sequences]


def assert_same_bits(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        assert not theirs.isnan().any()
        assert torch.equal(mine, theirs)


def random_steps(lengths: tuple[int, ...], seed: int) -> list[list[tuple[int, int]]]:
    """Continuous batching at random: in each step some sequences advance by chunks or by one token."""
    draw, left, steps = random.Random(seed), list(lengths), []
    while any(left):
        step = []
        for index in draw.sample(range(len(left)), len(left)):
            if left[index] and draw.random() < 0.8:
                n = min(left[index], draw.choice((1, 1, 2, 5, 16, 23, 64, 128)))
                left[index] -= n
                step.append((index, n))
        steps += [step] if step else []
    return steps


def test_batched_prefill_equals_each_alone(
    model: Model, sequences: list[list[int]], alone: list[torch.Tensor]
) -> None:
    assert_same_bits(run_steps(model, sequences, [list(enumerate(LENGTHS))]), alone)


@pytest.mark.parametrize("size", [1, 5, 16, 33, 128])
def test_chunk_size_changes_nothing(
    model: Model, sequences: list[list[int]], alone: list[torch.Tensor], size: int
) -> None:
    assert_same_bits(run_steps(model, sequences[:1], chunked(0, LENGTHS[0], size)), alone[:1])


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64, 256])
def test_block_size_changes_nothing(
    model: Model, sequences: list[list[int]], alone: list[torch.Tensor], block_size: int
) -> None:
    steps = random_steps(LENGTHS, seed=block_size)
    assert_same_bits(run_steps(model, sequences, steps, block_size), alone)


@pytest.mark.parametrize("seed", range(3))
def test_continuous_batching_equals_each_alone(
    model: Model, sequences: list[list[int]], alone: list[torch.Tensor], seed: int
) -> None:
    assert_same_bits(run_steps(model, sequences, random_steps(LENGTHS, 100 + seed)), alone)


def test_many_decodes_equal_each_alone(
    model: Model, sequences: list[list[int]], alone: list[torch.Tensor]
) -> None:
    """70 copies of a sequence decode together: more rows than two tiles of a linear."""
    copies = [sequences[0][:20]] * 70
    steps = [[(index, 18) for index in range(70)], *[[(index, 1) for index in range(70)]] * 2]
    assert_same_bits(run_steps(model, copies, steps), [alone[0][:20]] * 70)
