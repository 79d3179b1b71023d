"""A model written as a plain Hugging Face folder, for packages that read nothing else. May import `checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pagedcli.checkpoint.base import FLOAT_DTYPES, Checkpoint, StoredTensor
from pagedcli.checkpoint.quant_writer import copy_companions
from pagedcli.checkpoint.safetensors_writer import SafetensorsWriter, as_stored, write_json
from pagedcli.ops.torch_ops import STORED_DTYPES

_ROWS_BYTES = 64 << 20
_CODES = {name: code for code, name in FLOAT_DTYPES.items()}


def write_dense(folder: Path, source: Checkpoint) -> None:
    """All tensors in the dtype that the model computes in, with configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(source.config.get("torch_dtype", "float32"))
    with SafetensorsWriter(folder) as writer:
        for name in source.names():
            tensor = source.tensor(name)
            writer.add(name, _CODES[dtype], tensor.shape, _pieces(tensor, _CODES[dtype]))
            tensor.release()
        writer.finish()
    copy_companions(folder, source)
    write_json(folder / "config.json", {**source.config, "torch_dtype": dtype})


def _pieces(tensor: StoredTensor, code: str) -> Iterator[bytes]:
    import torch

    rows = tensor.shape[0]
    step = max(1, _ROWS_BYTES // max(1, 4 * _row(tensor.shape)))
    for first in range(0, rows, step):
        part = tensor.rows(first, min(first + step, rows))
        values = torch.frombuffer(bytearray(part.data), dtype=STORED_DTYPES[part.dtype]).float()
        yield as_stored(tensor.name, values.numpy(), code)


def _row(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape[1:]:
        count *= size
    return count
