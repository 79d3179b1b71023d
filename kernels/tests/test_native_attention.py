"""Paged attention of every variant against float64, and the same bits whatever the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from native_support import (
    Array,
    Guarded,
    assert_close,
    call,
    dtype_code,
    dtypes,
    exact,
    isas,
    random,
    runtime,
)

SPLIT = 256


@dataclass
class Case:
    """Sequences of some lengths over scattered blocks; values in memory that nothing wrote are NaN."""

    heads: tuple[int, int, int]
    lengths: tuple[int, ...]
    block_size: int
    dtype: str
    window: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        num_heads, num_kv_heads, head_dim = self.heads
        total = sum(self.lengths)
        self.q = random((total, num_heads, head_dim), self.dtype, self.seed)
        self.keys = random((total, num_kv_heads, head_dim), self.dtype, self.seed + 1)
        self.values = random((total, num_kv_heads, head_dim), self.dtype, self.seed + 2)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self.scale = head_dim**-0.5
        self._fill()

    def _fill(self) -> None:
        _, num_kv_heads, head_dim = self.heads
        needed = [-(-length // self.block_size) for length in self.lengths]
        num_blocks = sum(needed) + 3
        order = np.random.default_rng(self.seed + 3).permutation(num_blocks)
        self.table = np.full((len(self.lengths), max(needed)), order[-1], np.int32)
        shape = (num_blocks, num_kv_heads, self.block_size, head_dim)
        keys, values = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        taken = 0
        for index, length in enumerate(self.lengths):
            self.table[index, : needed[index]] = order[taken : taken + needed[index]]
            taken += needed[index]
            at = np.arange(length)
            blocks, offsets = self.table[index, at // self.block_size], at % self.block_size
            rows = slice(self.starts[index], self.starts[index + 1])
            keys[blocks, :, offsets] = self.keys[rows]
            values[blocks, :, offsets] = self.values[rows]
        flat = (num_blocks * num_kv_heads * self.block_size, head_dim)
        self.key_cache = Guarded(*flat, self.dtype).write(keys.reshape(flat))
        self.value_cache = Guarded(*flat, self.dtype).write(values.reshape(flat))

    def run(
        self,
        isa: str,
        rows: list[tuple[int, int]] | None = None,
        *,
        tile_rows: int = 0,
        parts: bool = False,
        threads: int = 2,
    ) -> Array:
        """Attention of rows [begin, end) of every sequence (all by default): [rows, num_heads * head_dim]."""
        num_heads, num_kv_heads, head_dim = self.heads
        rows = rows or [(0, length) for length in self.lengths]
        used = [index for index, (begin, end) in enumerate(rows) if end > begin]
        counts = [rows[index][1] - rows[index][0] for index in used]
        picked = np.concatenate([self.starts[index] + np.arange(*rows[index]) for index in used])
        lens = np.array([rows[index][1] for index in used], np.int32)
        tile_rows = tile_rows or max(1, 64 // (num_heads // num_kv_heads))
        tiles = [
            index << 32 | first for index, count in enumerate(counts) for first in range(0, count, tile_rows)
        ]
        size = num_heads * head_dim
        q = Guarded(len(picked), size, self.dtype, size + 3).write(self.q[picked].reshape(-1, size))
        out = Guarded(len(picked), size, self.dtype, size + 5)
        splits = -(-int(lens.max()) // SPLIT)
        partial = Guarded(len(picked) * num_heads * splits, head_dim + 2, "float32") if parts else None
        fields = {
            "q": q, "key": self.key_cache, "value": self.value_cache, "out": out, "rows": len(picked),
            "block_table": np.ascontiguousarray(self.table[used]), "table_stride": self.table.shape[1],
            "query_start": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), "seq_lens": lens,
            "num_seqs": len(used), "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
            "block_size": self.block_size, "q_stride": q.stride, "out_stride": out.stride,
            "window": self.window, "scale": self.scale, "dtype": dtype_code(self.dtype),
            "tiles": np.array(tiles, np.int64), "num_tiles": len(tiles), "tile_rows": tile_rows,
            "partial": partial, "num_splits": splits,
        }  # fmt: skip
        call(isa, "attention", "PagedAttention", threads, **fields)
        if parts:
            call(isa, "attention_join", "PagedAttention", threads, **fields)
        return out.read()

    def expected(self) -> Array:
        """float64, all rows."""
        num_heads, num_kv_heads, head_dim = self.heads
        group = num_heads // num_kv_heads
        out = np.empty((len(self.q), num_heads, head_dim))
        for first, last in zip(self.starts, self.starts[1:], strict=False):
            q, keys, values = (x[first:last].astype(np.float64) for x in (self.q, self.keys, self.values))
            keys, values = keys.repeat(group, 1), values.repeat(group, 1)
            scores = np.einsum("qhd,khd->hqk", q, keys) * self.scale
            at, seen = np.arange(last - first)[:, None], np.arange(last - first)[None]
            hidden = seen > at
            if self.window:
                hidden |= seen <= at - self.window
            weights = np.exp(np.where(hidden, -np.inf, scores - scores.max(-1, keepdims=True)))
            out[first:last] = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), values)
        return out.reshape(len(self.q), -1)


def check(case: Case, got: Array, expected: Array | None = None) -> None:
    # Weights sum to 1 and values stay below 6; in bfloat16 they may be rounded before the second product.
    rounding = 6.0 if case.dtype == "float32" else 6.0 * 2**16
    head_dim = case.heads[2]
    assert_close(
        got,
        case.expected() if expected is None else expected,
        case.dtype,
        rounding,
        steps=4.0 + (head_dim / 2 if case.dtype == "float32" else 0),
    )


@isas
@dtypes
@pytest.mark.parametrize(
    "heads", [(3, 1, 64), (2, 2, 80), (14, 2, 96), (8, 1, 128), (3, 3, 256), (4, 2, 2), (6, 2, 10)]
)
def test_heads(isa: str, dtype: str, heads: tuple[int, int, int]) -> None:
    case = Case(heads, (1, 15, 16, 17, 33, 70), 16, dtype)
    check(case, case.run(isa))


BLOCKS = ((3, 1, 64), (1, 31, 600))


@cache
def expected_of_blocks(dtype: str, window: int) -> Array:
    """The oracle knows no blocks."""
    return Case(*BLOCKS, 16, dtype, window).expected()


@cache
def in_blocks_of_7(isa: str, dtype: str, window: int) -> Array:
    return Case(*BLOCKS, 7, dtype, window).run(isa)


@isas
@dtypes
@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64, 256])
@pytest.mark.parametrize("window", [0, 1, 20, 300])
def test_blocks_and_windows(isa: str, dtype: str, block_size: int, window: int) -> None:
    runtime(isa)  # skips what is not here before anything is computed
    case = Case(*BLOCKS, block_size, dtype, window)
    got = case.run(isa)
    check(case, got, expected_of_blocks(dtype, window))
    np.testing.assert_array_equal(got, in_blocks_of_7(isa, dtype, window))


@isas
@dtypes
@pytest.mark.parametrize("window", [0, 270])
def test_a_row_has_the_same_bits_under_any_schedule(isa: str, dtype: str, window: int) -> None:
    case = Case((4, 2, 64), (1000, 70, 520), 16, dtype, window)
    whole = case.run(isa)
    for threads in (1, 3):
        np.testing.assert_array_equal(case.run(isa, threads=threads), whole)
    for tile_rows in (1, 7, 100):
        np.testing.assert_array_equal(case.run(isa, tile_rows=tile_rows), whole)
    np.testing.assert_array_equal(case.run(isa, parts=True), whole)
    for chunk in (1, 13, 256):
        for begin in range(0, 1000, chunk if chunk > 1 else 97):
            rows = [(begin, min(begin + chunk, length)) for length in case.lengths]
            picked = np.concatenate([case.starts[i] + np.arange(*span) for i, span in enumerate(rows)])
            for parts in (False, True):
                np.testing.assert_array_equal(case.run(isa, rows, parts=parts), whole[picked])


@isas
@dtypes
def test_large_scores_do_not_overflow(isa: str, dtype: str) -> None:
    case = Case((2, 1, 16), (300,), 16, dtype)
    case.q = exact(case.q * 1000.0, dtype)
    got = case.run(isa)
    assert np.isfinite(got).all()
    # So large, that each row takes the value of its best key, where no other comes near.
    scores = (
        np.einsum("qhd,kd->qhk", case.q.astype(np.float64), case.keys[:, 0].astype(np.float64)) * case.scale
    )
    scores = np.where(np.arange(300) > np.arange(300)[:, None, None], -np.inf, scores)
    ranked = np.sort(scores, -1)
    clear = np.isneginf(ranked[..., -2]) | (ranked[..., -1] - ranked[..., -2] > 90.0)
    best = case.values[:, 0][scores.argmax(-1)]
    np.testing.assert_array_equal(got.reshape(300, 2, 16)[clear], best[clear])
