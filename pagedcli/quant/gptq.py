"""GPTQ: weights are rounded one input feature after the other, the rest makes up for each error.

After E. Frantar, S. Ashkboos, T. Hoefler, D. Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers" (2022, arXiv:2210.17323). Imports torch; computes in the dtype of the weights.

Weights lie as [in, out], a feature's weights side by side. With U the upper factor of the inverse Hessian
(H^-1 = U^T U), feature i is rounded and its error e = w_i - q_i is taken from the later ones:
w_j -= e * U_ij / U_ii. Errors reach the features of the same strip at once, those of the same block after the strip,
all others after the block: the same sums in larger products. A strip is one call of `paged_kernels.gptq`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from paged_kernels.gptq import losses, round_strip
from torch import Tensor

from pagedcli.quant.grid import Grid, GridKind, full_grid, searched_grid

BLOCK = 128
STRIP = 32
_MOST_DAMP = 1.0
_FIRST_DAMP = 1e-3
_STEP = 10.0


@dataclass(frozen=True, slots=True)
class Factor:
    """The inverse Hessian of one linear, ready for use.

    Attributes:
        unit: [in, in] U_ij / U_ii of U with H^-1 = U^T U, features in the order of work.
        importance: [in] 1 / U_ii^2: what an error of a feature costs, the later ones making up for it.
        order: [in] int64, the feature that is worked on first, second, ...
        damp: That made the factorization work.
    """

    unit: Tensor
    importance: Tensor
    order: Tensor
    damp: float


def factorize(gram: Tensor, damp: float, *, by_activation: bool) -> Factor | None:
    """Factor the inverse of a Gram matrix, in its dtype; in float64 where that is not enough.

    Damping is raised tenfold until it works; None if it does not work below 1.

    Args:
        gram: [in, in].
        damp: Part of the diagonal's mean that is added to the diagonal.
        by_activation: Work on the features with the largest activations first, else in their order.
    """
    hessian = gram.clone()
    diagonal = hessian.diagonal()
    mean = float(diagonal.mean())
    # A feature that is always 0 has no influence; a diagonal of its own keeps it out of the others' way.
    diagonal[diagonal == 0] = mean if mean > 0 else 1.0
    order = torch.arange(gram.shape[0])
    if by_activation:
        order = torch.argsort(diagonal, descending=True, stable=True)
        hessian = hessian[order].index_select(1, order)
    while damp <= _MOST_DAMP:
        upper = _inverse_factor(hessian, damp * mean)
        if upper is None:
            upper = _inverse_factor(hessian.double(), damp * mean)
        if upper is not None:
            inverse = upper.to(gram.dtype).diagonal().reciprocal()
            unit = upper.to(gram.dtype).contiguous().mul_(inverse.unsqueeze(1))
            return Factor(unit, inverse.square(), order, damp)
        damp = max(damp * _STEP, _FIRST_DAMP)
    return None


def _inverse_factor(hessian: Tensor, added: float) -> Tensor | None:
    """U with (H + added I)^-1 = U^T U, or None.

    Cholesky of the matrix turned round gives H = R R^T with R upper; U is R's inverse. No inverse of H is formed.
    """
    turned = hessian.flip(0, 1)
    turned.diagonal().add_(added)
    lower, failed = torch.linalg.cholesky_ex(turned)
    if int(failed) != 0:
        return None
    upper = lower.flip(0, 1)
    inverse = torch.linalg.solve_triangular(upper, torch.eye(upper.shape[0], dtype=upper.dtype), upper=True)
    # The sum is quick to look at; finite numbers can only spoil it by overflowing.
    finite = bool(torch.isfinite(inverse.sum())) or bool(torch.isfinite(inverse).all())
    return inverse if finite else None


@dataclass(frozen=True, slots=True)
class Rounded:
    """A linear after GPTQ, features in their own order.

    Attributes:
        codes: [out, in] uint8.
        grid: Of shape [out, groups].
        g_idx: [in] int32 or None where groups are in order.
    """

    codes: Tensor
    grid: Grid
    g_idx: Tensor | None


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How features fall into groups.

    Attributes:
        size: Features of a group.
        moving: Groups are runs in the order of work, and their grids are made when work reaches them, from weights
            that have taken up the errors so far. Else they are runs in the features' own order, made beforehand.
        search: Search the ranges.
    """

    size: int
    moving: bool
    search: bool


def round_weights(weights: Tensor, factor: Factor, plan: GroupPlan, kind: GridKind) -> Rounded:
    """Round some rows of a linear; rows do not influence one another.

    Args:
        weights: [out, in], not changed.
        factor: Of the linear's inputs.
        plan: Of the groups.
        kind: Of the grids.
    """
    order, unit = factor.order, factor.unit
    state = weights.T[order]  # [in, out], a copy
    groups = order // plan.size
    if plan.moving:
        groups = torch.arange(len(order)) // plan.size
    grids = _Grids(state, groups, factor.importance, plan, kind)
    codes = torch.empty(state.shape, dtype=torch.uint8)
    for first, last in _blocks(len(order), plan):
        errors = state.new_empty((last - first, state.shape[1]))
        for start, end in _strips(first, last, plan):
            grids.make(start)
            strip = errors[start - first : end - first]
            _round_strip(state[start:end], unit[start:end, start:end], grids, start, strip, codes[start:end])
            state[end:last].addmm_(unit[start:end, end:last].T, strip, alpha=-1)
        state[last:].addmm_(unit[first:last, last:].T, errors, alpha=-1)
    back = torch.argsort(order)
    in_order = bool((groups[back] == torch.arange(len(order)) // plan.size).all())
    return Rounded(codes[back].T.contiguous(), grids.joined(), None if in_order else groups[back].int())


def _blocks(features: int, plan: GroupPlan) -> Iterator[tuple[int, int]]:
    """Of all features; a moving group that is not whole begins with a block.

    So its grid is made from weights that have taken up all earlier errors.
    """
    first = 0
    while first < features:
        last = min(first + BLOCK, features)
        if plan.moving:
            last = min(last, max(_next_group(first, plan), last // plan.size * plan.size))
        yield first, last
        first = last


def _strips(first: int, last: int, plan: GroupPlan) -> Iterator[tuple[int, int]]:
    """Of a block; no two moving groups share one, as the second's grid waits for the errors of the first."""
    while first < last:
        end = min(first + STRIP, last)
        if plan.moving:
            end = min(end, _next_group(first, plan))
        yield first, end
        first = end


def _next_group(feature: int, plan: GroupPlan) -> int:
    return (feature // plan.size + 1) * plan.size


def _round_strip(
    state: Tensor, unit: Tensor, grids: _Grids, start: int, errors: Tensor, codes: Tensor
) -> None:
    round_strip(
        state.numpy(),
        unit.numpy(),
        grids.scales.numpy(),
        grids.zeros.numpy(),
        grids.groups[start : start + len(state)].numpy(),
        errors.numpy(),
        codes.numpy(),
        grids.kind.top,
    )


class _Grids:
    """The grid of each feature in the order of work; those of moving groups are made when work reaches them.

    Attributes:
        kind: Of all.
        groups: [in] int64, the group of each feature.
        scales: [groups, out].
        zeros: [groups, out].
    """

    def __init__(
        self, state: Tensor, groups: Tensor, importance: Tensor, plan: GroupPlan, kind: GridKind
    ) -> None:
        self.kind, self.groups = kind, groups
        self._state, self._importance, self._plan = state, importance, plan
        count = -(-len(groups) // plan.size)
        self.scales, self.zeros = (state.new_empty((count, state.shape[1])) for _ in range(2))
        if not plan.moving:
            for group in range(count):
                self._make(group, (groups == group).nonzero().squeeze(1))

    def make(self, index: int) -> None:
        """Make the grid of a moving group that begins with the feature at `index`."""
        if self._plan.moving and index % self._plan.size == 0:
            end = min(index + self._plan.size, len(self.groups))
            self._make(index // self._plan.size, torch.arange(index, end))

    def joined(self) -> Grid:
        """Of shape [out, groups]."""
        return Grid(self.scales.T.contiguous(), self.zeros.T.contiguous())

    def _make(self, group: int, indices: Tensor) -> None:
        grouped = self._state[indices].T.contiguous()  # [out, size]
        importance = self._importance[indices]
        if self._plan.search:
            grid = searched_grid(grouped, self.kind, _GroupLoss(grouped, importance, self.kind.top))
        else:
            grid = full_grid(grouped, self.kind)
        self.scales[group], self.zeros[group] = grid.scales.squeeze(1), grid.zeros.squeeze(1)


@dataclass(frozen=True, slots=True)
class _GroupLoss:
    """What a grid of groups [out, size] costs, [out, 1]: errors weighted by the features' importance [size]."""

    grouped: Tensor
    importance: Tensor
    top: int

    def __call__(self, grid: Grid) -> Tensor:
        found = torch.empty_like(grid.scales)
        scales, zeros, importance = grid.scales.numpy(), grid.zeros.numpy(), self.importance.numpy()
        losses(self.grouped.numpy(), scales, zeros, importance, found.numpy(), self.top)
        return found
