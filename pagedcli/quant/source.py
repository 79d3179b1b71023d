"""A checkpoint's tensors as torch tensors, read when they are needed, and looked through for numbers that are none.

Imports torch, `checkpoint`, `models`, `errors`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedcli.checkpoint.base import Checkpoint, RawTensor
from pagedcli.errors import CheckpointError
from pagedcli.models.spec import ModelSpec

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROWS_BYTES = 16 << 20


class Source:
    """Reads float32 tensors from a checkpoint; what it reads is not kept."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def tensor(self, name: str) -> Tensor:
        """One tensor as float32, a copy."""
        stored = self.checkpoint.tensor(name)
        shape = stored.shape
        values = _float32(stored.rows(0, shape[0])).view(shape)
        stored.release()
        return values

    def optional(self, name: str) -> Tensor | None:
        """As `tensor`; None if the checkpoint has none."""
        return self.tensor(name) if name in self.checkpoint.names() else None

    @property
    def dense_dtype(self) -> str:
        """What a written copy stores tensors in that are not quantized, as the writer chooses it."""
        return str(self.checkpoint.config.get("torch_dtype", "float32"))

    def rows(self, name: str, indices: list[int]) -> Tensor:
        """Some rows of a table, [len(indices), columns] float32."""
        stored = self.checkpoint.tensor(name)
        found = [stored.rows(index, index + 1).data for index in indices]
        shape = (len(indices), *stored.shape[1:])
        return _float32(RawTensor(name, stored.dtype, shape, np.concatenate(found)))


def check_finite(checkpoint: Checkpoint, names: list[str], progress: Callable[[int], None]) -> str:
    """Look through tensors for infinity and NaN; returns a digest of their bytes.

    Args:
        checkpoint: The source.
        names: Of the tensors.
        progress: Told how many are done.

    Raises:
        CheckpointError: Names the tensor, what it holds and where.
    """
    digest = hashlib.sha256()
    for done, name in enumerate(names):
        stored = checkpoint.tensor(name)
        digest.update(f"{name} {stored.dtype} {stored.shape}\n".encode())
        for first, last in _chunks(stored.shape):
            part = stored.rows(first, last)
            digest.update(part.data.tobytes())
            _refuse(checkpoint, name, first, _float32(part))
        stored.release()
        progress(done + 1)
    return digest.hexdigest()


def _refuse(checkpoint: Checkpoint, name: str, first: int, values: Tensor) -> None:
    # NaN and infinity spoil a sum; finite numbers can only by overflowing, and then the long way tells.
    if bool(torch.isfinite(values.sum())):
        return
    bad = (~torch.isfinite(values)).nonzero()
    if len(bad):
        place = [int(bad[0][0]) + first, *bad[0][1:].tolist()]
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name} holds {float(values[tuple(bad[0])])} at {place} ({len(bad)} such "
            "numbers): it cannot be quantized; get a sound copy of the model"
        )


def _chunks(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    row_bytes = 4 * int(np.prod(shape[1:], dtype=np.int64))
    step = max(1, _ROWS_BYTES // max(1, row_bytes))
    return [(first, min(first + step, shape[0])) for first in range(0, shape[0], step)]


def _float32(tensor: RawTensor) -> Tensor:
    data: np.ndarray[Any, np.dtype[np.uint8]] = np.array(tensor.data)  # aligned, and ours
    return torch.from_numpy(data).view(DTYPES[tensor.dtype]).view(tensor.shape).float()


def layer_tensors(names: list[str], spec: ModelSpec) -> list[str]:
    """Names in the order in which they are worked on: embedding, layers by number, the rest."""
    prefixes = [f"model.layers.{index}." for index in range(spec.num_layers)]
    ranks = {prefix: rank for rank, prefix in enumerate(prefixes)}

    def rank(name: str) -> tuple[int, str]:
        parts = name.split(".")
        prefix = ".".join(parts[:3]) + "."
        return ranks.get(prefix, -1 if "embed" in name else len(prefixes)), name

    return sorted(names, key=rank)
