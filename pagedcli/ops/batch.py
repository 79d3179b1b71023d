"""What one forward pass works on: the batch and the KV cache, as the ops see them. Imports nothing of a backend.

A batch is a flat list of rows (tokens) of several sequences. The rows of sequence i lie together and in order:

    rows      | seq 0: 3 rows | seq 1 | seq 2: 2 rows |        query_start = 0, 3, 4, 6
    positions | 16  17  18    | 204   | 0   1         |        seq_lens    = 19, 205, 2

Row r of sequence i sees positions 0 to positions[r] of the same sequence; the keys and values of the batch's own rows
are written before attention reads any. Arrays are buffers of the backend (torch: tensors on the device).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(slots=True)
class ForwardBatch:
    """The rows of one step, filled by `runtime` from a `StepPlan`.

    Attributes:
        token_ids: [num_tokens] int64.
        positions: [num_tokens] int64, consecutive within a sequence.
        slot_mapping: [num_tokens] int64, block * block_size + offset, where the row's key and value are written.
        query_start: [num_seqs + 1] int32, rows of sequence i are query_start[i] to query_start[i + 1] - 1.
        seq_lens: [num_seqs] int32, tokens of the sequence whose keys exist once this batch's are written.
        block_table: [num_seqs, max_blocks] int32, blocks of positions 0, block_size, ...; the rest is ignored and
            may hold any valid block id.
        logit_rows: [num_logit_rows] int64, rows whose logits are computed, in the order of the result.
        query_lens: Host copy: rows of each sequence.
        host_seq_lens: Host copy of seq_lens.
        scratch: For the backend alone: what it derives from the batch once and uses in every layer. A batch object
            that is filled again must clear it.
    """

    token_ids: Any
    positions: Any
    slot_mapping: Any
    query_start: Any
    seq_lens: Any
    block_table: Any
    logit_rows: Any
    query_lens: Sequence[int]
    host_seq_lens: Sequence[int]
    scratch: dict[str, Any] = field(default_factory=dict)


class KVCache(Protocol):
    """Keys and values of all layers. Provided by `runtime`; a backend's ops write and read it."""

    @property
    def num_blocks(self) -> int:
        """Blocks of each layer."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    def key(self, layer: int) -> Any:
        """[num_blocks, num_kv_heads, block_size, head_dim] of the run's dtype, contiguous."""

    def value(self, layer: int) -> Any:
        """As `key`."""
