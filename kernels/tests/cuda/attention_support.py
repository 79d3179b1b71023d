"""Paged attention of the CUDA library on torch tensors in host memory, beside the float64 reference."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from paged_kernels import cuda_abi, reference
from torch import Tensor

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """Sequences are (rows of this step, tokens in all)."""

    sequences: tuple[tuple[int, int], ...]
    head_dim: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    block_size: int = 16
    window: int = 0
    split: int = 64
    dtype: str = "bfloat16"

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


def numbers(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


class Memory:
    """Keys and values by sequence and position, put into pages of any size; unused slots hold NaN."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        dtype = DTYPES[case.dtype]
        self.case = case
        longest = max(total for _, total in case.sequences)
        shape = (len(case.sequences), longest, case.num_kv_heads, case.head_dim)
        keys, values = numbers(*shape, seed=seed, dtype=dtype), numbers(*shape, seed=seed + 1, dtype=dtype)
        self.q_all = numbers(
            len(case.sequences), longest, case.num_heads, case.head_dim, seed=seed + 2, dtype=dtype
        )
        per_sequence = -(-longest // case.block_size)
        num_blocks = len(case.sequences) * per_sequence + 3
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        self.table = (
            order[: num_blocks - 3].view(len(case.sequences), per_sequence).to(torch.int32).contiguous()
        )
        cache = (num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
        self.keys = torch.full(cache, torch.nan, dtype=dtype)
        self.values = torch.full(cache, torch.nan, dtype=dtype)
        for index, (_, total) in enumerate(case.sequences):
            for position in range(total):
                block, offset = self.table[index, position // case.block_size], position % case.block_size
                self.keys[block, :, offset] = keys[index, position]
                self.values[block, :, offset] = values[index, position]

    def q(self) -> Tensor:
        """[rows, num_heads, head_dim] of the step's rows."""
        rows = [self.q_all[i, total - new : total] for i, (new, total) in enumerate(self.case.sequences)]
        return torch.cat(rows).contiguous()

    def expected(self) -> Tensor:
        """In float64."""
        wide = [tensor.to(torch.float64) for tensor in (self.q(), self.keys, self.values)]
        lens = [new for new, _ in self.case.sequences], [total for _, total in self.case.sequences]
        scale = self.case.head_dim**-0.5
        return reference.paged_attention(*wide, self.table, *lens, scale, self.case.window or None)


def run(library: ctypes.CDLL, memory: Memory, *, decode: Sequence[int] = (), parallel: int = 1) -> Tensor:
    """The step's rows: sequences of `decode` by the decode kernel, the others by prefill."""
    case, q = memory.case, memory.q()
    out = torch.full_like(q, torch.nan)
    longest = max(total for _, total in case.sequences)
    num_splits = -(-longest // case.split)
    partial = torch.full((max(1, len(decode)), case.num_heads, num_splits, case.head_dim + 2), torch.nan)
    news = torch.tensor([new for new, _ in case.sequences])
    row_start = torch.cat([torch.zeros(1, dtype=torch.int64), news.cumsum(0)]).to(torch.int32)
    lengths = torch.tensor([total for _, total in case.sequences], dtype=torch.int32)
    arguments = cuda_abi.PagedAttention(
        q.data_ptr(), memory.keys.data_ptr(), memory.values.data_ptr(), memory.table.data_ptr(),
        row_start.data_ptr(), lengths.data_ptr(), out.data_ptr(), partial.data_ptr(),
        memory.table.shape[1], case.block_size, case.num_heads, case.num_kv_heads, case.head_dim,
        cuda_abi.DTYPES[case.dtype], case.window, case.split, num_splits, case.head_dim**-0.5,
    )  # fmt: skip
    items = torch.tensor(list(decode), dtype=torch.int32)
    code = library.paged_cuda_attention_decode(arguments, items.data_ptr(), len(items), parallel, None)
    cuda_abi.check("decode", code)
    rows = library.paged_cuda_attention_tile_rows(case.head_dim)
    tiles = [
        (index, first)
        for index, (new, _) in enumerate(case.sequences)
        if index not in decode
        for first in range(0, new * case.group, rows)
    ]
    flat = torch.tensor(tiles, dtype=torch.int32)
    cuda_abi.check(
        "prefill", library.paged_cuda_attention_prefill(arguments, flat.data_ptr(), len(tiles), None)
    )
    return out
