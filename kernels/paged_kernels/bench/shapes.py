"""Models of random weights to measure kernels on, recorded as native programs, and their steps. Imports numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kernels.native import ITEM_BYTES, Buffer, KVPool, PackedWeight, Program, Runtime
from paged_kernels.quantized import QuantizedWeight

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama-like model with a tied head."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    num_layers: int
    vocab_size: int

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key-value heads, head_dim."""
        return (self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def layer_weights(self) -> int:
        """Elements of one layer's linears."""
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return self.hidden * (qkv + self.num_heads * self.head_dim + 3 * self.inner)

    @property
    def head_weights(self) -> int:
        """Elements of the head."""
        return self.hidden * self.vocab_size


SHAPES = {
    "smollm2-135m": Shape(576, 9, 3, 64, 1536, 30, 49152),
    "qwen2.5-0.5b": Shape(896, 14, 2, 64, 4864, 24, 151936),
}


@dataclass(frozen=True, slots=True)
class Weights:
    """How the layers' linears are stored; the head is of the dtype.

    Attributes:
        bits: 4 or 8; None: of the dtype.
        group_size: Input features of a scale.
        activation: As of `Program.linear_quantized`.
    """

    bits: int | None = None
    group_size: int = 64
    activation: str = "int8"

    def bytes(self, dtype: str) -> float:
        """Of one weight: its code and its share of a half scale and a zero point."""
        return ITEM_BYTES[dtype] if self.bits is None else self.bits / 8 + 3 / self.group_size


@dataclass(frozen=True, slots=True)
class Step:
    """Rows [start, end) of every sequence: one pass through the model, logits of the last rows."""

    name: str
    rows: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return sum(end - start for start, end in self.rows)

    def flops(self, shape: Shape) -> float:
        """Multiplications and additions of linears, head and attention."""
        seen = sum((start + end + 1) * (end - start) / 2 for start, end in self.rows)
        attention = 4.0 * seen * shape.num_heads * shape.head_dim * shape.num_layers
        body = 2.0 * self.num_tokens * shape.layer_weights * shape.num_layers
        return body + 2.0 * len(self.rows) * shape.head_weights + attention

    def bytes(self, shape: Shape, dtype: str, weights: Weights) -> float:
        """Weights, and keys and values that are read."""
        keys = 2 * sum(end for _, end in self.rows) * shape.num_kv_heads * shape.head_dim * shape.num_layers
        linears = shape.layer_weights * shape.num_layers * weights.bytes(dtype)
        return linears + float((shape.head_weights + keys) * ITEM_BYTES[dtype])

    def arrays(self, vocab_size: int) -> list[npt.NDArray[Any]]:
        """Arguments of `Program.run`."""
        counts = [end - start for start, end in self.rows]
        positions = np.concatenate([np.arange(start, end) for start, end in self.rows])
        sequence = np.repeat(np.arange(len(self.rows)), counts)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        width = max(-(-end // BLOCK_SIZE) for _, end in self.rows)
        table = np.arange(len(self.rows) * width, dtype=np.int32).reshape(-1, width)
        blocks = table[sequence, positions // BLOCK_SIZE].astype(np.int64)
        return [
            (positions * 7919 + sequence * 31) % vocab_size,
            positions,
            blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            starts,
            np.array([end for _, end in self.rows], np.int32),
            table,
            starts[1:].astype(np.int64) - 1,
        ]


STEPS = (
    Step("decode", ((150, 151),)),
    Step("decode at 8k", ((8191, 8192),)),
    Step("64 decodes", tuple((100 + i, 101 + i) for i in range(64))),
    Step("mixed", (*((100 + i, 101 + i) for i in range(60)), *((0, 49) for _ in range(4)))),
    Step("prefill 512", ((0, 512),)),
)


class _Random:
    """A stored tensor of random numbers."""

    def __init__(self, shape: tuple[int, int], generator: np.random.Generator) -> None:
        self.shape: tuple[int, ...] = shape
        self.dtype = "F32"
        values = generator.standard_normal(shape, np.float32) * np.float32(shape[1] ** -0.5)
        self.data: npt.NDArray[np.uint8] = values.view(np.uint8).reshape(-1)


class _RandomCodes:
    """A quantized tensor of random codes."""

    zeros: npt.NDArray[np.uint8]
    offsets = None
    g_idx = None

    def __init__(self, shape: tuple[int, int], weights: Weights, generator: np.random.Generator) -> None:
        assert weights.bits is not None, "codes have bits"
        self.bits, self.group_size = weights.bits, weights.group_size
        self.codes = generator.integers(0, 2**self.bits, shape, np.uint8)
        groups = (shape[0], -(-shape[1] // self.group_size))
        self.zeros = np.full(groups, 2 ** (self.bits - 1), np.uint8)
        scale = np.float16(2 * shape[1] ** -0.5 / 2**self.bits)
        self.scales = np.full(groups, scale, np.float32)


class _Linears:
    """Random linears of a program; every layer has a copy of the same numbers."""

    def __init__(self, program: Program, weights: Weights) -> None:
        self.program, self.weights = program, weights
        self._generator = np.random.default_rng(0)
        self._drawn: dict[tuple[int, int], _Random] = {}
        self._codes: dict[tuple[int, int], _RandomCodes] = {}

    def dense(self, rows: int, columns: int) -> PackedWeight:
        """[rows, columns] of the dtype."""
        key = (rows, columns)
        if key not in self._drawn:
            self._drawn[key] = _Random(key, self._generator)
        return self.program.runtime.pack([self._drawn[key]], self.program.dtype)

    def quantized(self, rows: int, columns: int) -> QuantizedWeight:
        """[rows, columns] of codes."""
        key = (rows, columns)
        if key not in self._codes:
            self._codes[key] = _RandomCodes(key, self.weights, self._generator)
        return self.program.runtime.pack_quantized([self._codes[key]])

    def __call__(self, x: int, rows: int, columns: int) -> int:
        """Multiply by a new weight."""
        if self.weights.bits is None:
            return self.program.linear(x, self.dense(rows, columns))
        activation = self.weights.activation
        return self.program.linear_quantized(x, self.quantized(rows, columns), activation=activation)


def record(runtime: Runtime, shape: Shape, dtype: str, steps: Sequence[Step], weights: Weights) -> Program:
    """The model as a program, with a KV pool for the largest step."""
    program = Program(runtime, dtype, BLOCK_SIZE)
    linear = _Linears(program, weights)
    blocks = max(step.arrays(shape.vocab_size)[5].size for step in steps)
    kv = KVPool(shape.num_layers, blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim, dtype)
    ones = runtime.upload(np.ones(shape.hidden, np.float32))
    longest = max(end for step in steps for _, end in step.rows)
    angles = np.outer(np.arange(longest), 10000.0 ** -np.linspace(0, 1, shape.head_dim // 2, endpoint=False))
    turns = (
        runtime.upload(np.cos(angles).astype(np.float32)),
        runtime.upload(np.sin(angles).astype(np.float32)),
    )
    _layers(linear, shape, ones, turns, kv)
    return program


def _layers(linear: _Linears, shape: Shape, ones: Buffer, turns: tuple[Buffer, Buffer], kv: KVPool) -> None:
    program = linear.program
    size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    table = linear.dense(shape.vocab_size, shape.hidden)
    x, residual = program.embedding(table), None
    for layer in range(shape.num_layers):
        if residual is None:
            h, residual = program.rms_norm(x, ones, 1e-5), x
        else:
            h, residual = program.add_rms_norm(x, residual, ones, 1e-5)
        qkv = linear(h, size + 2 * kv_size, shape.hidden)
        q = program.rope_kv_write(qkv, shape.heads, turns, kv, layer)
        attended = program.attention(q, shape.heads, shape.head_dim**-0.5, None, kv, layer)
        h, residual = program.add_rms_norm(linear(attended, shape.hidden, size), residual, ones, 1e-5)
        inner = program.gated(linear(h, 2 * shape.inner, shape.hidden), "silu")
        x = linear(inner, shape.hidden, shape.inner)
    assert residual is not None, "a model has at least one layer"
    h, _ = program.add_rms_norm(program.logit_rows(x), program.logit_rows(residual), ones, 1e-5)
    program.finish(program.head(h, table))
