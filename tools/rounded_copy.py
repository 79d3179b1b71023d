"""Write a copy of the default model in AWQ's format in seconds, rounded to nearest: for timing where AWQ takes long.

python tools/rounded_copy.py FOLDER [MODEL]

Codes, scales and zero points are stored and computed with as AWQ's are, so that speed and memory are the same. The
quality is not, and no quality.json is written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pagedcli.checkpoint.base import Checkpoint, StoredTensor  # noqa: E402
from pagedcli.checkpoint.quant_tensor import QuantTensor  # noqa: E402
from pagedcli.checkpoint.quant_writer import WriteSettings, write_quantized  # noqa: E402
from pagedcli.checkpoint.sources import open_checkpoint, resolve_model  # noqa: E402

GROUP = 64
MOST = 15


def widened(tensor: StoredTensor) -> np.ndarray:
    """As float32."""
    data = np.asarray(tensor.data)
    if tensor.dtype == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    kind = np.float16 if tensor.dtype == "F16" else np.float32
    return data.view(kind).astype(np.float32).reshape(tensor.shape)


def rounded(name: str, weight: np.ndarray) -> QuantTensor:
    """A weight [out, in] in groups of 64 inputs, from the least to the greatest of each, 0 included."""
    grouped = weight.reshape(len(weight), -1, GROUP)
    low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
    scales = np.maximum((high - low) / MOST, 1e-4).astype(np.float16).astype(np.float32)
    zeros = np.clip(np.rint(-low / scales), 0, MOST)
    codes = np.clip(np.rint(grouped / scales[..., None]) + zeros[..., None], 0, MOST)
    return QuantTensor(
        name,
        4,
        GROUP,
        codes.astype(np.uint8).reshape(weight.shape),
        scales,
        zeros.astype(np.uint8),
        None,
        None,
        "awq",
    )


def linears(source: Checkpoint) -> Iterator[QuantTensor]:
    """Those of the decoder layers."""
    for name in sorted(source.names()):
        if name.endswith("_proj.weight"):
            yield rounded(name.removesuffix(".weight"), widened(source.tensor(name)))


def main() -> int:
    """Write the folder named by the first argument."""
    if len(sys.argv) not in (2, 3):
        print("usage: python tools/rounded_copy.py FOLDER [MODEL]", file=sys.stderr)
        return 2
    source = open_checkpoint(resolve_model(sys.argv[2] if len(sys.argv) == 3 else None))
    settings = WriteSettings("autoawq", 4, GROUP, symmetric=False, dtype="bfloat16")
    write_quantized(Path(sys.argv[1]), source, linears(source), settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
