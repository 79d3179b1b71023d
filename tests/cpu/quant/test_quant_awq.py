from __future__ import annotations

import pytest
import torch

from pagedcli.quant.awq import RATIOS, candidates, clipped_grid, search_scales, weight_means
from pagedcli.quant.gram import measure, output_error
from pagedcli.quant.grid import Grid, GridKind, full_grid, of_differences, searched_grid
from pagedcli.quant.workers import workers

KIND = GridKind(4, False, "float16")


def problem(outliers: int = 3, seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(weights, samples), some features far larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    samples = [torch.randn((rows, 128), generator=generator) for rows in (50, 1, 200)]
    for sample in samples:
        sample[:, :outliers] *= 40
    return torch.randn((300, 128), generator=generator) * 0.1, samples


def nearest(weights: torch.Tensor, size: int) -> torch.Tensor:
    grouped = weights.view(len(weights), -1, size)
    return full_grid(grouped, KIND).nearest(grouped, KIND).view_as(weights)


def direct(samples: list[torch.Tensor], difference: torch.Tensor) -> float:
    """The squared error of the output, run over the samples in float64, per row."""
    rows = sum(len(sample) for sample in samples)
    return sum(float((sample.double() @ difference.double().T).square().sum()) for sample in samples) / rows


def test_statistics_are_those_of_all_rows() -> None:
    _, samples = problem()
    wide = torch.cat(samples).double()
    for threads in (1, 2):
        with workers(threads) as pool:
            found = measure(samples, pool)
            mean_abs = found.mean_abs(pool)
        torch.testing.assert_close(found.gram.double(), wide.T @ wide / len(wide), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mean_abs.double(), wide.abs().mean(0), rtol=1e-6, atol=0)
        assert torch.equal(found.gram, found.gram.T)
        assert found.rows == 251


def test_statistics_of_more_features_than_a_tile() -> None:
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randn((30, 700), generator=generator) for _ in range(3)]
    wide = torch.cat(samples).double()
    with workers(2) as pool:
        found = measure(samples, pool)
    torch.testing.assert_close(found.gram.double(), wide.T @ wide / 90, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.gram, found.gram.T)


def test_the_loss_is_the_error_of_the_output() -> None:
    weights, samples = problem()
    with workers(1) as pool:
        statistics = measure(samples, pool)
        found = search_scales(weights, statistics, 32, KIND, pool)
        rounded = nearest(weights * found.scales, 32) / found.scales
        assert output_error(rounded - weights, statistics.gram, pool) == pytest.approx(found.loss, rel=1e-5)
    assert found.loss == pytest.approx(direct(samples, rounded - weights), rel=1e-4)
    assert found.plain_loss == pytest.approx(direct(samples, nearest(weights, 32) - weights), rel=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_scaling_is_never_worse_than_rounding(seed: int) -> None:
    weights, samples = problem(outliers=0, seed=seed)
    with workers(2) as pool:
        found = search_scales(weights, measure(samples, pool), 64, KIND, pool)
    assert found.loss <= found.plain_loss


def test_features_that_stand_out_are_found() -> None:
    weights, samples = problem(outliers=3)
    with workers(2) as pool:
        found = search_scales(weights, measure(samples, pool), 64, KIND, pool)
    assert found.loss < 0.25 * found.plain_loss
    assert float(found.scales[:3].min()) > 2 * float(found.scales[3:].max())


def test_candidates_are_the_papers() -> None:
    weights, samples = problem()
    activation = torch.cat(samples).abs().mean(0)
    tries = candidates(activation, weight_means(weights, 64))
    assert len(tries) == 2 * len(RATIOS)
    assert torch.equal(tries[0], torch.ones(128))
    expected = activation**0.5
    torch.testing.assert_close(tries[10], expected / (expected.max() * expected.min()).sqrt())


def wrong_outputs(weights: torch.Tensor, grid: Grid, inputs: torch.Tensor) -> torch.Tensor:
    """[out] of weights on a grid [out, groups], float64: what the linear gives wrong on the inputs themselves."""
    grouped = weights.view(*grid.scales.shape, -1)
    scales, zeros = grid.scales.unsqueeze(2), grid.zeros.unsqueeze(2)
    codes = (grouped / scales).round().add(zeros).clamp(0, 15)
    difference = ((codes - zeros) * scales - grouped).view_as(weights).double()
    return (inputs @ difference.T).square().mean(0)


def test_clipping_makes_the_error_of_the_whole_output_less() -> None:
    """Less than full ranges leave, and than the best range of each group for itself does."""
    weights, samples = problem()
    weights[::3, 7] *= 10  # outliers among the weights, worth clipping where the feature is small
    mixed = torch.eye(128) + torch.randn((128, 128), generator=torch.Generator().manual_seed(1)) * 0.1
    samples = [sample @ mixed for sample in samples]  # features of a model go together
    with workers(1) as pool:
        gram = measure(samples, pool).gram
    grid = clipped_grid(weights, gram, 32, KIND, [row < 200 for row in range(300)])
    grouped = weights.view(300, 4, 32)
    wide = full_grid(grouped, KIND)
    full = Grid(wide.scales.squeeze(2), wide.zeros.squeeze(2))
    assert torch.equal(grid.scales[200:], full.scales[200:])
    assert torch.equal(grid.zeros[200:], full.zeros[200:])
    alone = []
    for index in range(4):
        own = gram[32 * index : 32 * (index + 1), 32 * index : 32 * (index + 1)]
        weights_of = grouped[:, index]
        loss = of_differences(weights_of, KIND, lambda e, own=own: ((e @ own) * e).sum(-1, keepdim=True))
        alone.append(searched_grid(weights_of, KIND, loss))
    apart = Grid(torch.cat([grid.scales for grid in alone], 1), torch.cat([grid.zeros for grid in alone], 1))
    inputs = torch.cat(samples).double()
    found, before, best_apart = (wrong_outputs(weights, each, inputs)[:200] for each in (grid, full, apart))
    assert bool((found <= before * (1 + 1e-5)).all())
    assert float(found.sum()) < 0.8 * float(before.sum())
    assert float(found.sum()) < 0.95 * float(best_apart.sum())
