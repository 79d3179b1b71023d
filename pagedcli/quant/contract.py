"""Meeting a contract: which fused linears are left unquantized next. Plain values only."""

from __future__ import annotations

from collections.abc import Mapping

from pagedcli.quant.options import PlannedLinear, QuantizePlan
from pagedcli.quant.quality import Contract, Quality

# Half of the weights unquantized is no quantized model any more.
MOST_KEPT = 0.5
# A first guess takes errors for additive, which they are not quite.
SAFETY = 1.25


def next_to_keep(plan: QuantizePlan, quality: Quality, contract: Contract) -> tuple[str, ...]:
    """Names of the whole fused linears with the largest errors that are to be left unquantized besides those that are.

    As many as hold the part of the error that is too much, at least one; none if that would leave more than half of the
    weights unquantized.
    """
    errors = {layer.name: layer.error for layer in quality.layers}
    candidates = sorted(
        (linear for linear in plan.linears if linear.kept is None),
        key=lambda linear: group_error(linear, errors),
        reverse=True,
    )
    total = sum(group_error(linear, errors) for linear in candidates)
    wanted = min(1.0, SAFETY * excess(quality, contract)) * total
    chosen: list[PlannedLinear] = []
    while candidates and (not chosen or sum(group_error(linear, errors) for linear in chosen) < wanted):
        chosen.append(candidates.pop(0))
    weights = sum(linear.weights for linear in plan.linears)
    kept = sum(linear.weights for linear in plan.linears if linear.kept is not None)
    if kept + sum(linear.weights for linear in chosen) > MOST_KEPT * weights:
        chosen = _within(plan, chosen, MOST_KEPT * weights - kept)
    return tuple(name for linear in chosen for name in linear.names)


def group_error(linear: PlannedLinear, errors: Mapping[str, float]) -> float:
    """Of the worst of its parts."""
    return max(errors.get(name, 0.0) for name in linear.names)


def excess(quality: Quality, contract: Contract) -> float:
    """The part of the damage that must go, 0 to 1, by the harder of the demands."""
    parts = [0.0]
    for limit, found in (
        (contract.max_kl, quality.kl_mean),
        (contract.max_perplexity_increase, quality.perplexity_increase),
    ):
        if limit is not None and found > limit:
            parts.append(1.0 - limit / found)
    return max(parts)


def _within(plan: QuantizePlan, chosen: list[PlannedLinear], room: float) -> list[PlannedLinear]:
    """The first of them that fit."""
    fitting = []
    for linear in chosen:
        if linear.weights > room:
            break
        room -= linear.weights
        fitting.append(linear)
    return fitting
