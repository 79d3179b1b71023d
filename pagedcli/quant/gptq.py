"""GPTQ: weights are rounded one input feature after the other, the rest makes up for each error.

After E. Frantar, S. Ashkboos, T. Hoefler, D. Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers" (2022, arXiv:2210.17323). Imports torch; computes in the dtype of the weights.

Weights lie as [in, out], a feature's weights side by side. With U the upper factor of the inverse Hessian
(H^-1 = U^T U), feature i is rounded and its error e = w_i - q_i is taken from the later ones:
w_j -= e * U_ij / U_ii. Errors reach the features of the same strip at once, those of the same block after the strip,
all others after the block: the same sums in larger products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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
        upper: [in, in] U with H^-1 = U^T U, features in the order of work.
        order: [in] int64, the feature that is worked on first, second, ...
        damp: That made the factorization work.
    """

    upper: Tensor
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
            return Factor(upper.to(gram.dtype), order, damp)
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
    order = factor.order
    state = weights.T[order]  # [in, out], a copy
    importance = factor.upper.diagonal().reciprocal().square()
    groups = order // plan.size
    if plan.moving:
        groups = torch.arange(len(order)) // plan.size
    grids = _Grids(state, groups, importance, plan, kind)
    unit = factor.upper / factor.upper.diagonal().unsqueeze(1)
    codes = torch.empty(state.shape, dtype=torch.uint8)
    for first in range(0, len(order), BLOCK):
        last = min(first + BLOCK, len(order))
        errors = state.new_empty((last - first, state.shape[1]))
        for start in range(first, last, STRIP):
            end = min(start + STRIP, last)
            strip = errors[start - first : end - first]
            _round_strip(state, codes, strip, unit, grids, start, end)
            state[end:last].addmm_(unit[start:end, end:last].T, strip, alpha=-1)
        state[last:].addmm_(unit[first:last, last:].T, errors, alpha=-1)
    back = torch.argsort(order)
    in_order = bool((groups[back] == torch.arange(len(order)) // plan.size).all())
    return Rounded(codes[back].T.contiguous(), grids.joined(), None if in_order else groups[back].int())


def _round_strip(
    state: Tensor, codes: Tensor, errors: Tensor, unit: Tensor, grids: _Grids, start: int, end: int
) -> None:
    """Features `start` to `end` - 1, one after the other; few operations each, as a feature's weights are short."""
    steps, zeros = torch.empty_like(errors), []
    rows, following = list(zip(state[start:end], errors, steps, strict=True)), unit[start:end, start:end]
    for index, (weights, error, taken) in enumerate(rows):
        grid = grids.at(start + index)
        grid.steps(weights, grids.kind, out=taken)
        torch.addcmul(weights, taken, grid.scales, value=-1, out=error)
        zeros.append(grid.zeros)
        if start + index + 1 < end:
            state[start + index + 1 : end].addr_(following[index, index + 1 :], error, alpha=-1)
    codes[start:end] = steps.add_(grids.kind.middle if grids.kind.symmetric else torch.stack(zeros))


class _Grids:
    """The grid of each feature in the order of work, made when it is first asked for."""

    def __init__(
        self, state: Tensor, groups: Tensor, importance: Tensor, plan: GroupPlan, kind: GridKind
    ) -> None:
        self.kind = kind
        self._state, self._importance, self._plan = state, importance, plan
        self._groups: list[int] = groups.tolist()
        count = -(-len(self._groups) // plan.size)
        shape = (count, state.shape[1])
        self._scales, self._zeros = state.new_empty(shape), state.new_empty(shape)
        self._made = [False] * count
        if not plan.moving:
            for group in range(count):
                self._make(group, (groups == group).nonzero().squeeze(1))

    def at(self, index: int) -> Grid:
        """Scales and zero points [out] of the feature that is worked on at `index`."""
        group = self._groups[index]
        if not self._made[group]:
            self._make(group, torch.arange(index, min(index + self._plan.size, len(self._groups))))
        return Grid(self._scales[group], self._zeros[group])

    def joined(self) -> Grid:
        """Of shape [out, groups]."""
        return Grid(self._scales.T.contiguous(), self._zeros.T.contiguous())

    def _make(self, group: int, indices: Tensor) -> None:
        grouped = self._state[indices].T.contiguous()  # [out, size]
        importance = self._importance[indices]
        if self._plan.search:
            grid = searched_grid(
                grouped, self.kind, lambda error: error.square_().mul_(importance).sum(-1, keepdim=True)
            )
        else:
            grid = full_grid(grouped, self.kind)
        self._scales[group], self._zeros[group] = grid.scales.squeeze(1), grid.zeros.squeeze(1)
        self._made[group] = True
