"""AWQ: input features that carry large activations are scaled up before rounding, then ranges are clipped.

After J. Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (2023,
arXiv:2306.00978). Imports torch. The loss of a try is the error of the linear's output on the calibration text,
exact through the Gram matrix of its inputs (`gram.py`); what the paper runs the layer for is one product of matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcli.quant.gram import InputStatistics, quadratic
from pagedcli.quant.grid import Grid, GridKind, full_grid, of_differences, searched_grid
from pagedcli.quant.workers import Workers, row_blocks

RATIOS = tuple(step / 20 for step in range(20))
SCREEN_ROWS, FINALISTS = 128, 4
"""All tries are compared on so many rows, spread over the linear; the best few on all rows."""
SWEEPS = 2
"""Times that each group is clipped: in the second the groups behind it are clipped too."""
_LEAST_SCALE = 1e-4


@dataclass(frozen=True, slots=True)
class Scaling:
    """The best scale of each input feature, and what it brings.

    Attributes:
        scales: [in].
        loss: Squared error of the output with them.
        plain_loss: Without scales: plain rounding.
    """

    scales: Tensor
    loss: float
    plain_loss: float


def search_scales(
    weights: Tensor,
    statistics: InputStatistics,
    group_size: int,
    kind: GridKind,
    workers: Workers,
) -> Scaling:
    """The best of the paper's scales, activation^ratio, with and without dividing by weight^(1 - ratio).

    Args:
        weights: [out, in], all linears that read the input.
        statistics: Of the input.
        group_size: Divides in.
        kind: Of the grids.
        workers: For the tries.
    """
    tries = candidates(statistics.mean_abs(workers), weight_means(weights, group_size))
    stride = -(-len(weights) // SCREEN_ROWS)
    screened = _losses(weights[::stride], tries, statistics.gram, group_size, kind, workers)
    ranked = sorted(range(len(tries)), key=screened.__getitem__)
    finalists = sorted({0, *ranked[:FINALISTS]})  # 0 is plain rounding, and wins a tie
    totals = _losses(
        weights, [tries[index] for index in finalists], statistics.gram, group_size, kind, workers
    )
    best = min(range(len(finalists)), key=totals.__getitem__)
    return Scaling(tries[finalists[best]], totals[best], totals[0])


def _losses(
    weights: Tensor, tries: Sequence[Tensor], gram: Tensor, group_size: int, kind: GridKind, workers: Workers
) -> list[float]:
    """The loss of each try."""

    def part(task: tuple[slice, Tensor]) -> float:
        return _loss(weights[task[0]], task[1], gram, group_size, kind)

    blocks = row_blocks(len(weights))
    found = workers.map(part, [(rows, scales) for scales in tries for rows in blocks])
    return [sum(found[first : first + len(blocks)]) for first in range(0, len(found), len(blocks))]


def candidates(activation: Tensor, weight: Tensor) -> list[Tensor]:
    """Scales to try, [in] each; the first is all ones."""
    plain = [activation.pow(ratio) for ratio in RATIOS]
    both = [activation.pow(ratio) / (weight.pow(1 - ratio) + _LEAST_SCALE) for ratio in RATIOS]
    return [_centred(scales) for scales in (*plain, *both)]


def _centred(scales: Tensor) -> Tensor:
    scales = scales.clamp(min=_LEAST_SCALE)
    return scales / (scales.max() * scales.min()).sqrt()


def weight_means(weights: Tensor, group_size: int) -> Tensor:
    """[in]: mean over the outputs of |w| relative to the largest |w| of its group."""
    sizes = weights.abs().view(len(weights), -1, group_size)
    peak = sizes.amax(-1, keepdim=True)
    return (sizes / torch.where(peak > 0, peak, 1.0)).view_as(weights).mean(0)


def _loss(weights: Tensor, scales: Tensor, gram: Tensor, group_size: int, kind: GridKind) -> float:
    scaled = (weights * scales).view(len(weights), -1, group_size)
    rounded = full_grid(scaled, kind).nearest(scaled, kind)
    error = rounded.view_as(weights).div_(scales).sub_(weights)
    return quadratic(error, gram)


def clipped_grid(
    weights: Tensor, gram: Tensor, group_size: int, kind: GridKind, clip: Sequence[bool]
) -> Grid:
    """Grids [out, groups] whose ranges make the error of the output least.

    The paper clips each group as if the others had no error. Here the groups are clipped one after the other, and each
    one's search counts the errors of all others as they are then (coordinate descent on the error of the whole output).

    Args:
        weights: [out, in], scaled.
        gram: [in, in] of the inputs, divided by the scales.
        group_size: Divides in.
        kind: Of the grids.
        clip: For each row whether its ranges are searched; else they are from minimum to maximum.
    """
    grouped = weights.view(len(weights), -1, group_size)
    full = full_grid(grouped, kind)
    grid = Grid(full.scales.squeeze(2), full.zeros.squeeze(2))
    rows = torch.tensor(list(clip)).nonzero().squeeze(1)
    if len(rows):
        found = _clipped_in_turn(grouped[rows], Grid(full.scales[rows], full.zeros[rows]), gram, kind)
        grid.scales[rows], grid.zeros[rows] = found.scales, found.zeros
    return grid


def _clipped_in_turn(grouped: Tensor, full: Grid, gram: Tensor, kind: GridKind) -> Grid:
    """Grids [rows, groups] of weights [rows, groups, group_size], from their full ones [rows, groups, 1] on."""
    size = grouped.shape[-1]
    scales, zeros = full.scales.squeeze(2), full.zeros.squeeze(2)
    errors = full.nearest(grouped, kind).sub_(grouped).view(len(grouped), -1)
    for index in [*range(grouped.shape[1])] * SWEEPS:
        columns, weights = slice(index * size, (index + 1) * size), grouped[:, index]
        own = gram[columns, columns]
        # |E X|^2 in this group's errors e, with the others' as they are: e own e + 2 e others, and what is constant.
        others = (errors @ gram[:, columns]).sub_(errors[:, columns] @ own).mul_(2)

        def loss(error: Tensor, own: Tensor = own, others: Tensor = others) -> Tensor:
            return (error @ own).add_(others).mul_(error).sum(-1, keepdim=True)

        found = searched_grid(weights, kind, of_differences(weights, kind, loss))
        error = found.nearest(weights, kind).sub_(weights)
        better = loss(error) < loss(errors[:, columns])
        scales[:, index] = torch.where(better, found.scales, scales[:, index : index + 1]).squeeze(1)
        zeros[:, index] = torch.where(better, found.zeros, zeros[:, index : index + 1]).squeeze(1)
        errors[:, columns] = torch.where(better, error, errors[:, columns])
    return Grid(scales, zeros)
