"""GPTQ against the paper's recursion, written plainly: one feature at a time, the inverse Hessian shrunk each time."""

from __future__ import annotations

import pytest
import torch

from pagedcli.quant.gptq import Factor, GroupPlan, factorize, round_weights
from pagedcli.quant.grid import GridKind, full_grid

FEATURES, ROWS = 200, 41
KIND = GridKind(4, False, "float16")


def problem(features: int = FEATURES, rank: int = 400, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, Gram matrix), features strongly correlated and of very different size."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn((features, features), generator=generator, dtype=torch.float64)
    mix = mix * torch.logspace(0, -2, features, dtype=torch.float64)
    x = torch.randn((rank, features), generator=generator, dtype=torch.float64) @ mix.T / features**0.5
    weights = torch.randn((ROWS, features), generator=generator, dtype=torch.float64) * 0.1
    return weights, x.T @ x / rank


def reference(
    weights: torch.Tensor,
    gram: torch.Tensor,
    damp: float,
    order: list[int],
    size: int,
    *,
    moving: bool,
    kind: GridKind,
) -> torch.Tensor:
    """The weights after rounding, [out, in]."""
    inverse = torch.linalg.inv(gram + damp * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype))
    left, done = weights.clone(), torch.empty_like(weights)
    grids = {}
    if not moving:
        for group in range(-(-len(gram) // size)):
            grids[group] = full_grid(left[:, group * size : (group + 1) * size], kind)
    for place, feature in enumerate(order):
        group = place // size if moving else feature // size
        if group not in grids:
            grids[group] = full_grid(left[:, order[place : place + size]], kind)
        done[:, feature] = grids[group].nearest(left[:, feature : feature + 1], kind)[:, 0]
        pivot = inverse[feature, feature].clone()
        error = (left[:, feature] - done[:, feature]) / pivot
        left = left - torch.outer(error, inverse[feature])
        inverse = inverse - torch.outer(inverse[:, feature], inverse[feature]) / pivot
    return done


def decoded(weights: torch.Tensor, factor: Factor, plan: GroupPlan, kind: GridKind) -> torch.Tensor:
    found = round_weights(weights, factor, plan, kind)
    groups = torch.arange(weights.shape[1]) // plan.size if found.g_idx is None else found.g_idx.long()
    return (found.codes.double() - found.grid.zeros[:, groups]) * found.grid.scales[:, groups]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("by_activation", "moving"), [(False, True), (True, False), (True, True), (False, False)]
)
@pytest.mark.parametrize("size", [12, 20, 32, 200])
def test_equals_the_plain_recursion(
    bits: int, symmetric: bool, by_activation: bool, moving: bool, size: int
) -> None:
    kind = GridKind(bits, symmetric, "float16")
    weights, gram = problem()
    factor = factorize(gram, 0.01, by_activation=by_activation)
    assert factor is not None
    order = factor.order.tolist()
    if by_activation:
        assert order == sorted(range(FEATURES), key=lambda feature: -float(gram[feature, feature]))
    else:
        assert order == list(range(FEATURES))
    expected = reference(weights, gram, 0.01, order, size, moving=moving, kind=kind)
    found = decoded(weights, factor, GroupPlan(size, moving, search=False), kind)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def output_loss(difference: torch.Tensor, gram: torch.Tensor) -> float:
    return float(((difference @ gram) * difference).sum())


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("moving", [False, True])
def test_is_much_better_than_rounding(search: bool, moving: bool) -> None:
    weights, gram = problem(192)
    factor = factorize(gram.float(), 0.01, by_activation=True)
    assert factor is not None
    found = decoded(weights.float(), factor, GroupPlan(64, moving, search), KIND)
    grouped = weights.view(ROWS, -1, 64)
    nearest = full_grid(grouped, KIND).nearest(grouped, KIND).view_as(weights)
    assert output_loss(found - weights, gram) < 0.4 * output_loss(nearest - weights, gram)


def test_without_correlation_it_is_rounding() -> None:
    weights, _ = problem(128)
    gram = torch.diag(torch.rand(128, dtype=torch.float64) + 0.1)
    factor = factorize(gram, 0.01, by_activation=True)
    assert factor is not None
    grouped = weights.view(ROWS, -1, 32)
    nearest = full_grid(grouped, KIND).nearest(grouped, KIND).view_as(weights)
    found = decoded(weights, factor, GroupPlan(32, moving=False, search=False), KIND)
    torch.testing.assert_close(found, nearest, rtol=0, atol=1e-15)


def test_g_idx_only_where_groups_moved() -> None:
    weights, gram = problem(128)
    factor = factorize(gram, 0.01, by_activation=True)
    assert factor is not None
    still = round_weights(weights, factor, GroupPlan(32, moving=False, search=False), KIND)
    moved = round_weights(weights, factor, GroupPlan(32, moving=True, search=False), KIND)
    assert still.g_idx is None
    assert moved.g_idx is not None
    assert torch.bincount(moved.g_idx).tolist() == [32] * 4
    whole = round_weights(weights, factor, GroupPlan(128, moving=True, search=False), KIND)
    assert whole.g_idx is None  # one group: there is nothing to say


def test_damping_is_raised_until_it_works_and_given_up_at_last() -> None:
    _, gram = problem(64)
    good = factorize(gram, 0.01, by_activation=False)
    assert good is not None
    assert good.damp == 0.01
    # Not positive definite by rounding errors that a little damping outweighs.
    values, vectors = torch.linalg.eigh(gram)
    values[:3] = -0.02 * float(gram.diagonal().mean())
    bent = vectors @ torch.diag(values) @ vectors.T
    raised = factorize(bent, 0.001, by_activation=False)
    assert raised is not None
    assert raised.damp == pytest.approx(0.1)
    values[:3] = -5.0 * float(gram.diagonal().mean())
    assert factorize(vectors @ torch.diag(values) @ vectors.T, 0.01, by_activation=False) is None
    assert factorize(torch.full((8, 8), float("nan")), 0.01, by_activation=False) is None


def test_damping_of_zero_is_raised_where_text_is_short() -> None:
    weights, gram = problem(64, rank=5)
    factor = factorize(gram.float(), 0.0, by_activation=True)
    assert factor is not None
    found = round_weights(weights.float(), factor, GroupPlan(32, moving=False, search=True), KIND)
    assert bool(torch.isfinite(found.grid.scales).all())


def test_a_feature_that_is_always_zero_is_rounded() -> None:
    weights, gram = problem(64)
    gram[5] = gram[:, 5] = 0
    factor = factorize(gram, 0.0, by_activation=True)
    assert factor is not None
    assert factor.damp == 0.0
    found = decoded(weights, factor, GroupPlan(32, moving=False, search=False), KIND)
    grid = full_grid(weights[:, :32], KIND)
    torch.testing.assert_close(found[:, 5], grid.nearest(weights[:, 5:6], KIND)[:, 0], rtol=0, atol=1e-15)
