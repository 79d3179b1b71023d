"""`ComputedTensor`: a stored tensor whose values are made when they are asked for. Imports numpy alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pagedcli.checkpoint.base import Bytes, RawTensor, release_pages


@dataclass(frozen=True, slots=True)
class ComputedTensor:
    """A `StoredTensor` that is not in the file as it is wanted: rows are dequantized and put in order when asked for.

    Attributes:
        name: Hugging Face name.
        dtype: Of the values.
        shape: As in PyTorch.
        read: Values of the given rows, as an array of the dtype.
        stored: Bytes of the file that they are made from.
        kind: How they are stored.
        order: Which stored row comes where; None: as they lie.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[slice], np.ndarray]
    stored: Bytes
    kind: str = ""
    order: np.ndarray | None = None

    @property
    def data(self) -> Bytes:
        """All of it, computed anew each time."""
        return self.rows(0, self.shape[0]).data

    def rows(self, first: int, last: int) -> RawTensor:
        """Some rows."""
        values = np.ascontiguousarray(self.read(slice(first, last)))
        return RawTensor(self.name, self.dtype, values.shape, values.reshape(-1).view(np.uint8))

    def blocks(self) -> tuple[str, Bytes, np.ndarray | None]:
        """Kind, bytes and order of the stored rows, for whoever can read them."""
        return self.kind, self.stored, self.order

    def release(self) -> None:
        """Give back the memory of the stored bytes."""
        release_pages(self.stored)
