"""Grids: the scales and zero points of groups of weights, codes on them, and the search for a narrower range.

Imports torch. Scales are rounded to what the file will hold before any code is chosen, so that what is stored is what
was optimized. A weight of 0 always has a code of its own; a group of zeros has a scale of 1.

    w ~ (code - zero) * scale        code in 0 .. 2**bits - 1, zero a whole number in the same range
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SHRINK = tuple(1 - step / 20 for step in range(11))
"""Parts of an end of the full range that are tried when a range is searched, widest first."""

_SCALE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_LEAST_SCALES = {"float16": 2.0**-24, "bfloat16": 2.0**-126}


@dataclass(frozen=True, slots=True)
class GridKind:
    """What all grids of a run have in common.

    Attributes:
        bits: Width of a code.
        symmetric: Whether the zero point is the middle code.
        scale_dtype: "float16" or "bfloat16".
    """

    bits: int
    symmetric: bool
    scale_dtype: str

    @property
    def top(self) -> int:
        """The largest code."""
        return int(2**self.bits - 1)

    @property
    def middle(self) -> int:
        """The zero point of symmetric grids."""
        return int(2 ** (self.bits - 1))

    def round_scales(self, scales: Tensor) -> Tensor:
        """Scales as stored, in their own dtype; what would round to 0 is the least positive number instead."""
        rounded = scales.to(_SCALE_DTYPES[self.scale_dtype]).to(scales.dtype)
        return rounded.clamp_(min=_LEAST_SCALES[self.scale_dtype])

    @property
    def largest_scale(self) -> float:
        """Of the stored dtype."""
        return float(torch.finfo(_SCALE_DTYPES[self.scale_dtype]).max)


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales and zero points of the same shape, in the dtype of the weights."""

    scales: Tensor
    zeros: Tensor

    def encode(self, weights: Tensor, kind: GridKind) -> Tensor:
        """Codes of weights that broadcast with the scales, as numbers of their dtype."""
        return weights.div(self.scales).round_().add_(self.zeros).clamp_(0, kind.top)

    def decode(self, codes: Tensor) -> Tensor:
        """Weights of codes."""
        return (codes - self.zeros).mul_(self.scales)

    def steps(self, weights: Tensor, kind: GridKind, out: Tensor | None = None) -> Tensor:
        """Codes less their zero points, of weights that broadcast with the scales: from -zero to top - zero."""
        steps = torch.div(weights, self.scales, out=out).round_()
        if kind.symmetric:
            middle = kind.middle
            return steps.clamp_(-middle, kind.top - middle)
        return steps.clamp_(-self.zeros, kind.top - self.zeros)

    def nearest(self, weights: Tensor, kind: GridKind) -> Tensor:
        """Weights moved onto the grid."""
        return self.steps(weights, kind).mul_(self.scales)


def grid_of_range(low: Tensor, high: Tensor, kind: GridKind) -> Grid:
    """The grid from `low` (at most 0) to `high` (at least 0)."""
    if kind.symmetric:
        reach = torch.maximum(-low, high)
        low, high = -reach, reach
    scales = (high - low).div_(kind.top)
    scales = kind.round_scales(torch.where(scales > 0, scales, 1.0))
    if kind.symmetric:
        return Grid(scales, torch.full_like(scales, kind.middle))
    return Grid(scales, torch.round(-low / scales).clamp_(0, kind.top))


def range_of(grouped: Tensor) -> tuple[Tensor, Tensor]:
    """(low, high) of groups [..., group_size], with 0 inside: [..., 1] each."""
    # Apart, they take an eighth of the time of torch.aminmax.
    return grouped.amin(-1, keepdim=True).clamp_(max=0), grouped.amax(-1, keepdim=True).clamp_(min=0)


def full_grid(grouped: Tensor, kind: GridKind) -> Grid:
    """The grid from the least to the largest weight of groups [..., group_size]: [..., 1]."""
    return grid_of_range(*range_of(grouped), kind)


Loss = Callable[[Tensor], Tensor]
"""From differences [..., group_size] to a loss of each group, [..., 1]."""


def searched_grid(grouped: Tensor, kind: GridKind, loss: Loss) -> Grid:
    """The best range that is found for each group, never worse than the full one.

    Both ends are drawn in together by the parts of `SHRINK`; where grids are not symmetric, then each end alone.

    Args:
        grouped: [..., group_size].
        kind: Of the grids.
        loss: Of the differences that a grid makes.
    """
    low, high = range_of(grouped)
    search = _RangeSearch(grouped, kind, loss, low, high)
    search.draw_in(low, high)
    if not kind.symmetric:
        search.draw_in(low, None)
        search.draw_in(None, high)
    return grid_of_range(search.low, search.high, kind)


class _RangeSearch:
    """The best range of each group so far, and its loss."""

    def __init__(self, grouped: Tensor, kind: GridKind, loss: Loss, low: Tensor, high: Tensor) -> None:
        self._grouped, self._kind, self._loss = grouped, kind, loss
        self.low, self.high = low, high
        self._least = self._of(grid_of_range(low, high, kind))

    def draw_in(self, low: Tensor | None, high: Tensor | None) -> None:
        """Try parts of the given ends; an end that is None stays as it is best so far."""
        lows = [self.low if low is None else low * part for part in SHRINK[1:]]
        highs = [self.high if high is None else high * part for part in SHRINK[1:]]
        grids = grid_of_range(torch.stack(lows), torch.stack(highs), self._kind)  # short rows: all in one go
        for tried_low, tried_high, scales, zeros in zip(lows, highs, grids.scales, grids.zeros, strict=True):
            found = self._of(Grid(scales, zeros))
            better = found < self._least
            self._least = torch.where(better, found, self._least)
            self.low = torch.where(better, tried_low, self.low)
            self.high = torch.where(better, tried_high, self.high)

    def _of(self, grid: Grid) -> Tensor:
        return self._loss(grid.nearest(self._grouped, self._kind).sub_(self._grouped))
