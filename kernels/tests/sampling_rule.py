"""The sampler's rule in numpy, written down plainly: every token's noise, and a full sort. For tests of the kernels."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def philox(counter: list[Array], key: tuple[int, int]) -> list[Array]:
    """Philox4x32-10 on Python's whole numbers."""
    c = [np.asarray(word, object) for word in counter]
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


@cache
def noise(size: int, seed: int, position: int, sample_index: int) -> Array:
    quads = np.arange(-(-size // 4)).astype(object)
    same = [np.full(len(quads), value, object) for value in (position, sample_index, 0)]
    words = philox([quads, *same], (seed & 0xFFFFFFFF, seed >> 32))
    bits = np.stack(words, 1).reshape(-1)[:size].astype(np.float64)
    return -np.log(-np.log1p(-(bits + 0.5) * 2.0**-32))


def kept(scaled: Array, top_k: int, top_p: float, min_p: float) -> Array:
    """Ids that the filters keep, by a full sort."""
    order = np.lexsort((np.arange(len(scaled)), -scaled))
    weights = np.exp(scaled[order])
    keep = np.ones(len(order), bool)
    if top_k > 0:
        keep[top_k:] = False
    total = weights[keep].sum()
    before = np.concatenate([[0.0], np.cumsum(np.where(keep, weights, 0.0))[:-1]])
    if top_p < 1.0:
        keep &= before < top_p * total
    keep &= weights >= min_p
    return order[keep & (scaled[order] > -np.inf)]


def choose(logits: Array, row: Any) -> int:
    wide = logits.astype(np.float64)
    scaled = (wide - wide.max()) / row["temperature"]
    score = scaled + noise(len(scaled), int(row["seed"]), int(row["position"]), int(row["sample_index"]))
    ids = kept(scaled, int(row["top_k"]), float(row["top_p"]), float(row["min_p"]))
    return int(ids[score[ids].argmax()])
