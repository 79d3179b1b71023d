"""The pool of KV blocks on torch. May import torch, `core`, `errors`.

Block ids are 0 to num_blocks - 1, and every block can be used. What a block holds is undefined until it is written:
a cell is read only after the plan that computes its position, or a copy, wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagedcli.config_file import show_bytes
from pagedcli.errors import ConfigError
from pagedcli.runtime.transfer import to_device


class PagedKVCache:
    """Keys and values of all layers, in one allocation.

        pool [num_layers, 2 (key, value), num_blocks + num_scratch, num_kv_heads, block_size, head_dim]

    Args:
        num_layers: Layers of the model.
        num_blocks: Blocks of each layer.
        num_kv_heads: Key-value heads of one layer.
        block_size: Tokens in a block.
        head_dim: Elements of one head's key.
        dtype: Of keys and values.
        device: Where the pool lies.
        num_scratch: Blocks behind the others that hold no sequence's keys.

    Attributes:
        num_blocks: Usable blocks of each layer.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        num_scratch: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        shape = (num_layers, 2, num_blocks + num_scratch, num_kv_heads, block_size, head_dim)
        # Zeros, not whatever the memory held: a backend may read (and mask) cells that nothing wrote, and 0 * NaN
        # would spoil a sum. On a CPU the pages behind the zeros come from the system when first written.
        self._pool = _zeros(shape, dtype, device)

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._pool.shape[4]

    @property
    def num_bytes(self) -> int:
        """Memory of the pool."""
        return self._pool.numel() * self._pool.element_size()

    def key(self, layer: int) -> Tensor:
        """[num_blocks + num_scratch, num_kv_heads, block_size, head_dim], contiguous."""
        return self._pool[layer, 0]

    def value(self, layer: int) -> Tensor:
        """As `key`."""
        return self._pool[layer, 1]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks of every layer; all are read before any is written."""
        if not copies:
            return
        source, destination = to_device(np.array(copies, dtype=np.int64), self._pool.device).unbind(1)
        self._pool[:, :, destination] = self._pool[:, :, source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # calloc, which torch.zeros on a CPU is not: a pool larger than what is ever used costs nothing.
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
    except (MemoryError, torch.OutOfMemoryError) as error:
        more = " or --gpu-memory-utilization" if device.type != "cpu" else ""
        raise ConfigError(
            f"{shape[2]} pages take {show_bytes(num_bytes)} for KV, which {device} does not have: "
            f"lower --num-pages or --kv-memory{more}"
        ) from error
