"""A whole model in all formats: ours read by other packages, theirs read by ours and by the independent unpacker.

    python tools/interop/whole_model.py MODEL --work FOLDER [--theirs FOLDER] [--only PACKAGE ...] [--resume]
        [--json FILE]

MODEL is rounded to nearest into every format, a folder each in WORK; paged and every package that knows the format
read it, and are compared with the weights that the codes mean, by an unpacker that shares no code with paged
(tests/quant_support.py). Packages that run the model read a text, and may be off by some times what bfloat16 does to
this model. --theirs is the folder of `make quality`: what other packages' quantizers made there is read by paged, and
compared with the same unpacker's reading.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT), str(ROOT / "kernels")]

from judging import EPSILON, Cells, Reading, try_package  # noqa: E402
from their_quantizers import RUNS  # noqa: E402

from pagedcli import __version__  # noqa: E402
from pagedcli.checkpoint import open_checkpoint  # noqa: E402
from pagedcli.checkpoint.quant_writer import Target  # noqa: E402
from pagedcli.quant.options import QuantizeOptions  # noqa: E402
from pagedcli.quant.pipeline import quantize_layers  # noqa: E402
from pagedcli.quant.plan import plan_quantization  # noqa: E402
from pagedcli.quant.writing import write_checkpoint  # noqa: E402
from tests.quant_support import dense_weights, unpack_independently  # noqa: E402

OURS: dict[str, tuple[Target, int, bool]] = {
    "autoawq-4bit-asym": ("autoawq", 4, False),
    "gptq-4bit-sym": ("gptq", 4, True),
    "gptq-8bit-sym": ("gptq", 8, True),
    "gptq_v2-4bit-asym": ("gptq_v2", 4, False),
    "compressed-tensors-4bit-asym": ("compressed-tensors", 4, False),
    "compressed-tensors-8bit-sym": ("compressed-tensors", 8, True),
}
"""Target, bits, and whether symmetric, by the name of the folder; groups are of 64."""

READERS: dict[Target, tuple[str, ...]] = {
    "autoawq": ("autoawq", "gptqmodel", "transformers", "vllm"),
    "gptq": ("auto-gptq", "gptqmodel", "transformers", "vllm"),
    "gptq_v2": ("gptqmodel", "transformers", "vllm"),
    "compressed-tensors": ("compressed-tensors", "transformers", "vllm"),
}
TEXT = (
    "The capital of France is Paris. Water boils at 100 degrees Celsius at sea level, and freezes at 0 degrees. "
    "The largest planet of the solar system is Jupiter, which has many moons."
)


def write(model: Path, name: str, work: Path) -> Path:
    """The folder of one of `OURS`, made if it is not there."""
    folder, (target, bits, symmetric) = work / name, OURS[name]
    if not (folder / "config.json").is_file():  # it is written last
        checkpoint = open_checkpoint(model)
        plan = plan_quantization(
            checkpoint, QuantizeOptions(method="rtn", bits=bits, group_size=64, sym=symmetric), [], 1
        )
        with tempfile.TemporaryDirectory() as kept:
            found = quantize_layers(checkpoint, plan, [], Path(kept), threads=1)
            write_checkpoint(folder, checkpoint, plan, target, found)
    return folder


def meant(folder: Path) -> dict[str, np.ndarray]:
    """All weights, by the independent unpacker; the dense ones as they are stored."""
    return unpack_independently(folder) | dense_weights(folder)


def try_paged(model: Path, name: str, work: Path) -> tuple[str, str]:
    """(version, outcome) of paged on one of `OURS`."""
    return read_by_paged(write(model, name, work))


def read_by_paged(folder: Path) -> tuple[str, str]:
    """(version, whether paged means the same weights as the independent unpacker)."""
    checkpoint, wanted = open_checkpoint(folder), unpack_independently(folder)
    worst, linears, version = 0.0, 0, f"paged {__version__}"
    for name, values in wanted.items():
        quantized = checkpoint.quantized(name.removesuffix(".weight"))
        if quantized is None:
            return version, f"WRONG: {name} is not read as quantized"
        worst = max(worst, float(np.abs(quantized.dequantize() - values).max() / np.abs(values).max()))
        linears += 1
    return version, f"equal, {linears} linears" if worst < EPSILON else f"WRONG ({worst:.1e})"


def theirs(work: Path | None) -> list[Path]:
    """Folders that other packages made."""
    if work is None:
        return []
    made = sorted(path for path in work.iterdir() if (path / "config.json").is_file())
    return [path for path in made if path.name.rpartition("-")[0] in RUNS]


def fill(cells: Cells, model: Path, work: Path, only: list[str]) -> None:
    """All cells of what is written here."""
    for name, (target, *_) in OURS.items():
        for package in ("paged", *READERS[target]):
            if package not in only:
                continue
            if package == "paged":
                cells.fill(package, name, partial(try_paged, model, name, work))
            else:
                cells.fill(package, name, partial(try_reader, package, model, name, work))


def try_reader(package: str, model: Path, name: str, work: Path) -> tuple[str, str]:
    """(version, outcome) of a package on one of `OURS`."""
    folder, found = write(model, name, work), work / f"{package}-{name}.npz"
    found.unlink(missing_ok=True)
    ids = open_checkpoint(folder).load_tokenizer().encode(TEXT)
    return try_package(package, folder, found, meant(folder), Reading(tuple(ids), None))


def main() -> int:
    """Try all cells; exit code 1 if one is wrong."""
    packages = ["paged", *sorted({package for known in READERS.values() for package in known})]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--theirs", type=Path)
    parser.add_argument("--only", nargs="*", choices=packages, default=packages)
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "data" / "interop-whole.json")
    parser.add_argument("--resume", action="store_true", help="keep the cells that the file has")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    cells = Cells(options.json, options.resume)
    fill(cells, options.model, options.work, options.only)
    for folder in theirs(options.theirs):
        cells.fill("paged", folder.name, partial(read_by_paged, folder))
    return int(cells.wrong())


if __name__ == "__main__":
    sys.exit(main())
