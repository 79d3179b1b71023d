"""The ops over odd shapes against the float64 reference; run by tests/cpu, tests/cuda and tests/gpu, each on its ops.

Bounds are relative to the largest value of the reference: float32 2e-6 x sqrt(terms), bfloat16 and float16 their
rounding of inputs and result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from paged_kernels import reference

from pagedcli.models.rope import RopeSpec, rope_tables
from pagedcli.ops.batch import ForwardBatch
from pagedcli.ops.protocol import AttentionShape, HeadNorms
from pagedcli.ops.torch_ops import TORCH_DTYPES, TorchOps

DTYPES = ("float32", "bfloat16", "float16")
BOUNDS = {"float32": 2e-5, "bfloat16": 1.2e-2, "float16": 2e-3}


@dataclass(frozen=True)
class Stored:
    """A float32 `HostTensor`."""

    name: str
    values: np.ndarray
    dtype: str = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def data(self) -> np.ndarray:
        return self.values.reshape(-1).view(np.uint8)

    def release(self) -> None:
        """There is no file behind it."""


def stored(name: str, *shape: int, seed: int = 0) -> Stored:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)
    return Stored(name, values)


@dataclass(frozen=True)
class AttentionCase:
    """Sequences are (rows of this step, tokens in all)."""

    head_dim: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    sequences: tuple[tuple[int, int], ...]
    window: int | None = None

    @property
    def label(self) -> str:
        window = "" if self.window is None else f"-window{self.window}"
        return f"head{self.head_dim}-{self.num_heads}over{self.num_kv_heads}-block{self.block_size}{window}"


ATTENTION = (
    AttentionCase(64, 1, 1, 16, ((1, 1), (15, 15), (1, 17))),
    AttentionCase(64, 9, 3, 16, ((1, 1000), (16, 16), (3, 300), (1, 129))),
    AttentionCase(80, 7, 1, 1, ((17, 17), (1, 16))),
    AttentionCase(96, 8, 1, 8, ((16, 1000), (1, 15))),
    AttentionCase(128, 16, 2, 32, ((1, 128), (130, 130), (1, 1))),
    AttentionCase(256, 3, 1, 64, ((1, 1000), (2, 17))),
    AttentionCase(64, 6, 2, 16, ((1, 1000), (40, 200)), window=24),
    AttentionCase(80, 3, 3, 64, ((300, 300), (1, 17)), window=1),
    AttentionCase(128, 7, 7, 8, ((1, 257), (16, 256)), window=128),
)

LINEAR = ((1, 33, 65), (31, 64, 40), (32, 80, 96), (33, 576, 100), (70, 97, 3))


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    assert actual.shape == expected.shape
    difference = (actual.double() - expected.double()).abs().max().item()
    assert difference <= BOUNDS[dtype] * expected.double().abs().max().item()


def values(ops: TorchOps, *shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(ops.device, TORCH_DTYPES[ops.dtype])


class Pool:
    """A `KVCache` of one layer; unwritten cells are NaN."""

    def __init__(self, ops: TorchOps, case: AttentionCase, num_blocks: int) -> None:
        self.num_blocks, self.block_size = num_blocks, case.block_size
        shape = (2, num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
        self.cells = torch.full(shape, float("nan"), device=ops.device, dtype=TORCH_DTYPES[ops.dtype])

    def key(self, layer: int) -> torch.Tensor:
        return self.cells[0]

    def value(self, layer: int) -> torch.Tensor:
        return self.cells[1]


def batch_of(case: AttentionCase, device: str, *, whole: bool) -> tuple[ForwardBatch, int]:
    """A batch of the case's last rows, or of all tokens; blocks lie backwards."""
    needs = [-(-length // case.block_size) for _, length in case.sequences]
    total, width = sum(needs), max(needs)
    tables, positions, slots, next_block = [], [], [], total - 1
    for (rows, length), need in zip(case.sequences, needs, strict=True):
        table = [next_block - index for index in range(need)]
        next_block -= need
        tables.append(table + [0] * (width - need))
        for at in range(0 if whole else length - rows, length):
            positions.append(at)
            slots.append(table[at // case.block_size] * case.block_size + at % case.block_size)
    lens = [length if whole else rows for rows, length in case.sequences]
    seq_lens = [length for _, length in case.sequences]

    def array(numbers: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)

    starts = [sum(lens[:index]) for index in range(len(lens) + 1)]
    batch = ForwardBatch(
        token_ids=array([0] * len(positions)),
        positions=array(positions),
        slot_mapping=array(slots),
        query_start=array(starts, torch.int32),
        seq_lens=array(seq_lens, torch.int32),
        block_table=array(tables, torch.int32),
        logit_rows=array([0]),
        query_lens=lens,
        host_seq_lens=seq_lens,
    )
    return batch, total


def check_attention(ops: TorchOps, case: AttentionCase) -> None:
    """Rotation and cache write of all tokens, then attention of the last rows, against float64."""
    device, dtype = ops.device, ops.dtype
    shape = AttentionShape(case.num_heads, case.num_kv_heads, case.head_dim, case.head_dim**-0.5, case.window)
    everything, num_blocks = batch_of(case, device, whole=True)
    kv = Pool(ops, case, num_blocks)
    norms = HeadNorms(
        ops.load_vector(stored("q", case.head_dim)), ops.load_vector(stored("k", case.head_dim, seed=1)), 1e-5
    )
    cos, sin = rope_tables(RopeSpec(), case.head_dim, 1024)
    rope = ops.load_rope(cos, sin)
    qkv = values(ops, len(everything.positions), shape.q_size + 2 * shape.kv_size)
    q_all = ops.rope_kv_write(qkv, shape, rope, norms, everything, kv, 0)
    q_expected, k, v = _rotated(qkv, shape, rope, norms, everything)
    assert_near(q_all, q_expected, dtype)
    expected_cells = torch.full(kv.cells.shape, float("nan"), dtype=torch.float64, device=device)
    reference.write_kv(expected_cells[0], k, everything.slot_mapping)
    reference.write_kv(expected_cells[1], v, everything.slot_mapping)
    assert torch.equal(kv.cells.isnan(), expected_cells.isnan())  # nothing else was written
    assert_near(kv.cells[0].nan_to_num(), expected_cells[0].nan_to_num(), dtype)
    batch, _ = batch_of(case, device, whole=False)
    keep = _last_rows(case, device)
    result = ops.attention(q_all[keep], shape, batch, kv, 0)
    expected = reference.paged_attention(
        q_all[keep].double().view(-1, case.num_heads, case.head_dim),
        kv.cells[0].double(),
        kv.cells[1].double(),
        batch.block_table,
        batch.query_lens,
        batch.host_seq_lens,
        shape.scale,
        case.window,
    )
    assert_near(result, expected.flatten(1), dtype)


def _rotated(
    qkv: torch.Tensor, shape: AttentionShape, rope: Any, norms: HeadNorms, batch: ForwardBatch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = qkv.double().split((shape.q_size, shape.kv_size, shape.kv_size), dim=1)
    cos, sin = rope.cos.double()[batch.positions], rope.sin.double()[batch.positions]

    def rotate(x: torch.Tensor, norm: Any) -> torch.Tensor:
        heads = x.reshape(len(x), -1, shape.head_dim)
        return reference.rotate(reference.rms_norm(heads, norm.data.double(), norms.eps), cos, sin)

    return rotate(q, norms.q).flatten(1), rotate(k, norms.k), v.reshape(len(v), -1, shape.head_dim)


def _last_rows(case: AttentionCase, device: str) -> torch.Tensor:
    ends = np.cumsum([length for _, length in case.sequences]).tolist()
    rows = [row for (n, _), end in zip(case.sequences, ends, strict=True) for row in range(end - n, end)]
    return torch.tensor(rows, device=device)


def check_linear(ops: TorchOps, sizes: tuple[int, int, int], *, bias: bool) -> None:
    """A fused linear of two parts and the head, against float64."""
    rows, features, out = sizes
    dtype = ops.dtype
    parts = [stored("a.weight", out, features), stored("b.weight", 5, features)]
    biases = [stored("a.bias", out), stored("b.bias", 5)] if bias else None
    linear = ops.load_linear(parts, biases, "column")
    x = values(ops, rows, features)
    expected = reference.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
    assert_near(ops.linear(x, linear), expected, dtype)
    logits = ops.head(x, linear)
    assert logits.dtype == torch.float32
    assert_near(logits, expected, dtype)


def check_elementwise(ops: TorchOps, rows: int, features: int) -> None:
    """Norms, gates, sums, embedding and rows, against float64."""
    device, dtype = ops.device, ops.dtype
    x, y = values(ops, rows, features), values(ops, rows, features, seed=2)
    weight = ops.load_vector(stored("norm", features))
    wide = weight.data.double()
    assert_near(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), wide, 1e-5), dtype)
    normed, total = ops.add_rms_norm(x.clone(), y.clone(), weight, 1e-5)
    assert_near(total, x.double() + y.double(), dtype)
    assert_near(normed, reference.rms_norm(total.double(), wide, 1e-5), dtype)
    assert_near(ops.add(x.clone(), y.clone()), x.double() + y.double(), dtype)
    pairs = torch.cat((x, y), dim=1)
    for activation in ("silu", "gelu", "gelu_tanh"):
        expected = reference.gated(pairs.double(), activation)
        assert_near(ops.gated(pairs, activation), expected, dtype)
    case = AttentionCase(8, 1, 1, 16, ((rows, rows),))
    batch, _ = batch_of(case, device, whole=True)
    batch.token_ids = torch.arange(rows, device=device).flip(0) % 7
    batch.logit_rows = torch.tensor([rows - 1, 0], device=device)
    table = ops.load_embedding(stored("embedding", 7, features))
    assert torch.equal(ops.embedding(table, batch), table.data[batch.token_ids])
    assert torch.equal(ops.logit_rows(x, batch), x[[rows - 1, 0]])
