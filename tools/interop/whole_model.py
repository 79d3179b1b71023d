"""A whole model in all formats: ours read by other packages, theirs read by ours and by the independent unpacker.

    python tools/interop/whole_model.py WORK [--only PACKAGE ...] [--json FILE]

WORK is the folder of `make quality`: what our quantizers and the other packages' made of one model. Ours are read by
every package that knows the format, and compared with the weights that the codes mean, by an unpacker that shares no
code with paged (tests/quant_support.py). Theirs are read by paged, and compared with the same unpacker's reading.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT), str(ROOT / "kernels")]

from judging import try_package  # noqa: E402
from their_quantizers import RUNS  # noqa: E402

from pagedcli.checkpoint import open_checkpoint  # noqa: E402
from tests.quant_support import unpack_independently  # noqa: E402

READERS = {
    "awq": ("autoawq", "gptqmodel", "transformers", "vllm"),
    "gptq": ("auto-gptq", "gptqmodel", "transformers", "vllm"),
    "gptq_v2": ("gptqmodel", "transformers", "vllm"),
    "compressed-tensors": ("compressed-tensors", "transformers", "vllm"),
}
_EPSILON = 1e-6


def settings(folder: Path) -> dict[str, str]:
    """`quantization_config`."""
    found: dict[str, str] = json.loads((folder / "config.json").read_text(encoding="utf-8"))[
        "quantization_config"
    ]
    return found


def kind(folder: Path) -> str:
    """Key of `READERS`."""
    own = settings(folder)
    return "gptq_v2" if own.get("checkpoint_format") == "gptq_v2" else own["quant_method"]


def meant(folder: Path) -> dict[str, np.ndarray]:
    """All weights, by the independent unpacker; the dense ones as they are stored."""
    from safetensors.torch import load_file

    found = unpack_independently(folder)
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name.endswith(".weight") and name != "lm_head.weight":
                found[name] = tensor.float().numpy()
    return found


def read_by_paged(folder: Path) -> str:
    """Whether paged means the same weights as the independent unpacker."""
    checkpoint, wanted = open_checkpoint(folder), unpack_independently(folder)
    worst, linears = 0.0, 0
    for name, values in wanted.items():
        quantized = checkpoint.quantized(name.removesuffix(".weight"))
        if quantized is None:
            return f"WRONG: {name} is not read as quantized"
        worst = max(worst, float(np.abs(quantized.dequantize() - values).max() / np.abs(values).max()))
        linears += 1
    return f"equal, {linears} linears" if worst < _EPSILON else f"WRONG ({worst:.1e})"


def cells(work: Path, only: list[str], out: Path) -> Iterator[tuple[str, str, str]]:
    """(reader, folder, outcome) of everything there is."""
    for folder in sorted(path for path in work.iterdir() if (path / "config.json").is_file()):
        name = folder.name.rpartition("-")[0]
        if "paged" in only:
            yield "paged, codes", folder.name, read_by_paged(folder)
        if name in RUNS:
            continue
        wanted = meant(folder)
        for package in READERS[kind(folder)]:
            if package in only:
                version, outcome = try_package(package, folder, out / f"{package}-{folder.name}.npz", wanted)
                yield version, folder.name, outcome


def main() -> int:
    """Try all cells; exit code 1 if one is wrong."""
    packages = ["paged", *sorted({package for known in READERS.values() for package in known})]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("work", type=Path)
    parser.add_argument("--only", nargs="*", choices=packages, default=packages)
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "interop-whole.json")
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as out:
        for reader, folder, outcome in cells(options.work, options.only, Path(out)):
            print(f"{reader:28} {folder:44} {outcome}", flush=True)
            found.append({"reader": reader, "folder": folder, "outcome": outcome})
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any("WRONG" in cell["outcome"] for cell in found))


if __name__ == "__main__":
    sys.exit(main())
