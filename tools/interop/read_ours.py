"""`make interop`: what paged writes, read by the packages whose formats they are, each in an environment of its own.

    python tools/interop/read_ours.py [--only NAME ...] [--resume] [--json FILE]

A small random model is written in every format and option; each package reads what it should be able to read, and what
it makes of it is compared with the weights that the codes mean. whole_model.py does the same with a whole model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT), str(ROOT / "kernels")]

from judging import EPSILON, Cells, try_package  # noqa: E402

from pagedcli.checkpoint.quant_tensor import QuantTensor  # noqa: E402
from pagedcli.checkpoint.quant_writer import Target, WriteSettings, write_quantized  # noqa: E402
from pagedcli.checkpoint.sources import open_checkpoint  # noqa: E402
from tests.fixtures_checkpoints import write_tiny_checkpoint  # noqa: E402
from tests.quant_support import dense_weights, quantize, unpack_independently  # noqa: E402

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True)
class Variant:
    """A format with its options."""

    target: Target
    bits: int
    group: int
    symmetric: bool
    act_order: bool = False
    tied: bool = True
    kept: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of its folder and its row."""
        parts = [self.target, f"{self.bits}bit", f"g{self.group}", "sym" if self.symmetric else "asym"]
        parts += ["act-order"] * self.act_order + ["untied"] * (not self.tied) + ["kept"] * bool(self.kept)
        return "-".join(parts)


KEPT = ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj")
AWQ = (
    Variant("autoawq", 4, 64, False),
    Variant("autoawq", 4, 128, False, tied=False),
    Variant("autoawq", 4, -1, False),
    Variant("autoawq", 4, 64, True),
    Variant("autoawq", 4, 64, False, kept=KEPT),
)
GPTQ = (
    Variant("gptq", 4, 64, True),
    Variant("gptq", 4, 64, True, act_order=True),
    Variant("gptq", 4, -1, True, tied=False),
    Variant("gptq", 8, 64, True),
    Variant("gptq", 4, 64, True, kept=KEPT),
    Variant("gptq_v2", 4, 64, False),
    Variant("gptq_v2", 8, 64, False, act_order=True),
)
COMPRESSED = (
    Variant("compressed-tensors", 8, -1, True),
    Variant("compressed-tensors", 8, 64, True),
    Variant("compressed-tensors", 4, 64, False),
    Variant("compressed-tensors", 4, 64, True),
    Variant("compressed-tensors", 8, 64, True, kept=KEPT),
)
UNPACKER = "independent unpacker"
READS = {
    UNPACKER: (*AWQ, *GPTQ, *COMPRESSED),
    "autoawq": AWQ,
    "auto-gptq": GPTQ,
    "gptqmodel": (*AWQ, *GPTQ),
    "compressed-tensors": COMPRESSED,
    "transformers": (*AWQ, *GPTQ, *COMPRESSED),
    "vllm": (*AWQ, *GPTQ, *COMPRESSED),
}
# AutoGPTQ knows neither version 2 nor layers left dense: it reads such folders and computes nonsense (docs/formats.md).
KNOWN_WRONG = {("auto-gptq", v.name) for v in GPTQ if v.target == "gptq_v2" or v.kept}


def write(variant: Variant, folder: Path) -> dict[str, np.ndarray]:
    """The folder; returns the weights that it means, float32 by name."""
    source = write_tiny_checkpoint(
        folder.with_name(folder.name + "-source"),
        "llama",
        dtype="float16",
        tie_word_embeddings=variant.tied,
        **SIZES,
    )
    checkpoint = open_checkpoint(source)
    random, meant, tensors = np.random.default_rng(0), {}, []
    for name in checkpoint.names():
        stored = checkpoint.tensor(name)
        values = stored.data.view(np.float16).reshape(stored.shape).astype(np.float32)
        meant[name] = values
        linear = name.removesuffix(".weight")
        if name.endswith("_proj.weight") and linear not in variant.kept:
            order = random.permutation(values.shape[1]) if variant.act_order else None
            grid = quantize(values, variant.bits, variant.group, symmetric=variant.symmetric, order=order)
            meant[name] = grid.weight().astype(np.float32)
            g_idx = grid.g_idx.astype(np.int32) if variant.act_order else None
            codes, zeros = grid.codes.astype(np.uint8), grid.zeros.astype(np.uint8)
            scales = grid.scales.astype(np.float32)
            tensors.append(
                QuantTensor(linear, variant.bits, grid.group, codes, scales, zeros, None, g_idx, "rtn")
            )
    group = variant.group if variant.group != SIZES["intermediate_size"] else -1
    settings = WriteSettings(
        variant.target, variant.bits, group, variant.symmetric, variant.act_order, variant.kept, "float16"
    )
    write_quantized(folder, checkpoint, tensors, settings)
    return meant


def try_one(package: str, variant: Variant, work: Path) -> tuple[str, str]:
    """(version, outcome) of one cell."""
    folder = work / variant.name
    if package == UNPACKER:
        return "", unpacked(folder, write(variant, folder))
    return try_package(package, folder, work / f"{package}-{variant.name}.npz", write(variant, folder))


def unpacked(folder: Path, meant: dict[str, np.ndarray]) -> str:
    """Whether tests/quant_support.py, which shares no code with paged, finds the same weights, and the rest dense."""
    found, dense = unpack_independently(folder), dense_weights(folder)
    if missing := {name for name in meant if name.endswith("_proj.weight")} - set(found) - set(dense):
        return f"WRONG: {min(missing)} is not there"
    worst = max(
        float(np.abs(values - meant[name]).max() / np.abs(meant[name]).max())
        for name, values in {**dense, **found}.items()
        if name in meant
    )
    return "equal" if worst < EPSILON else f"WRONG ({worst:.1e})"


def main() -> int:
    """Try all cells; exit code 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="*", choices=list(READS), default=list(READS))
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "data" / "interop.json")
    parser.add_argument("--resume", action="store_true", help="keep the cells that the file has")
    options = parser.parse_args()
    cells = Cells(options.json, options.resume)
    with tempfile.TemporaryDirectory() as work:
        for package in options.only:
            for variant in READS[package]:
                cells.fill(package, variant.name, partial(try_one, package, variant, Path(work)))
    return int(cells.wrong(KNOWN_WRONG))


if __name__ == "__main__":
    sys.exit(main())
