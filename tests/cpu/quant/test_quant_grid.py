from __future__ import annotations

import pytest
import torch

from pagedcli.quant.grid import Grid, GridKind, full_grid, of_differences, searched_grid

KINDS = [GridKind(bits, symmetric, "float16") for bits in (4, 8) for symmetric in (True, False)]


def weights(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((5, 3, 32), generator=generator, dtype=torch.float64) * 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_the_code_is_the_nearest_of_all(kind: GridKind) -> None:
    values = weights()
    grid = full_grid(values, kind)
    every = grid.decode(torch.arange(kind.top + 1, dtype=torch.float64)).unsqueeze(2)  # [5, 3, 1, codes]
    distances = (values.unsqueeze(3) - every).abs()
    found = (values - grid.nearest(values, kind)).abs()
    torch.testing.assert_close(found, distances.amin(-1), rtol=0, atol=1e-15)
    codes = grid.encode(values, kind)
    assert int(codes.min()) >= 0
    assert int(codes.max()) <= kind.top


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", [0, 3, 15])
def test_weights_on_a_grid_come_back_exactly(bits: int, zero: int) -> None:
    kind = GridKind(bits, False, "float16")
    values = (torch.arange(kind.top + 1, dtype=torch.float64) - zero) * 0.25
    grid = full_grid(values, kind)
    assert (float(grid.scales), float(grid.zeros)) == (0.25, zero)
    assert torch.equal(grid.nearest(values, kind), values)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_symmetric_grid_reaches_both_ends(bits: int) -> None:
    kind = GridKind(bits, True, "float16")
    values = torch.tensor([-0.3, 0.1, 0.2], dtype=torch.float64)
    grid = full_grid(values, kind)
    assert float(grid.zeros) == 2 ** (bits - 1)
    assert float(grid.scales) == pytest.approx(0.6 / kind.top, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_A_group_of_zeros_stays_zero(kind: GridKind) -> None:
    values = torch.zeros(2, 32)
    grid = full_grid(values, kind)
    assert bool(torch.isfinite(grid.scales).all())
    assert torch.equal(grid.nearest(values, kind), values)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_is_in_the_range_of_weights_of_one_sign(kind: GridKind) -> None:
    values = torch.linspace(0.5, 1.0, 32).unsqueeze(0)
    grid = full_grid(values, kind)
    worst = float((grid.nearest(values, kind) - values).abs().max())
    assert worst <= 1.0 / (kind.top // 2) / 2 * 1.1  # a grid from 0.5 upwards would clamp by half a unit
    assert float(grid.nearest(torch.zeros(1, 1), kind).abs()) == 0.0


@pytest.mark.parametrize("size", [1e-9, 1e-7, 1e-4, 1.0, 1e4])
def test_scales_are_what_the_file_holds(size: float) -> None:
    for kind in KINDS:
        grid = full_grid(weights().float() * size, kind)
        assert torch.equal(grid.scales.half().float(), grid.scales)
        assert bool((grid.scales > 0).all())


def test_bfloat16_scales() -> None:
    kind = GridKind(4, False, "bfloat16")
    scales = full_grid(weights().float(), kind).scales
    assert torch.equal(scales.bfloat16().float(), scales)
    assert not torch.equal(full_grid(weights().float(), KINDS[1]).scales, scales)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_searched_range_is_never_worse_and_often_better(kind: GridKind) -> None:
    values = weights()
    values[..., 0] = 0.4  # an outlier in every group, and one that matters little
    importance = torch.ones(32, dtype=torch.float64)
    importance[0] = 1e-5

    def loss(error: torch.Tensor) -> torch.Tensor:
        return (error.square() * importance).sum(-1, keepdim=True)

    def of(grid: Grid) -> torch.Tensor:
        return loss(grid.nearest(values, kind) - values)

    full, found = (
        of(full_grid(values, kind)),
        of(searched_grid(values, kind, of_differences(values, kind, loss))),
    )
    assert bool((found <= full).all())
    assert float(found.sum()) < 0.5 * float(full.sum())
