"""Inputs of cases and their results in float64, for the kernels and for torch alike. Imports numpy.

Both get the same numbers. A reference is taken of a sample of rows and outputs, since float64 over all of them would
take longer than the measurement.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kernels.bench.cases import Case, Format

Array = npt.NDArray[Any]

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNKNOWN_CACHE_BYTES = 128 << 20
"""Of the last level, where the system does not say."""
TABLE_ROWS = 256
"""Different rows of activations; more rows repeat them."""
SAMPLE_ROWS, SAMPLE_OUTPUTS = 4, 48
NORM_EPS = 1e-5
TOP_P = 0.9
PEAKED = 1.5
"""Of logits by rank: the r-th likeliest token has a share of about r ** -1.5, 90% lie in some dozens."""
_PERIOD = (1 << 20) + 7
"""Different random numbers; larger arrays repeat them, out of step with their rows."""
BOUNDS = {"float32": 2e-4, "bfloat16": 2e-2, "int8": 5e-2}
"""Largest error against float64, as part of the largest value: of what rows are rounded to."""


def normal(count: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Normal random numbers, fast for many."""
    drawn = np.random.default_rng(seed).standard_normal(min(count, _PERIOD), np.float32)
    return np.resize(drawn, count)


def to_bfloat16(values: Array) -> npt.NDArray[np.uint16]:
    """Bits, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def from_bfloat16(bits: Array) -> npt.NDArray[np.float32]:
    """float32 of the same value."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: Array, dtype: str) -> npt.NDArray[np.float32]:
    """float32 values that the dtype holds."""
    return np.asarray(values, np.float32) if dtype == "float32" else from_bfloat16(to_bfloat16(values))


class Codes:
    """A quantized tensor of random codes, as a checkpoint has it."""

    def __init__(self, outputs: int, inputs: int, item: Format) -> None:
        self.bits, self.group_size = item.bits, item.group_size
        generator = np.random.default_rng(1)
        drawn = generator.integers(0, 2**item.bits, _PERIOD, np.uint8)
        self.codes: Array = np.resize(drawn, outputs * inputs).reshape(outputs, inputs)
        groups = (outputs, -(-inputs // item.group_size))
        scale = np.float16(2 * inputs**-0.5 / 2**item.bits)
        self.scales: Array = np.full(groups, scale, np.float32)
        middle = 2 ** (item.bits - 1)
        self.zeros: Array | None = None if item.offsets else np.full(groups, middle, np.uint8)
        self.offsets: Array | None = None
        if item.offsets:
            self.offsets = np.full(groups, -float(scale) * (middle + 0.3), np.float32)
        order = np.arange(inputs, dtype=np.int32) // item.group_size
        self.g_idx: Array | None = generator.permutation(order).astype(np.int32) if item.reordered else None

    def values(self, rows: Array) -> npt.NDArray[np.float64]:
        """Some rows, dequantized."""
        groups = np.arange(self.codes.shape[1]) // self.group_size if self.g_idx is None else self.g_idx
        scales = self.scales[rows].astype(np.float64)[:, groups]
        if self.offsets is not None:
            return scales * self.codes[rows] + self.offsets[rows].astype(np.float64)[:, groups]
        assert self.zeros is not None, "a tensor has zeros or offsets"
        return scales * (self.codes[rows].astype(np.float64) - self.zeros[rows].astype(np.float64)[:, groups])


class Data:
    """Numbers of one case; each array is made when it is asked for."""

    def __init__(self, case: Case) -> None:
        self.case, self.dtype = case, case.format.dtype

    @cached_property
    def table(self) -> npt.NDArray[np.float32]:
        """[TABLE_ROWS, inputs]: activations, exact in the dtype; of an embedding the whole, [inputs, outputs]."""
        size = (TABLE_ROWS, self.case.inputs)
        if self.case.op == "embedding":
            size = (self.case.inputs, self.case.outputs)
        return rounded(normal(size[0] * size[1], 2).reshape(size), self.dtype)

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """[rows]: which row of the table each row is."""
        return self.other_ids(0)

    def other_ids(self, turn: int) -> npt.NDArray[np.int64]:
        """As `token_ids`, others in each turn: far apart in an embedding."""
        at: npt.NDArray[np.int64] = np.arange(
            turn * self.case.rows, (turn + 1) * self.case.rows, dtype=np.int64
        )
        at *= 7919 if self.case.op == "embedding" else 7
        at %= len(self.table)
        return at

    @property
    def x(self) -> npt.NDArray[np.float32]:
        """[rows, inputs]."""
        return self.table[self.token_ids]

    @cached_property
    def weight(self) -> npt.NDArray[np.float32]:
        """[outputs, inputs]; not yet rounded to the dtype."""
        size = (self.case.outputs, self.case.inputs)
        values = normal(size[0] * size[1], 3).reshape(size)
        values *= np.float32(size[1] ** -0.5)
        return values

    @cached_property
    def codes(self) -> Codes:
        """[outputs, inputs] of a quantized format."""
        return Codes(self.case.outputs, self.case.inputs, self.case.format)

    @cached_property
    def norm_weight(self) -> npt.NDArray[np.float32]:
        """[inputs]."""
        return rounded(1 + normal(self.case.inputs, 4) / 8, self.dtype)

    @cached_property
    def angles(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Cosines and sines of positions 0 to rows - 1, [rows, head_dim / 2]."""
        half = self.case.heads[2] // 2
        angles = np.outer(np.arange(self.case.rows), 10000.0 ** (-np.arange(half) / half))
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    @cached_property
    def kv(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Keys and values of the first sequence, [context, num_kv_heads, head_dim]; all sequences have the same."""
        shape = (self.case.context, *self.case.heads[1:])
        count = int(np.prod(shape))
        return (
            rounded(normal(count, 5).reshape(shape), self.dtype),
            rounded(normal(count, 6).reshape(shape), self.dtype),
        )

    @cached_property
    def logits(self) -> npt.NDArray[np.float32]:
        """[rows, vocabulary], a few of them far above the many others, as models have it."""
        generator = np.random.default_rng(7)
        ranks = np.stack([generator.permutation(self.case.inputs) for _ in range(self.case.rows)])
        return (20 - PEAKED * np.log1p(ranks)).astype(np.float32)

    # ---- pages

    @cached_property
    def block_table(self) -> npt.NDArray[np.int32]:
        """[sequences, blocks]: blocks lie about as they do after a while."""
        case = self.case
        width = -(-max(case.context, case.rows // case.sequences) // case.page_size)
        order = np.random.default_rng(8).permutation(case.sequences * width)
        return order.astype(np.int32).reshape(case.sequences, width)

    def cells(self, sequence: int) -> npt.NDArray[np.int64]:
        """Slot (block x page size + place) of every position of a sequence."""
        size = self.case.page_size
        positions = np.arange(self.block_table.shape[1] * size)
        slots: npt.NDArray[np.int64] = (
            self.block_table[sequence].astype(np.int64)[positions // size] * size + positions % size
        )
        return slots

    # ---- results

    @cached_property
    def sample(self) -> Sample:
        """The rows and outputs that are compared."""
        case = self.case
        columns = {"linear": case.outputs, "head": case.outputs}.get(case.op)
        rows = np.unique(np.linspace(0, case.rows - 1, SAMPLE_ROWS).astype(np.int64))
        if columns is None:
            return Sample(rows, None)
        return Sample(rows, np.unique(np.linspace(0, columns - 1, SAMPLE_OUTPUTS).astype(np.int64)))

    def expected(self) -> npt.NDArray[np.float64]:
        """The sample's values."""
        return _EXPECTED[self.case.op](self)

    def error(self, got: Array) -> float:
        """Largest error of the sampled values, as part of the bound: more than 1 is wrong."""
        want = self.expected()
        if self.case.op == "sampler":
            return 0.0 if np.array_equal(got, want) else float("inf")
        difference = np.abs(np.asarray(got, np.float64) - want).max()
        bound = BOUNDS.get(self.case.format.activation or self.dtype, BOUNDS["bfloat16"])
        return float(difference / (bound * np.abs(want).max()))


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows and outputs that are compared; `columns` None: all."""

    rows: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64] | None

    def of(self, values: Array) -> Array:
        """The part of [rows, outputs]."""
        part = values[self.rows]
        return part if self.columns is None else part[:, self.columns]


def _product(data: Data) -> npt.NDArray[np.float64]:
    sample = data.sample
    assert sample.columns is not None, "of a product some outputs are compared"
    if data.case.format.bits:
        weight = data.codes.values(sample.columns)
    else:
        weight = rounded(data.weight[sample.columns], data.dtype).astype(np.float64)
    result: npt.NDArray[np.float64] = data.x[sample.rows].astype(np.float64) @ weight.T
    return result


def _norm(data: Data) -> npt.NDArray[np.float64]:
    """Of the sum of x with itself."""
    total = 2 * data.x[data.sample.rows].astype(np.float64)
    scale = 1 / np.sqrt((total**2).mean(-1, keepdims=True) + NORM_EPS)
    result: npt.NDArray[np.float64] = total * scale * data.norm_weight
    return result


def _gated(data: Data) -> npt.NDArray[np.float64]:
    gate, up = np.split(data.x[data.sample.rows].astype(np.float64), 2, axis=1)
    result: npt.NDArray[np.float64] = gate / (1 + np.exp(-gate)) * up
    return result


def _embedding(data: Data) -> npt.NDArray[np.float64]:
    return data.x[data.sample.rows].astype(np.float64)


def _rope(data: Data) -> npt.NDArray[np.float64]:
    """Rotated queries and keys side by side."""
    rows = data.sample.rows
    num_heads, num_kv_heads, head_dim = data.case.heads
    heads = data.x[rows].astype(np.float64).reshape(len(rows), -1, head_dim)[:, : num_heads + num_kv_heads]
    cos, sin = (part[rows].astype(np.float64)[:, None] for part in data.angles)
    low, high = np.split(heads, 2, axis=-1)
    turned = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return turned.reshape(len(rows), -1)


def _attention(data: Data) -> npt.NDArray[np.float64]:
    case, rows = data.case, data.sample.rows
    num_kv_heads, head_dim = case.heads[1:]
    keys, values = (part.astype(np.float64) for part in data.kv)
    each = case.rows // case.sequences
    results = []
    for row in rows:
        seen = case.context - each + int(row) % each + 1
        q = data.x[row].astype(np.float64).reshape(num_kv_heads, -1, head_dim)
        scores = np.einsum("hgd,thd->hgt", q, keys[:seen]) * head_dim**-0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        results.append(np.einsum("hgt,thd->hgd", weights, values[:seen]).reshape(-1))
    return np.stack(results)


def _sampler(data: Data) -> npt.NDArray[np.float64]:
    """Greedy: the largest. Sampled: whether the choice is one of the likeliest with the wanted share, so ones."""
    rows = data.logits[data.sample.rows].astype(np.float64)
    return rows.argmax(-1).astype(np.float64) if data.case.name == "greedy" else np.ones(len(rows))


def in_top_p(logits: Array, tokens: Array) -> npt.NDArray[np.float64]:
    """1 where a token is among the likeliest that have the share `TOP_P` together, else 0."""
    found = []
    for row, token in zip(logits.astype(np.float64), tokens, strict=True):
        weights = np.exp(row - row.max())
        weights /= weights.sum()
        before = weights[weights > weights[token]].sum()
        found.append(float(before < TOP_P))
    return np.array(found)


_EXPECTED = {
    "linear": _product,
    "head": _product,
    "norm": _norm,
    "gated": _gated,
    "embedding": _embedding,
    "rope": _rope,
    "attention": _attention,
    "sampler": _sampler,
}


def cold_target_bytes(free_bytes: int | None = None, caches: Path = CACHES) -> int:
    """Size of the copies that take turns: twice the last-level cache, an eighth of the free memory at most.

    Args:
        free_bytes: Of memory; None: as the system says.
        caches: Folder of index0, index1, ...
    """
    sizes = [_size_of(file) for file in caches.glob("index*/size")]
    wanted = 2 * max(sizes, default=UNKNOWN_CACHE_BYTES)
    if free_bytes is None:
        free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(wanted, free_bytes // 8)


def _size_of(file: Path) -> int:
    """Such as 2048K."""
    text = file.read_text(encoding="ascii").strip()
    return int(text.rstrip("KMG")) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
