"""The oracle itself against torch's own functions and against arithmetic done another way, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from paged_kernels import reference
from paged_kernels.checks import ShapeError
from torch.nn import functional


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def test_rms_norm_is_torchs() -> None:
    x, weight = randn(5, 33), randn(33)
    torch.testing.assert_close(
        reference.rms_norm(x, weight, 1e-3), functional.rms_norm(x, (33,), weight, 1e-3)
    )


def test_add_rms_norm_norms_the_sum() -> None:
    x, y, weight = randn(5, 33), randn(5, 33, seed=1), randn(33)
    normed, total = reference.add_rms_norm(x, y, weight, 1e-3)
    assert torch.equal(total, x + y)
    torch.testing.assert_close(normed, functional.rms_norm(x + y, (33,), weight, 1e-3))


def test_norms_of_narrow_types_are_rounded_once() -> None:
    x, weight = randn(4, 64).bfloat16(), randn(64).bfloat16()
    expected = reference.rms_norm(x.float(), weight.float(), 1e-5).bfloat16()
    assert torch.equal(reference.rms_norm(x, weight, 1e-5), expected)


def test_rotation_is_multiplication_by_a_complex_number() -> None:
    x, angle = randn(6, 3, 10), randn(6, 5)
    rotated = reference.rotate(x, angle.cos(), angle.sin())
    turned = torch.complex(x[..., :5], x[..., 5:]) * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    torch.testing.assert_close(rotated, torch.cat((turned.real, turned.imag), dim=-1))


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("silu", functional.silu),
        ("gelu", functional.gelu),
        ("gelu_tanh", lambda x: functional.gelu(x, approximate="tanh")),
    ],
)
def test_gates_are_torchs(activation: str, function: object) -> None:
    x = torch.cat((randn(3, 40) * 20, randn(3, 40, seed=1)), dim=1)
    expected = function(x[:, :40]) * x[:, 40:]  # type: ignore[operator]
    torch.testing.assert_close(reference.gated(x, activation), expected)


def test_gates_of_large_inputs_are_finite() -> None:
    x = torch.tensor([[-1000.0, 1000.0, 1.0, 1.0]])
    for activation in ("silu", "gelu", "gelu_tanh"):
        assert reference.gated(x, activation).tolist() == [[0.0, 1000.0]]


def test_linear_and_rows() -> None:
    x, weight, bias = randn(4, 6), randn(3, 6), randn(3)
    torch.testing.assert_close(reference.linear(x, weight, bias), functional.linear(x, weight, bias))
    rows = torch.tensor([2, 0, 2])
    assert torch.equal(reference.select_rows(x, rows), x[rows])
    assert torch.equal(reference.embedding(x, rows), x[rows])


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 2)])
def test_attention_is_torchs_with_a_mask(window: int | None, num_heads: int, num_kv_heads: int) -> None:
    block_size, length, rows, head_dim = 4, 11, 5, 6
    keys, values = randn(length, num_kv_heads, head_dim), randn(length, num_kv_heads, head_dim, seed=1)
    q = randn(rows, num_heads, head_dim)
    table = torch.tensor([[3, 0, 2]])
    slots = torch.tensor(
        [int(table[0, at // block_size]) * block_size + at % block_size for at in range(length)]
    )
    key_cache = torch.full((4, num_kv_heads, block_size, head_dim), math.nan, dtype=torch.float64)
    value_cache = key_cache.clone()
    reference.write_kv(key_cache, keys, slots)
    reference.write_kv(value_cache, values, slots)
    result = reference.paged_attention(q, key_cache, value_cache, table, [rows], [length], 0.3, window)
    mask = torch.tensor(
        [
            [at - (window or length) < seen <= at for seen in range(length)]
            for at in range(length - rows, length)
        ]
    )
    expected = functional.scaled_dot_product_attention(
        q.transpose(0, 1),
        keys.transpose(0, 1).repeat_interleave(num_heads // num_kv_heads, 0),
        values.transpose(0, 1).repeat_interleave(num_heads // num_kv_heads, 0),
        attn_mask=mask,
        scale=0.3,
    )
    torch.testing.assert_close(result, expected.transpose(0, 1))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"weight has shape \[4\], expected \[5\]"):
        reference.rms_norm(randn(2, 5), randn(4), 1e-5)
    with pytest.raises(ShapeError, match="bias has shape"):
        reference.linear(randn(2, 5), randn(3, 5), randn(4))
    with pytest.raises(ShapeError, match="even number"):
        reference.gated(randn(2, 5), "silu")
    with pytest.raises(ShapeError, match="relu"):
        reference.gated(randn(2, 4), "relu")
    cache = randn(2, 2, 4, 8)
    table = torch.tensor([[0, 1]])
    with pytest.raises(ShapeError, match="3 query heads are not a multiple of 2"):
        reference.paged_attention(randn(1, 3, 8), cache, cache, table, [1], [1], 1.0, None)
    with pytest.raises(ShapeError, match="its table holds 8"):
        reference.paged_attention(randn(1, 2, 8), cache, cache, table, [1], [9], 1.0, None)
