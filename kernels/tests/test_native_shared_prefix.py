"""Decodes over the same first blocks share that part of attention, and have the bits of each alone all the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from native_support import Array, Stored, dtypes, isas, random, runtime
from paged_kernels.native import KVPool, PackedWeight, Program, Runtime

SPLIT, VOCABULARY, HIDDEN, POSITIONS = 256, 64, 32, 1024
Heads = tuple[int, int, int]
HEADS: Heads = (6, 2, 16)
Tables = list[list[int]]


@dataclass(frozen=True)
class Family:
    """Sequences of given lengths, each beginning with so many blocks of another one (or of none)."""

    lengths: tuple[int, ...]
    parents: tuple[tuple[int, int], ...]  # (sequence, tokens in common), of sequences before; (0, 0): nothing

    def tokens(self) -> list[list[int]]:
        drawn = np.random.default_rng(3).integers(0, VOCABULARY, (len(self.lengths), POSITIONS)).tolist()
        found: list[list[int]] = []
        for index, (length, (parent, common)) in enumerate(zip(self.lengths, self.parents, strict=True)):
            found.append([*(found[parent][:common] if common else []), *drawn[index][common:length]])
        return found

    def tables(self, block_size: int) -> tuple[Tables, int]:
        """Whole blocks in common are the same ones; all are scattered."""
        free = iter(np.random.default_rng(4).permutation(4096).tolist())
        tables: Tables = []
        for length, (parent, common) in zip(self.lengths, self.parents, strict=True):
            same = tables[parent][: common // block_size] if common else []
            tables.append([*same, *(next(free) for _ in range(len(same), -(-length // block_size)))])
        return tables, 4096


class Model:
    """One layer of attention over embeddings; the logits are what it gives."""

    def __init__(
        self,
        on: Runtime,
        dtype: str,
        block_size: int,
        num_blocks: int,
        window: int | None = None,
        heads: Heads = HEADS,
    ) -> None:
        self.block_size = block_size
        num_heads, num_kv_heads, head_dim = heads
        self.kv = KVPool(1, num_blocks, num_kv_heads, block_size, head_dim, dtype)
        program = self.program = Program(on, dtype, block_size)

        def weight(rows: int, columns: int, seed: int) -> PackedWeight:
            return on.pack([Stored(random((rows, columns), "bfloat16", seed, scale=columns**-0.5))], dtype)

        table = weight(VOCABULARY, HIDDEN, 1)
        angles = np.random.default_rng(5).uniform(0, 6, (POSITIONS, head_dim // 2)).astype(np.float32)
        turns = (on.upload(np.cos(angles)), on.upload(np.sin(angles)))
        width = (num_heads + 2 * num_kv_heads) * head_dim
        qkv = program.linear(program.embedding(table), weight(width, HIDDEN, 2))
        q = program.rope_kv_write(qkv, heads, turns, self.kv, 0)
        attended = program.attention(q, heads, 0.5, window, self.kv, 0)
        mixed = program.linear(program.logit_rows(attended), weight(HIDDEN, num_heads * head_dim, 3))
        program.finish(program.head(mixed, table))

    def step(
        self, tokens: list[list[int]], tables: Tables, rows: list[tuple[int, int, int]]
    ) -> tuple[Array, ...]:
        """Rows are (sequence, begin, end); the arrays of a step."""
        positions = np.concatenate([np.arange(begin, end) for _, begin, end in rows])
        counts = [end - begin for _, begin, end in rows]
        width = max(len(tables[s]) for s, _, _ in rows)
        blocks = np.array([[*tables[s], *[0] * (width - len(tables[s]))] for s, _, _ in rows], np.int32)
        place = np.repeat(np.arange(len(rows)), counts)
        slots = blocks[place, positions // self.block_size].astype(np.int64)
        return (
            np.concatenate([np.array(tokens[s][begin:end]) for s, begin, end in rows]),
            positions,
            slots * self.block_size + positions % self.block_size,
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            np.array([end for _, _, end in rows], np.int32),
            blocks,
            np.arange(len(positions)),
        )

    def run(self, *step: Array) -> Array:
        self.program.run(*step)
        return self.program.logits().copy()

    def shares(self, *step: Array) -> bool:
        return "attention_shared" in [name for name, _ in self.program.time_calls(*step)]


def check(
    isa: str,
    dtype: str,
    family: Family,
    block_size: int,
    *,
    window: int | None = None,
    heads: Heads = HEADS,
    shared: bool = True,
) -> None:
    tokens = family.tokens()
    tables, num_blocks = family.tables(block_size)
    model = Model(runtime(isa, threads=2), dtype, block_size, num_blocks, window, heads)
    for index, length in enumerate(family.lengths):
        model.run(*model.step(tokens, tables, [(index, 0, length)]))
    decodes = [(index, length - 1, length) for index, length in enumerate(family.lengths)]
    alone = np.concatenate([model.run(*model.step(tokens, tables, [row])) for row in decodes])
    together = model.step(tokens, tables, decodes)
    assert model.shares(*together) == shared
    np.testing.assert_array_equal(model.run(*together), alone)
    # In another order, beside a sequence of many rows.
    chunk = (0, family.lengths[0] // 2, family.lengths[0])
    mixed = [*reversed(decodes[1:]), chunk]
    expected = np.concatenate([alone[:0:-1], model.run(*model.step(tokens, tables, [chunk]))])
    np.testing.assert_array_equal(model.run(*model.step(tokens, tables, mixed)), expected)


@isas
@dtypes
@pytest.mark.parametrize("block_size", [1, 16, 48, 256])
def test_a_common_beginning(isa: str, dtype: str, block_size: int) -> None:
    # 576 is whole blocks of all sizes but 256, of which 512 are.
    check(isa, dtype, Family((600, 590, 700, 577), ((0, 0), (0, 576), (0, 576), (0, 576))), block_size)


@isas
@dtypes
def test_more_decodes_than_fit_a_part(isa: str, dtype: str) -> None:
    count = 50
    lengths = tuple(300 + 3 * index for index in range(count))
    check(isa, dtype, Family(lengths, ((0, 0), *((0, 288),) * (count - 1))), 16)


@isas
def test_a_tree_of_beginnings(isa: str) -> None:
    # 1 and 2 share 512 with 0, 3 and 4 another 256 with each other, 5 nothing, 6 less than a split.
    family = Family(
        (800, 700, 520, 600, 800, 900, 400),
        ((0, 0), (0, 512), (0, 512), (0, 256), (3, 592), (0, 0), (0, 240)),
    )
    check(isa, "bfloat16", family, 16)


@isas
def test_others_share_what_the_first_does_not(isa: str) -> None:
    # All begin with the same 64, as with a system prompt; 2 and 3 have 600 in common with 1.
    check(isa, "bfloat16", Family((650, 700, 701, 702), ((0, 0), (0, 64), (1, 600), (1, 600))), 16)


@isas
def test_a_decode_that_ends_with_the_split(isa: str) -> None:
    # The last rows see 256 and 512 keys: all that they see is shared, but for blocks that they write themselves.
    check(isa, "bfloat16", Family((257, 256, 258), ((0, 0), (0, 256), (0, 256))), 16)


@isas
@pytest.mark.parametrize(
    ("family", "window"),
    [
        (Family((600, 600), ((0, 0), (0, 0))), None),
        (Family((600, 600), ((0, 0), (0, 240))), None),
        (Family((600, 250), ((0, 0), (0, 240))), None),
        (Family((600, 600), ((0, 0), (0, 512))), 300),
    ],
)
def test_nothing_is_shared(isa: str, family: Family, window: int | None) -> None:
    check(isa, "bfloat16", family, 16, window=window, shared=False)


@isas
def test_groups_that_fill_a_tile_alone_share_nothing(isa: str) -> None:
    check(isa, "bfloat16", Family((600, 600), ((0, 0), (0, 512))), 16, heads=(40, 1, 8), shared=False)


@isas
def test_the_same_blocks_in_another_order_are_not_shared(isa: str) -> None:
    family = Family((600, 600), ((0, 0), (0, 512)))
    tokens = family.tokens()
    tables, num_blocks = family.tables(16)
    tables[1][1], tables[1][2] = tables[1][2], tables[1][1]
    model = Model(runtime(isa), "bfloat16", 16, num_blocks)
    decodes = [(0, 599, 600), (1, 599, 600)]
    model.run(*model.step(tokens, tables, [(0, 0, 600)]))
    model.run(*model.step(tokens, tables, [(1, 512, 600)]))
    alone = np.concatenate([model.run(*model.step(tokens, tables, [row])) for row in decodes])
    together = model.step(tokens, tables, decodes)
    assert not model.shares(*together)
    np.testing.assert_array_equal(model.run(*together), alone)
