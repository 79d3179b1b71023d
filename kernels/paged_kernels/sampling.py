"""Sampling on torch: counter-based random numbers, ranked candidates, Gumbel noise. The reference for the kernels.

May import torch only. Invariant: what comes out for a row depends on that row alone. Sums over a row are trees of
fixed shape made of elementwise additions, and on a CPU transcendental functions run row by row, because torch
vectorizes them by position in the whole tensor, where the last elements may round differently.

Philox4x32-10 is that of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

PHILOX_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

# Gumbel noise lies in here, because the uniform numbers under it have 32 bits.
NOISE_LOW = -math.log(-math.log(2.0**-33))
NOISE_HIGH = -math.log(-math.log1p(-(2.0**-33)))


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of broadcastable counters and keys.

    Args:
        counter: Four words, int64 holding 0 to 2**32 - 1.
        key: Two words, int64 holding 0 to 2**32 - 1.

    Returns:
        Four words, int64 holding 0 to 2**32 - 1.
    """
    word0, word1, word2, word3 = counter
    key0, key1 = key
    for _ in range(PHILOX_ROUNDS):
        # The products fill 64 bits: int64 wraps, which leaves the bits right, and the masks drop copied sign bits.
        product0, product1 = word0 * _MULTIPLIERS[0], word2 * _MULTIPLIERS[1]
        word0 = ((product1 >> 32) & _MASK) ^ word1 ^ key0
        word2 = ((product0 >> 32) & _MASK) ^ word3 ^ key1
        word1, word3 = product1 & _MASK, product0 & _MASK
        key0, key1 = (key0 + _KEY_STEPS[0]) & _MASK, (key1 + _KEY_STEPS[1]) & _MASK
    return word0, word1, word2, word3


def rowwise(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Apply an elementwise function so that a row's result does not depend on the other rows.

    Args:
        function: Elementwise, keeps shape and dtype.
        values: [rows, columns].
    """
    if values.device.type != "cpu" or values.shape[0] <= 1:
        return function(values)
    return torch.stack([function(row) for row in values])


def tree_sum(values: Tensor) -> Tensor:
    """Sum of each row as a tree of one shape for a given number of columns: [rows, columns] -> [rows]."""
    while values.shape[1] > 1:
        half = (values.shape[1] + 1) // 2
        upper = values[:, half:]
        values = torch.cat([values[:, : upper.shape[1]] + upper, values[:, upper.shape[1] : half]], dim=1)
    return values[:, 0]


def running_sum(values: Tensor) -> Tensor:
    """Inclusive prefix sums; item j depends on items 0 to j only, not on how many follow: [rows, columns]."""
    shift = 1
    while shift < values.shape[1]:
        values = torch.cat([values[:, :shift], values[:, shift:] + values[:, :-shift]], dim=1)
        shift *= 2
    return values


def gumbel_noise(token_ids: Tensor, seeds: Tensor, positions: Tensor, sample_indices: Tensor) -> Tensor:
    """Standard Gumbel noise, a pure function of (seed, position, sample index, token id).

    The counter is (token_id >> 2, position, sample_index, 0), the key is the seed, lane token_id & 3 is taken;
    of its 32 bits x comes v = (x + 0.5) / 2**32 and the noise -log(-log1p(-v)).

    Args:
        token_ids: [rows or 1, columns] int64.
        seeds: [rows] int64, the bits of an unsigned 64-bit seed.
        positions: [rows] int64, index in the sequence of the token that is sampled.
        sample_indices: [rows] int64.

    Returns:
        [rows, columns] float64.
    """
    key = ((seeds & _MASK)[:, None], ((seeds >> 32) & _MASK)[:, None])
    tail = (positions[:, None], sample_indices[:, None], torch.zeros_like(positions)[:, None])
    lanes = torch.stack(philox((token_ids >> 2, *tail), key))
    lane = (token_ids & 3).expand(lanes.shape[1:])
    bits = lanes.gather(0, lane[None])[0]
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-32
    return rowwise(lambda v: -torch.log(-torch.log1p(-v)), uniform)


def vocabulary_noise(vocab_size: int, seeds: Tensor, positions: Tensor, sample_indices: Tensor) -> Tensor:
    """`gumbel_noise` of all token ids, all four lanes of each counter used: [rows, vocab_size] float64."""
    quads = torch.arange((vocab_size + 3) // 4, device=seeds.device)[None]
    key = ((seeds & _MASK)[:, None], ((seeds >> 32) & _MASK)[:, None])
    tail = (positions[:, None], sample_indices[:, None], torch.zeros_like(positions)[:, None])
    bits = torch.stack(philox((quads, *tail), key), dim=2).flatten(1)[:, :vocab_size]
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-32
    return rowwise(lambda v: -torch.log(-torch.log1p(-v)), uniform)


def ranked(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` greatest of each row in order, ties to the lowest column.

    The selection may cut through a run of equal values at its end: then *which* of the last value's columns are
    among them is left open, as long as `count` is less than the number of columns.

    Args:
        values: [rows, columns], no NaN.
        count: 1 to the number of columns.

    Returns:
        Values [rows, count] descending and their columns [rows, count] int64.
    """
    if count == values.shape[1]:
        best, columns = torch.sort(values, dim=1, descending=True, stable=True)
        return best, columns
    columns = torch.topk(values, count, dim=1, sorted=False).indices.sort(dim=1).values
    best, order = torch.sort(values.gather(1, columns), dim=1, descending=True, stable=True)
    return best, columns.gather(1, order)


def log_normalizer(logits: Tensor) -> Tensor:
    """Logarithm of the sum of exp of each row: [rows, columns] float64 -> [rows]; NaN where a row is all -inf."""
    best = logits.amax(dim=1, keepdim=True)
    total = tree_sum(rowwise(torch.exp, logits - best))
    return (best + rowwise(torch.log, total[:, None]))[:, 0]
