"""The inner steps of GPTQ: rounding one feature after the other, and what a grid costs. Rows too short for array calls.

After E. Frantar, S. Ashkboos, T. Hoefler, D. Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers" (2022, arXiv:2210.17323), section 3.3. Imports numpy.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from paged_kernels import _native


def round_strip(
    state: npt.NDArray[Any],
    unit: npt.NDArray[Any],
    scales: npt.NDArray[Any],
    zeros: npt.NDArray[Any],
    groups: npt.NDArray[Any],
    errors: npt.NDArray[Any],
    codes: npt.NDArray[Any],
    top: int,
) -> None:
    """Round some features to their grids, taking the error of each from the later ones.

    Code = clamp(round(w / scale), -zero, top - zero) + zero, error e = w - (code - zero) * scale, and then
    w_j -= unit[i, j] * e for all later j: products and differences rounded one by one, the same bits on every machine.
    Holds no GIL.

    Args:
        state: [features, out] float32 or float64, the weights; not changed.
        unit: [features, features] of the same dtype, U_ij / U_ii of the inverse Hessian's factor; the upper triangle.
        scales: [groups, out] of the same dtype.
        zeros: [groups, out] of the same dtype, whole numbers from 0 to `top`.
        groups: [features] int64, the row of `scales` for each.
        errors: [features, out] of the same dtype; filled.
        codes: [features, out] uint8; filled.
        top: The largest code, 255 at most.

    Raises:
        NativeError: Shapes or dtypes do not fit.
    """
    _native.gptq_strip(state, unit, scales, zeros, groups, errors, codes, top)


def losses(
    weights: npt.NDArray[Any],
    scales: npt.NDArray[Any],
    zeros: npt.NDArray[Any],
    importance: npt.NDArray[Any],
    out: npt.NDArray[Any],
    top: int,
) -> None:
    """What rounding groups of weights costs: sum over k of importance[k] * (rounded - weight)^2. Holds no GIL.

    Args:
        weights: [rows, size] float32 or float64, a group each.
        scales: [rows] of the same dtype.
        zeros: [rows] of the same dtype, whole numbers from 0 to `top`.
        importance: [size] of the same dtype.
        out: [rows] of the same dtype; filled. Summed in one order on every machine.
        top: The largest code, 255 at most.

    Raises:
        NativeError: Shapes or dtypes do not fit.
    """
    _native.gptq_losses(weights, scales, zeros, importance, out, top)
