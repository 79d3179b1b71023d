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

SHRINK = tuple(1 - step / 20 for step in range(1, 11))
"""Parts of an end of the full range that are tried when a range is searched, widest first; and the whole of it."""

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

    def steps(self, weights: Tensor, kind: GridKind) -> Tensor:
        """Codes less their zero points, of weights that broadcast with the scales: from -zero to top - zero."""
        steps = torch.div(weights, self.scales).round_()
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


Loss = Callable[[Grid], Tensor]
"""From the grids of some groups, [..., 1], to what each costs, [..., 1]."""


def of_differences(grouped: Tensor, kind: GridKind, loss: Callable[[Tensor], Tensor]) -> Loss:
    """A loss of groups [..., group_size] from the differences that their grids make, of the same shape."""
    return lambda grid: loss(grid.nearest(grouped, kind).sub_(grouped))


def searched_grid(grouped: Tensor, kind: GridKind, loss: Loss) -> Grid:
    """The best range that is found for each group, never worse than the full one.

    Both ends are drawn in together by the parts of `SHRINK`; where grids are not symmetric, then each end alone.

    Args:
        grouped: [..., group_size].
        kind: Of the grids.
        loss: Of each group's grid.
    """
    low, high = range_of(grouped)
    search = _RangeSearch(kind, loss, low, high)
    search.draw_in(low, high)
    if not kind.symmetric:
        search.draw_in(low, None)
        search.draw_in(None, high)
    return grid_of_range(search.low, search.high, kind)


class _RangeSearch:
    """The best range of each group so far, and its loss."""

    def __init__(self, kind: GridKind, loss: Loss, low: Tensor, high: Tensor) -> None:
        self._kind, self._loss = kind, loss
        self.low, self.high = low, high
        self._least = loss(grid_of_range(low, high, kind))

    def draw_in(self, low: Tensor | None, high: Tensor | None) -> None:
        """Try parts of the given ends; an end that is None stays as it is best so far. The widest of equals wins."""
        parts = self.low.new_tensor(SHRINK).view(-1, *[1] * self.low.dim())
        lows = self.low.expand(len(SHRINK), *self.low.shape) if low is None else low * parts
        highs = self.high.expand(len(SHRINK), *self.high.shape) if high is None else high * parts
        grids = grid_of_range(lows, highs, self._kind)
        pairs = zip(grids.scales, grids.zeros, strict=True)
        losses = torch.stack([self._least, *(self._loss(Grid(scales, zeros)) for scales, zeros in pairs)])
        self._least, best = losses.min(0, keepdim=True)
        self._least = self._least.squeeze(0)
        self.low = torch.cat((self.low.unsqueeze(0), lows)).gather(0, best).squeeze(0)
        self.high = torch.cat((self.high.unsqueeze(0), highs)).gather(0, best).squeeze(0)
