"""The inner steps of GPTQ against the paper's update written plainly, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from paged_kernels.gptq import losses, round_strip
from paged_kernels.native import NativeError

GROUPS = 3


def problem(features: int, columns: int, dtype: type, bits: int = 4, seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    top = 2**bits - 1
    return {
        "state": random.standard_normal((features, columns)).astype(dtype),
        "unit": np.triu(random.standard_normal((features, features)) / features).astype(dtype),
        "scales": random.uniform(0.05, 0.3, (GROUPS, columns)).astype(dtype),
        "zeros": random.integers(0, top + 1, (GROUPS, columns)).astype(dtype),
        "groups": random.integers(0, GROUPS, features),
        "errors": np.full((features, columns), np.nan, dtype),
        "codes": np.full((features, columns), 99, np.uint8),
        "top": top,
    }


def reference(given: dict[str, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(errors, codes): the later features are changed at once, each product and difference rounded."""
    left = given["state"].copy()
    errors, codes = np.empty_like(left), np.empty(left.shape, np.uint8)
    for i, group in enumerate(given["groups"]):
        scale, zero = given["scales"][group], given["zeros"][group]
        steps = np.clip(np.rint(left[i] / scale), -zero, given["top"] - zero)
        errors[i], codes[i] = left[i] - steps * scale, steps + zero
        for j in range(i + 1, len(left)):
            left[j] = left[j] - given["unit"][i, j] * errors[i]
    return errors, codes


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("features", "columns"), [(1, 1), (32, 512), (32, 33), (7, 31), (20, 100)])
def test_equals_plain_loops_to_the_bit(features: int, columns: int, bits: int, dtype: type) -> None:
    given = problem(features, columns, dtype, bits)
    errors, codes = reference(given)
    round_strip(**given)
    np.testing.assert_array_equal(given["codes"], codes)
    np.testing.assert_array_equal(given["errors"], errors)


def test_ties_go_to_even_and_ends_are_kept() -> None:
    given = problem(1, 6, np.float32)
    given |= {"scales": np.ones((1, 6), np.float32), "zeros": np.full((1, 6), 8, np.float32)}
    given |= {"groups": np.zeros(1, np.int64), "state": np.float32([[0.5, 1.5, -0.5, 1e30, -1e30, np.nan]])}
    round_strip(**given)
    assert given["codes"][0].tolist() == [8, 10, 8, 15, 0, 0]


def test_parts_of_larger_arrays() -> None:
    given = problem(16, 40, np.float32)
    errors, codes = reference(given)
    wide = np.full((16, 60), np.nan, np.float32)
    wide[:, 10:50] = given["state"]
    unit = np.full((40, 40), np.nan, np.float32)
    unit[8:24, 8:24] = given["unit"]
    round_strip(**{**given, "state": wide[:, 10:50], "unit": unit[8:24, 8:24]})
    np.testing.assert_array_equal(given["codes"], codes)
    np.testing.assert_array_equal(given["errors"], errors)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"state": np.zeros((4, 8), np.float16)}, "float32 or float64"),
        ({"state": np.zeros(8, np.float32)}, "state is"),
        ({"state": np.zeros((4, 16), np.float32)[:, ::2]}, "side by side"),
        ({"unit": np.zeros((3, 4), np.float32)}, "unit is"),
        ({"unit": np.zeros((4, 4))}, "unit has elements of 8 bytes"),
        ({"scales": np.ones((3, 7), np.float32)}, "scales and zero points"),
        ({"zeros": np.ones((2, 8), np.float32)}, "scales and zero points"),
        ({"groups": np.array([0, 1, 3, 0])}, "group 3"),
        ({"groups": np.array([0, 1, -1, 0])}, "group -1"),
        ({"groups": np.array([0, 1])}, "at least 4"),
        ({"errors": np.zeros((3, 8), np.float32)}, "at least 32"),
        ({"codes": np.zeros((4, 7), np.uint8)}, "at least 32"),
        ({"top": 256}, "codes from 0 to 256"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(NativeError, match=says):
        round_strip(**{**problem(4, 8, np.float32), **changed})


@pytest.mark.parametrize(("dtype", "within"), [(np.float32, 1e-5), (np.float64, 1e-13)])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 7), (5, 64), (2, 130)])
def test_losses_are_those_of_plain_numpy(rows: int, size: int, dtype: type, within: float) -> None:
    random = np.random.default_rng(rows)
    weights, importance = random.standard_normal((rows, size)), random.uniform(0.1, 5, size)
    scales, zeros = random.uniform(0.05, 0.3, rows), random.integers(0, 16, rows)
    given = [value.astype(dtype) for value in (weights, scales, zeros, importance)]
    out = np.full(rows, np.nan, dtype)
    losses(*given, out, 15)
    wide = [value.astype(np.float64) for value in given]
    scale, zero = wide[1][:, None], wide[2][:, None]
    # The quotient is rounded as it is in the dtype: near a tie that decides.
    steps = np.clip(np.rint(given[0] / given[1][:, None]), -zero, 15 - zero)
    np.testing.assert_allclose(out, ((steps * scale - wide[0]) ** 2 * wide[3]).sum(1), rtol=within)


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (0, np.zeros((2, 8), np.float16), "float32 or float64"),
        (0, np.zeros((2, 16), np.float32)[:, ::2], "not contiguous"),
        (1, np.ones(1, np.float32), "scales has 1 elements"),
        (2, np.ones(2), "zeros has elements of 8 bytes"),
        (3, np.ones(7, np.float32), "importance has 7"),
        (4, np.zeros(1, np.float32), "losses has 1"),
        (5, 0, "codes from 0 to 0"),
    ],
)
def test_losses_that_do_not_fit_are_refused(place: int, value: Any, says: str) -> None:
    ones = np.ones(2, np.float32)
    given: list[Any] = [np.zeros((2, 8), np.float32), ones, ones, np.ones(8, np.float32), ones.copy(), 15]
    given[place] = value
    with pytest.raises(NativeError, match=says):
        losses(*given)
