"""Shape checks shared by every implementation of the ops. Imports nothing; a failure is a caller's defect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ShapeError(ValueError):
    """Operands do not fit each other: names the operand, its shape and the one expected."""


def check_shape(name: str, value: Any, expected: Sequence[int | None]) -> None:
    """`value.shape` must be `expected`, where None stands for any size."""
    shape = tuple(value.shape)
    fits = len(shape) == len(expected) and all(
        want in (None, has) for want, has in zip(expected, shape, strict=True)
    )
    if not fits:
        raise ShapeError(f"{name} has shape {list(shape)}, expected {list(expected)}")


def check_heads(num_heads: int, num_kv_heads: int) -> int:
    """Query heads to one key-value head."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ShapeError(f"{num_heads} query heads are not a multiple of {num_kv_heads} key-value heads")
    return num_heads // num_kv_heads
