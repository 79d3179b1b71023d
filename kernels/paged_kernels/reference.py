"""The oracle: every op in plain torch, written to be read, not to be fast. Imports torch and `checks` only.

All take float32, bfloat16, float16 or float64 and compute in float32, or in float64 if that is what they are given;
results are rounded once, at the end, to the input's dtype. The scale of the cache: keys and values are
[num_blocks, num_kv_heads, block_size, head_dim], and position p of a sequence lies in block `table[p // block_size]`
at offset `p % block_size`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paged_kernels.checks import ShapeError, check_heads, check_shape


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What an op computes in for operands of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def embedding(table: Tensor, token_ids: Tensor) -> Tensor:
    """Rows of the table.

    Args:
        table: [vocab_size, hidden_size].
        token_ids: [num_tokens] int64.
    """
    check_shape("token_ids", token_ids, (None,))
    check_shape("table", table, (None, None))
    return table.index_select(0, token_ids)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension: x / sqrt(mean(x^2) + eps) * weight.

    Args:
        x: [..., features].
        weight: [features].
        eps: Added to the mean of squares.
    """
    check_shape("weight", weight, (x.shape[-1],))
    wide = x.to(compute_dtype(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is rounded to the dtype before it is normed."""
    check_shape("residual", residual, x.shape)
    total = x + residual
    return rms_norm(total, weight, eps), total


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Linear: x @ weight.T + bias.

    Args:
        x: [rows, in_features].
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """
    check_linear(x, weight, bias)
    wide = compute_dtype(x.dtype)
    total = x.to(wide) @ weight.to(wide).T
    return (total if bias is None else total + bias.to(wide)).to(x.dtype)


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The shapes of a linear's operands."""
    check_shape("weight", weight, (None, None))
    check_shape("x", x, (None, weight.shape[1]))
    if bias is not None:
        check_shape("bias", bias, (weight.shape[0],))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of every head (the half-split layout of Hugging Face checkpoints).

    Args:
        x: [num_tokens, num_heads, head_dim].
        cos: [num_tokens, head_dim / 2] of the tokens' positions.
        sin: As `cos`.
    """
    half = x.shape[-1] // 2
    check_shape("cos", cos, (x.shape[0], half))
    check_shape("sin", sin, (x.shape[0], half))
    wide = x.to(compute_dtype(x.dtype))
    cos, sin = cos.to(wide.dtype).unsqueeze(1), sin.to(wide.dtype).unsqueeze(1)
    low, high = wide[..., :half], wide[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def write_kv(cache: Tensor, rows: Tensor, slot_mapping: Tensor) -> None:
    """Write one key or value row per token.

    Args:
        cache: [num_blocks, num_kv_heads, block_size, head_dim], changed in place.
        rows: [num_tokens, num_kv_heads, head_dim].
        slot_mapping: [num_tokens] int64, block * block_size + offset.
    """
    check_shape("rows", rows, (slot_mapping.shape[0], cache.shape[1], cache.shape[3]))
    block_size = cache.shape[2]
    for row, slot in zip(rows, slot_mapping.tolist(), strict=True):
        cache[slot // block_size, :, slot % block_size] = row


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    scale: float,
    window: int | None,
) -> Tensor:
    """Causal attention of the last `query_lens[i]` positions of every sequence i over its cached keys.

    Args:
        q: [num_tokens, num_heads, head_dim], sequence after sequence.
        key_cache: [num_blocks, num_kv_heads, block_size, head_dim].
        value_cache: As `key_cache`.
        block_table: [num_seqs, max_blocks] integers.
        query_lens: Rows of each sequence.
        seq_lens: Cached tokens of each sequence, its own rows included.
        scale: Factor on the scores.
        window: Position p sees p - window + 1 to p; None: 0 to p.

    Returns:
        [num_tokens, num_heads, head_dim] of q's dtype.
    """
    check_attention(q, key_cache, value_cache, block_table, query_lens, seq_lens)
    out, start = torch.empty_like(q), 0
    for table, num_rows, length in zip(block_table, query_lens, seq_lens, strict=True):
        keys = _gather(key_cache, table, length)
        values = _gather(value_cache, table, length)
        rows = slice(start, start + num_rows)
        out[rows] = _attend(q[rows], keys, values, scale, window)
        start += num_rows
    return out


def check_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
) -> None:
    """The shapes of attention's operands and that tables are long enough."""
    check_shape("q", q, (sum(query_lens), None, key_cache.shape[3]))
    check_heads(q.shape[1], key_cache.shape[1])
    check_shape("value_cache", value_cache, key_cache.shape)
    check_shape("block_table", block_table, (len(seq_lens), None))
    for index, (num_rows, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        room = block_table.shape[1] * key_cache.shape[2]
        if not 1 <= num_rows <= length <= room:
            raise ShapeError(
                f"sequence {index} has {num_rows} rows and {length} tokens, its table holds {room}: "
                "1 <= rows <= tokens <= table is required"
            )


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up.

    Args:
        gate_up: [rows, 2 * features], gate first.
        activation: "silu", "gelu" (by erf) or "gelu_tanh".
    """
    if gate_up.shape[-1] % 2:
        raise ShapeError(f"gate_up has {gate_up.shape[-1]} features: an even number is required")
    gate, up = gate_up.to(compute_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return (_activate(gate, activation) * up).to(gate_up.dtype)


def select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]: the rows whose logits are asked for.

    Args:
        x: [num_tokens, features].
        rows: [num_rows] int64.
    """
    check_shape("rows", rows, (None,))
    return x.index_select(0, rows)


def _activate(gate: Tensor, activation: str) -> Tensor:
    """Built from exp, erf and tanh over contiguous memory, whose bits do not depend on where an element lies.

    torch's own silu and gelu take another path for the last elements of a row or of a thread's share, and so give an
    element other bits with other neighbours (measured: torch 2.13, silu from 329 rows of 200 on at two threads).
    """
    gate = gate.contiguous()
    if activation == "silu":
        return gate / (1.0 + torch.exp(-gate))
    if activation == "gelu":
        return gate * 0.5 * (1.0 + torch.erf(gate * 0.5**0.5))
    if activation == "gelu_tanh":
        inner = (gate + 0.044715 * gate * gate * gate) * (2.0 / math.pi) ** 0.5
        return gate * 0.5 * (1.0 + torch.tanh(inner))
    raise ShapeError(f"activation {activation!r} is not known: silu, gelu, gelu_tanh")


def _gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """[length, num_kv_heads, head_dim] of one sequence."""
    positions = torch.arange(length, device=cache.device)
    blocks = table.long()[positions // cache.shape[2]]
    return cache[blocks, :, positions % cache.shape[2]]


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """[rows, num_heads, head_dim]: one sequence, its rows being the last positions of its keys."""
    wide = compute_dtype(q.dtype)
    group = q.shape[1] // keys.shape[1]
    keys = keys.to(wide).repeat_interleave(group, dim=1)
    values = values.to(wide).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), keys) * scale
    at = torch.arange(keys.shape[0] - q.shape[0], keys.shape[0], device=q.device).unsqueeze(1)
    seen = torch.arange(keys.shape[0], device=q.device).unsqueeze(0)
    hidden = seen > at if window is None else (seen > at) | (seen <= at - window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
