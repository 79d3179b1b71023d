"""The batch-invariant forms: equal bits where promised, and near the oracle in every way that they can run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from paged_kernels import reference, torch_attention
from paged_kernels.torch_linear import ROW_TILE, tiled_linear

HEADS = torch_attention.Heads(num_heads=6, num_kv_heads=2, head_dim=64)
QUERY_LENS, SEQ_LENS = (1, 40, 1, 7), (300, 40, 129, 200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("features", "out"), [(72, 33), (100, 576)])
def test_linear_gives_a_row_the_same_bits_anywhere(dtype: torch.dtype, features: int, out: int) -> None:
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape).to(dtype) for shape in ((2 * ROW_TILE + 5, features), (out, features), (out,))
    )
    whole = tiled_linear(x, weight, bias)
    alone = torch.cat([tiled_linear(row, weight, bias) for row in x.split(1)])
    shuffle = torch.randperm(len(x))
    assert torch.equal(whole, alone)
    assert torch.equal(tiled_linear(x[shuffle], weight, bias), whole[shuffle])


@pytest.fixture
def attention() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    num_blocks, block_size = 60, 16
    cache = torch.randn(2, num_blocks, HEADS.num_kv_heads, block_size, HEADS.head_dim)
    table = torch.randperm(num_blocks)[:57].view(3, 19)
    return (
        torch.randn(sum(QUERY_LENS), HEADS.num_heads, HEADS.head_dim),
        cache[0],
        cache[1],
        torch.cat((table, table[:1])),
    )


def run(
    operands: Sequence[torch.Tensor], window: int | None
) -> tuple[torch.Tensor, list[torch_attention.Round]]:
    q, keys, values, table = operands
    rounds = torch_attention.plan_attention(HEADS, table, keys.shape[2], QUERY_LENS, SEQ_LENS, window)
    return torch_attention.paged_attention(q, keys, values, rounds, 0.125), rounds


@pytest.mark.parametrize("window", [None, 20, 128])
def test_attention_in_small_rounds_and_other_tiles(
    attention: tuple[torch.Tensor, ...], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, keys, values, table = (
        tensor.double() if tensor.is_floating_point() else tensor for tensor in attention
    )
    expected = reference.paged_attention(q, keys, values, table, QUERY_LENS, SEQ_LENS, 0.125, window)
    whole, _ = run(attention, window)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(torch_attention, "MAX_ITEM_BYTES", 1)
    small, rounds = run(attention, window)
    assert len(rounds) > len(QUERY_LENS)
    assert torch.equal(small, whole)
    # A machine whose library gives small and large tiles different bits runs everything in one size.
    monkeypatch.setattr(torch_attention, "tile_tokens", lambda *_: (4, 4))
    torch.testing.assert_close(run(attention, window)[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_sizes_are_tried_before_they_are_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, int]] = []

    def refuse(narrow_rows: int, wide_rows: int, head_dim: int, device: str) -> bool:
        tried.append((narrow_rows, wide_rows))
        return False

    monkeypatch.setattr(torch_attention, "sizes_agree", refuse)
    assert torch_attention.tile_tokens(3, 40, "cpu", -1) == (6, 6)
    assert tried == [(3, 66), (18, 66)]
