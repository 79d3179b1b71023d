"""Runs models on the native engine by hand, over a KV pool whose unwritten cells are NaN. Needs the built kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from paged_kernels.native import KVPool

from pagedcli.checkpoint import open_checkpoint
from pagedcli.models.load import Model, load_model
from pagedcli.ops.native_ops import NativeOps
from tests.tables import scattered_tables

Array = np.ndarray[Any, Any]


@dataclass
class NativeModel:
    """A model and the ops that packed it."""

    model: Model
    ops: NativeOps

    @classmethod
    def load(
        cls, folder: Path, dtype: str, *, threads: int = 1, isa: str = "", max_model_len: int = 512
    ) -> NativeModel:
        ops = NativeOps(dtype, threads=threads, isa=isa)
        return cls(load_model(open_checkpoint(folder), ops, max_model_len), ops)


def poisoned_pool(model: NativeModel, num_blocks: int, block_size: int) -> KVPool:
    """Reading a cell before it is written spoils the result."""
    spec, dtype = model.model.spec, model.ops.dtype
    pool = KVPool(spec.num_layers, num_blocks, spec.num_kv_heads, block_size, spec.head_dim, dtype)
    bits = (np.uint32, 0x7FC00000) if dtype == "float32" else (np.uint16, 0x7FC0)
    np.frombuffer(memoryview(pool.buffer), bits[0])[:] = bits[1]
    return pool


def run_native(
    model: NativeModel,
    sequences: Sequence[Sequence[int]],
    steps: Sequence[Sequence[tuple[int, int]]],
    block_size: int = 16,
) -> list[Array]:
    """Logits of every row of every sequence, [length, vocab] each; see `forward_support.run_steps`."""
    tables, num_blocks = scattered_tables([len(tokens) for tokens in sequences], block_size)
    pool = poisoned_pool(model, num_blocks, block_size)
    program = model.ops.record(model.model.forward, pool)
    done = [0] * len(sequences)
    logits: list[list[Array]] = [[] for _ in sequences]
    for step in steps:
        program.run(*step_arrays(sequences, tables, done, step, block_size))
        result = program.logits().copy()
        first = 0
        for index, n in step:
            logits[index].append(result[first : first + n])
            first += n
            done[index] += n
    return [np.concatenate(parts) for parts in logits]


def step_arrays(
    sequences: Sequence[Sequence[int]],
    tables: Sequence[Sequence[int]],
    done: Sequence[int],
    step: Sequence[tuple[int, int]],
    block_size: int,
) -> tuple[Array, ...]:
    """The arguments of `Program.run`; the logits of every row are asked for."""
    rows = [(index, at) for index, n in step for at in range(done[index], done[index] + n)]
    lens = [n for _, n in step]
    width = max(len(tables[index]) for index, _ in step)
    return (
        np.array([sequences[index][at] for index, at in rows], np.int64),
        np.array([at for _, at in rows], np.int64),
        np.array([tables[i][at // block_size] * block_size + at % block_size for i, at in rows], np.int64),
        np.array([sum(lens[:i]) for i in range(len(lens) + 1)], np.int32),
        np.array([done[index] + n for index, n in step], np.int32),
        np.array([[*tables[i], *[0] * (width - len(tables[i]))] for i, _ in step], np.int32),
        np.arange(len(rows)),
    )
