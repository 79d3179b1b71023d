"""Block tables of all slots, on the host and in a fixed buffer on the device. May import torch and numpy.

    slot 0   | 7 3 9 . |
    slot 1   | 7 4 . . |        one row a slot; what lies behind a table's end is a valid block, and never read
    ...
    last     | s s s s |        for rows that only fill a batch up: `scratch`

A step changes few entries; they go to the device in one transfer (`flush`), in the order of the plans.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedcli.runtime.transfer import to_device


class BlockTables:
    """Tables of `rows` slots.

    Args:
        rows: Slots, the one for filling included.
        width: Blocks of the longest sequence.
        scratch: Block of the last row, which holds no sequence's keys.
        device: Of the model.

    Attributes:
        host: [rows, width] int32.
        device: As `host`, once flushed. Always the same memory.
    """

    def __init__(self, rows: int, width: int, scratch: int, device: torch.device) -> None:
        self.host: npt.NDArray[np.int32] = np.zeros((rows, width), dtype=np.int32)
        self.device = torch.zeros((rows, width), dtype=torch.int32, device=device)
        self._changed: list[tuple[int, Sequence[int]]] = []
        self.put(rows - 1, 0, (scratch,) * width)
        self.flush()

    def put(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Set the entries of a slot from `first` on; an entry at most once before each flush."""
        self.host[slot, first : first + len(blocks)] = blocks
        self._changed.append((slot * self.host.shape[1] + first, blocks))

    def flush(self) -> None:
        """Send what was put to the device, after all that was issued before."""
        if not self._changed:
            return
        places = np.concatenate([np.arange(start, start + len(blocks)) for start, blocks in self._changed])
        blocks = np.concatenate([np.asarray(blocks, dtype=np.int64) for _, blocks in self._changed])
        self._changed = []
        sent: Tensor = to_device(np.stack((places, blocks)), self.device.device)
        self.device.view(-1).index_copy_(0, sent[0], sent[1].int())
