"""Bits that a weight of the decoder's linears takes as stored, in any checkpoint that paged reads."""

from __future__ import annotations

import math
from pathlib import Path

from pagedcli.checkpoint import open_checkpoint
from pagedcli.checkpoint.folder import open_weights
from pagedcli.checkpoint.gguf_file import GGUFFile


def bits_per_weight(path: Path) -> float:
    """Everything that is stored for the linears of the layers (codes, scales, zero points, g_idx), but biases.

    Args:
        path: A folder or a GGUF file.
    """
    stored = _of_gguf(path) if path.is_file() else _of_folder(path)
    checkpoint = open_checkpoint(path)
    weights = sum(
        math.prod(checkpoint.shape(name)) for name in checkpoint.names() if name.endswith("_proj.weight")
    )
    return 8 * stored / weights


def _of_folder(folder: Path) -> int:
    return sum(
        file.num_bytes(name)
        for name, file in open_weights(folder).items()
        if name.rpartition(".")[0].endswith("_proj") and not name.endswith(".bias")
    )


def _of_gguf(path: Path) -> int:
    tensors = GGUFFile(path).tensors.values()
    return sum(
        tensor.num_bytes for tensor in tensors if tensor.name.startswith("blk.") and len(tensor.shape) > 1
    )
