"""Meeting a contract: which fused linears are left unquantized next. Plain values only."""

from __future__ import annotations

from collections.abc import Mapping

from pagedcli.quant.options import PlannedLinear, QuantizePlan

# With more of the weights unquantized it is no quantized model any more.
MOST_KEPT = 0.75
# A first guess takes errors for additive, which they are not quite.
SAFETY = 1.25


def next_to_keep(plan: QuantizePlan, errors: Mapping[str, float], excess: float) -> tuple[str, ...]:
    """Names of the whole fused linears with the largest errors that are to be left unquantized, besides those that are.

    As many as hold the part of the error that is too much; at least one, and at least as many as are left already, so
    that a demand is met, or found to be out of reach, in few rounds.

    Args:
        plan: What was done.
        errors: Of the linears, by name.
        excess: The part of the damage that must go, 0 to 1.

    Returns:
        None if that would leave more than three quarters of the weights unquantized.
    """
    candidates = sorted(
        (linear for linear in plan.linears if linear.kept is None),
        key=lambda linear: group_error(linear, errors),
        reverse=True,
    )
    least = max(1, len(plan.linears) - len(candidates))
    wanted = min(1.0, SAFETY * excess) * sum(group_error(linear, errors) for linear in candidates)
    weights = sum(linear.weights for linear in plan.linears)
    room = MOST_KEPT * weights - sum(linear.weights for linear in plan.linears if linear.kept is not None)
    chosen: list[PlannedLinear] = []
    held = 0.0
    for linear in candidates:
        if linear.weights > room or (len(chosen) >= least and held >= wanted):
            break
        chosen.append(linear)
        room -= linear.weights
        held += group_error(linear, errors)
    return tuple(name for linear in chosen for name in linear.names)


def group_error(linear: PlannedLinear, errors: Mapping[str, float]) -> float:
    """Of the worst of its parts."""
    return max(errors.get(name, 0.0) for name in linear.names)
