"""Variable-length paged attention on torch, batched, with the same bits under any schedule. Imports torch only.

Keys are cut into splits of `SPLIT` tokens at absolute positions, whatever the block size; queries into tiles of a fixed
number of rows (rows are tokens x query heads of one key-value head). A work item is one tile over one split:

    positions        0 ........ 127 | 128 ....... 255 | 256 ...
    tile, rows at 140 to 145:  item |  item (masked)  |                item = gather, q @ k, softmax parts, p @ v

Items go through two batched products of one shape each, so that a row's scores, its maximum, sum and weighted values
within a split depend on nothing but the row. The splits of a row are then added in the order of their positions; a
split that holds nothing for a row adds an exact zero. So it does not matter who shares the batch, how the prompt was
cut, or how large the blocks are.

There are two sizes of tile, for decodes and for longer chunks. They are used side by side only where this machine's
library gives both the same bits (tried once per shape, `tile_tokens`); else all rows go through the small one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

SPLIT = 128
NARROW_ROWS = 16
WIDE_ROWS = 64
MAX_ITEM_BYTES = 8 << 20
"""Keys gathered at a time; more work is done in several rounds, with the same bits."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of attention: `num_heads` is a multiple of `num_kv_heads`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads to one key-value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Tile:
    """Up to `tile_tokens` consecutive rows of one sequence.

    Attributes:
        sequence: Index in the batch.
        first_row: Row of the batch.
        num_rows: At least 1.
        first_position: Position of the first row.
        first_split: First split that any of its rows sees.
        num_splits: Splits from there on, at least 1.
    """

    sequence: int
    first_row: int
    num_rows: int
    first_position: int
    first_split: int
    num_splits: int


@dataclass(frozen=True, slots=True)
class Round:
    """Index tensors of some tiles, used by every layer. Tiles are sorted: most splits first.

    Attributes:
        rows: [num_tiles * tile_tokens] int64, rows of q; a short tile repeats its last row.
        kept: Places in `rows` that are no repetition, or None if all are kept.
        kept_rows: Rows of the batch at `kept`.
        item_tile: [num_items] int64; items are sorted by split within the tile, then by tile.
        kv_rows: [num_items * num_kv_heads * SPLIT] int64, rows of the cache seen as [rows, head_dim].
        hidden: [num_items, 1, tile_tokens, 1, SPLIT] bool, True where a row does not see a key.
        tiles_with: For split 0, 1, ... within a tile, how many tiles have it.
        tile_tokens: Tokens in a tile.
    """

    rows: Tensor
    kept: Tensor | None
    kept_rows: Tensor
    item_tile: Tensor
    kv_rows: Tensor
    hidden: Tensor
    tiles_with: tuple[int, ...]
    tile_tokens: int


def plan_attention(
    heads: Heads,
    block_table: Tensor,
    block_size: int,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    window: int | None,
) -> list[Round]:
    """The rounds of one batch for layers of one window.

    Args:
        heads: Shape of attention.
        block_table: [num_seqs, max_blocks] integers on the device.
        block_size: Tokens in a block.
        query_lens: Rows of each sequence.
        seq_lens: Tokens of each sequence, its rows included.
        window: Tokens that a row sees, itself included; None: all.
    """
    narrow, wide = tile_tokens(heads.group, heads.head_dim, block_table.device.type, torch.get_num_threads())
    by_size: dict[int, list[Tile]] = {narrow: [], wide: []}
    row = 0
    for sequence, (num_rows, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        size = narrow if num_rows <= narrow else wide
        by_size[size] += _cut(sequence, row, num_rows, length - num_rows, size, window)
        row += num_rows
    return [
        _index(tiles, size, heads, block_table, block_size, seq_lens, window)
        for size, all_tiles in by_size.items()
        for tiles in _rounds(all_tiles, heads)
    ]


def paged_attention(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, rounds: Sequence[Round], scale: float
) -> Tensor:
    """Attention of every row of the batch.

    Args:
        q: [num_tokens, num_heads, head_dim].
        key_cache: [num_blocks, num_kv_heads, block_size, head_dim], contiguous.
        value_cache: As `key_cache`.
        rounds: Of `plan_attention`.
        scale: Factor on the scores.

    Returns:
        [num_tokens, num_heads, head_dim] of q's dtype; computed in float32 (float64 for float64).
    """
    out = torch.empty_like(q)
    for part in rounds:
        result = _attend(q, key_cache, value_cache, part, scale).to(q.dtype)
        out[part.kept_rows] = result if part.kept is None else result[part.kept]
    return out


@cache
def tile_tokens(group: int, head_dim: int, device: str, threads: int) -> tuple[int, int]:
    """Tokens in a narrow and in a wide tile, for `group` query heads to a key-value head.

    The narrow tile is one token where the library gives its few rows the bits of a wide tile, else `NARROW_ROWS` rows;
    the wide one is as narrow if those differ too. `threads` is part of the key because it may change what the library
    does.
    """
    wide = -(-WIDE_ROWS // group)
    for narrow in (1, -(-NARROW_ROWS // group)):
        if sizes_agree(narrow * group, wide * group, head_dim, device):
            return narrow, wide
    return narrow, narrow


def sizes_agree(narrow_rows: int, wide_rows: int, head_dim: int, device: str) -> bool:
    """Whether both products give a row the same bits in tiles of either size, tried on random numbers."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn((48, wide_rows, head_dim), generator=generator).to(device)
    keys = torch.randn((48, SPLIT, head_dim), generator=generator).to(device)
    scores, values = _products(q, keys)
    last = wide_rows - narrow_rows
    return all(
        _same_bits(q, keys, scores, values, items, slice(start, start + narrow_rows))
        for items in (1, 5, 48)
        for start in {0, last // 2, last}
    )


def _products(q: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.bmm(q, keys.transpose(1, 2))
    return scores, torch.bmm(scores, keys)


def _same_bits(q: Tensor, keys: Tensor, scores: Tensor, values: Tensor, items: int, rows: slice) -> bool:
    few_scores, few_values = _products(q[:items, rows].contiguous(), keys[:items].contiguous())
    return torch.equal(few_scores, scores[:items, rows]) and torch.equal(few_values, values[:items, rows])


def _cut(sequence: int, row: int, num_rows: int, start: int, size: int, window: int | None) -> list[Tile]:
    """Tiles of one sequence whose rows begin at `row` of the batch and at position `start`."""
    tiles = []
    for offset in range(0, num_rows, size):
        rows = min(size, num_rows - offset)
        position = start + offset
        first = 0 if window is None else max(0, position - window + 1) // SPLIT
        last = (position + rows - 1) // SPLIT
        tiles.append(Tile(sequence, row + offset, rows, position, first, last - first + 1))
    return tiles


def _rounds(tiles: list[Tile], heads: Heads) -> list[list[Tile]]:
    """Tiles, most splits first, in groups whose gathered keys stay within `MAX_ITEM_BYTES` (one tile always fits)."""
    item_bytes = heads.num_kv_heads * SPLIT * heads.head_dim * 4
    limit = max(1, MAX_ITEM_BYTES // item_bytes)
    groups: list[list[Tile]] = []
    items = limit
    for tile in sorted(tiles, key=lambda tile: -tile.num_splits):
        if items + tile.num_splits > limit:
            groups.append([])
            items = 0
        groups[-1].append(tile)
        items += tile.num_splits
    return groups


def _index(
    tiles: list[Tile],
    size: int,
    heads: Heads,
    block_table: Tensor,
    block_size: int,
    seq_lens: Sequence[int],
    window: int | None,
) -> Round:
    """The index tensors of one round."""
    device = block_table.device
    tiles_with = tuple(sum(tile.num_splits > split for tile in tiles) for split in range(tiles[0].num_splits))
    items = [(index, split) for split, count in enumerate(tiles_with) for index in range(count)]
    facts = torch.tensor(
        [
            (
                index,
                tiles[index].sequence,
                (tiles[index].first_split + split) * SPLIT,
                seq_lens[tiles[index].sequence],
            )
            for index, split in items
        ]
    ).to(device)
    item_tile, sequence, first_key, length = facts.unbind(1)
    keys = first_key.unsqueeze(1) + torch.arange(SPLIT, device=device)  # [num_items, SPLIT] positions
    positions, rows, kept, kept_rows = _tile_rows(tiles, size, device)
    at = positions[item_tile].unsqueeze(2)  # [num_items, size, 1]
    seen = keys.unsqueeze(1)
    hidden = seen > at if window is None else (seen > at) | (seen <= at - window)
    stored = torch.minimum(keys, length.unsqueeze(1) - 1)  # hidden keys beyond the end read a real one
    blocks = block_table[sequence.unsqueeze(1), stored // block_size].long()
    head = torch.arange(heads.num_kv_heads, device=device).unsqueeze(1)
    kv_rows = (blocks.unsqueeze(1) * heads.num_kv_heads + head) * block_size + (
        stored % block_size
    ).unsqueeze(1)
    return Round(
        rows, kept, kept_rows, item_tile, kv_rows.flatten(), hidden[:, None, :, None, :], tiles_with, size
    )


def _tile_rows(
    tiles: list[Tile], size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Positions [num_tiles, size], rows [num_tiles * size], kept places and the rows there."""
    first = torch.tensor([(tile.first_row, tile.first_position, tile.num_rows) for tile in tiles]).to(device)
    first_row, first_position, num_rows = (column.unsqueeze(1) for column in first.unbind(1))
    offset = torch.arange(size, device=device).unsqueeze(0)
    inside = torch.minimum(offset, num_rows - 1)
    rows = (first_row + inside).flatten()
    if all(tile.num_rows == size for tile in tiles):
        return first_position + inside, rows, None, rows
    kept = (offset < num_rows).flatten().nonzero().squeeze(1)
    return first_position + inside, rows, kept, rows[kept]


def _attend(q: Tensor, key_cache: Tensor, value_cache: Tensor, part: Round, scale: float) -> Tensor:
    """[num_tiles * tile_tokens, num_heads, head_dim] in the dtype of computation."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, size = key_cache.shape[1], part.tile_tokens
    group, num_items = num_heads // num_kv_heads, part.item_tile.shape[0]
    keys = key_cache.view(-1, head_dim).index_select(0, part.kv_rows).to(wide)
    values = value_cache.view(-1, head_dim).index_select(0, part.kv_rows).to(wide)
    tiles = (q.index_select(0, part.rows).to(wide) * scale).view(-1, size, num_kv_heads, group * head_dim)
    tiles = tiles.transpose(1, 2).reshape(-1, num_kv_heads, size * group, head_dim)
    scores = torch.bmm(
        tiles.index_select(0, part.item_tile).view(-1, size * group, head_dim),
        keys.view(-1, SPLIT, head_dim).transpose(1, 2),
    )
    shaped = scores.view(num_items, num_kv_heads, size, group, SPLIT).masked_fill_(part.hidden, float("-inf"))
    scores = shaped.view(-1, size * group, SPLIT)
    peak = scores.amax(-1, keepdim=True)
    # A split that hides all keys from a row has the peak -inf; any finite number then gives weights of zero.
    weights = scores.sub_(peak.clamp(min=torch.finfo(wide).min)).exp_()
    total = weights.sum(-1, keepdim=True)
    mixed = torch.bmm(weights, values.view(-1, SPLIT, head_dim))
    joined = _join(part.tiles_with, num_kv_heads, peak, total, mixed)
    joined = joined.view(-1, num_kv_heads, size, group * head_dim).transpose(1, 2)
    return joined.reshape(-1, num_heads, head_dim)


def _join(
    tiles_with: tuple[int, ...], num_kv_heads: int, peak: Tensor, total: Tensor, mixed: Tensor
) -> Tensor:
    """Add the splits of every row in the order of their positions: [num_tiles * num_kv_heads, rows, head_dim].

    `peak`, `total` and `mixed` are [num_items * num_kv_heads, rows, 1 or head_dim], items sorted as in `Round`.
    """
    counts = [count * num_kv_heads for count in tiles_with]
    highest = peak[: counts[0]].clone()
    parts = list(zip(counts, *(torch.split(part, counts) for part in (peak, total, mixed)), strict=True))
    for count, split_peak, _, _ in parts[1:]:
        torch.maximum(highest[:count], split_peak, out=highest[:count])
    sums, values = torch.zeros_like(highest), mixed.new_zeros((counts[0], *mixed.shape[1:]))
    for count, split_peak, split_total, split_mixed in parts:
        factor = (split_peak - highest[:count]).exp_()
        sums[:count] += factor * split_total
        values[:count] += factor * split_mixed
    return values.div_(sums)
