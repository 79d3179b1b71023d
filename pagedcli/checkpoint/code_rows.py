"""`CodeRows`: the codes of a stored linear, unpacked as they are asked for. Imports numpy alone.

Whoever loads a model asks for a range of rows at a time, so that the codes of no linear are in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class CodeRows:
    """[out, in] uint8 as far as shape, slices of rows and `np.asarray` go; nothing is kept.

    Args:
        shape: (out, in).
        read: Codes of the rows from the first up to, not including, the last, [rows, in] uint8.
    """

    dtype, ndim = np.dtype(np.uint8), 2

    def __init__(self, shape: tuple[int, int], read: Callable[[int, int], np.ndarray]) -> None:
        self.shape, self._read = shape, read

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> np.ndarray:
        """A range of rows; anything else is taken from all codes."""
        if not isinstance(key, slice) or key.step not in (None, 1):
            return np.asarray(np.asarray(self)[key])
        first, last, _ = key.indices(self.shape[0])
        return self._read(first, last) if first < last else np.empty((0, self.shape[1]), np.uint8)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All codes."""
        return self._read(0, self.shape[0]).astype(dtype or np.uint8, copy=False)
