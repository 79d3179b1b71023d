"""`make quality`: our quantizers and other packages' on the same text, judged by plain transformers.

    python tools/interop/quality.py MODEL --calibration TEXTS.jsonl --text HELD_OUT.txt --work FOLDER
        [--seeds 0 1 2] [--only NAME ...] [--gguf NAME=FILE ...] [--json OUT.json]

MODEL is a folder with a tokenizer. All methods get the same samples of the calibration text, chosen by the seed.
Perplexity and KL are transformers' own, in float32, on dequantized weights (oracle.py). Other packages run in
environments of their own (their_quantizers.py). Every figure is kept in the work folder as it is known: a killed run
goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "kernels")]

from oracle import Oracle  # noqa: E402
from sizes import bits_per_weight  # noqa: E402
from their_quantizers import RUNS, run_quantizer  # noqa: E402

from pagedcli import __version__  # noqa: E402
from pagedcli.checkpoint import open_checkpoint, resolve_model  # noqa: E402
from pagedcli.checkpoint.quant_writer import Target  # noqa: E402
from pagedcli.quant.calibration import calibration_from_file  # noqa: E402
from pagedcli.quant.options import QuantizeOptions  # noqa: E402
from pagedcli.quant.pipeline import quantize_layers  # noqa: E402
from pagedcli.quant.plan import plan_quantization  # noqa: E402
from pagedcli.quant.writing import write_checkpoint  # noqa: E402

OURS: dict[str, dict[str, Any]] = {
    "paged-rtn-sym": {"method": "rtn"},
    "paged-rtn-asym": {"method": "rtn", "sym": False},
    "paged-awq-asym": {"method": "awq"},
    "paged-gptq-sym": {"method": "gptq"},
    "paged-gptq-sym-desc-act": {"method": "gptq", "desc_act": True},
    "paged-gptq-asym": {"method": "gptq", "sym": False},
}
ORIGINAL = "original"


@dataclass(frozen=True)
class Row:
    """One line of the table; seconds are those of quantizing, on a machine that may have done other things too.

    Bits are those of the decoder's linears (`sizes.bits_per_weight`).
    """

    name: str
    version: str
    seed: int | None
    perplexity: float
    kl: float
    seconds: float | None = None
    cpu_seconds: float | None = None
    bits_per_weight: float | None = None


class Bench:
    """What all rows have in common."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.work: Path = arguments.work
        self.work.mkdir(parents=True, exist_ok=True)
        self.folder = resolve_model(arguments.model)
        self.checkpoint = open_checkpoint(self.folder)
        self.tokenizer = self.checkpoint.load_tokenizer()
        text = Path(arguments.text).read_text(encoding="utf-8")[: arguments.tokens * 8]
        self._ids = self.tokenizer.encode(text)[: arguments.tokens]
        self._oracle: Oracle | None = None

    def oracle(self) -> Oracle:
        """Made when the first figure is measured."""
        if self._oracle is None:
            kept = self.work / "original.logprobs"
            self._oracle = Oracle(self.checkpoint, self._ids, self.arguments.window, kept)
            if not kept.is_file():
                perplexity = self._oracle.original()
                _keep(self.work, Row(ORIGINAL, "", None, perplexity, 0.0))
        return self._oracle

    def samples(self, seed: int) -> list[list[int]]:
        """The calibration samples of a seed."""
        found = calibration_from_file(
            self.arguments.calibration,
            self.tokenizer,
            samples=self.arguments.samples,
            seq_len=self.arguments.seq_len,
            seed=seed,
        )
        ids: list[list[int]] = found.samples.tolist()
        return ids

    def ours(self, name: str, seed: int) -> Row:
        """Quantize by paged into a folder, read that, and measure."""
        options = QuantizeOptions(**OURS[name], group_size=self.arguments.group_size)
        samples = [] if options.method == "rtn" else self.samples(seed)
        threads = self.arguments.threads
        plan = plan_quantization(self.checkpoint, options, [len(sample) for sample in samples], threads)
        folder = self.work / f"{name}-{seed}"
        start, cpu = time.perf_counter(), time.process_time()
        with tempfile.TemporaryDirectory() as work:
            found = quantize_layers(self.checkpoint, plan, samples, Path(work), threads=threads)
            write_checkpoint(folder, self.checkpoint, plan, target_of(options), found)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        return self._row(name, f"paged {__version__}", seed, folder, seconds, cpu_seconds)

    def theirs(self, name: str, seed: int) -> Row:
        """Quantize by another package, read that, and measure."""
        arguments = self.arguments
        folder, said = run_quantizer(
            name, self.folder, self.samples(seed), arguments.group_size, seed, arguments.threads, self.work
        )
        seconds = said.get("seconds", said["process_seconds"])
        cpu_seconds = said.get("cpu_seconds", said["process_cpu_seconds"])
        return self._row(name, said.get("version", ""), seed, folder, seconds, cpu_seconds)

    def file(self, name: str, path: Path) -> Row:
        """A file that is there already, such as llama.cpp's."""
        return self._row(name, path.name, None, path, None, None)

    def _row(
        self,
        name: str,
        version: str,
        seed: int | None,
        path: Path,
        seconds: float | None,
        cpu: float | None,
    ) -> Row:
        oracle = self.oracle()
        oracle.load(self.checkpoint)
        oracle.load(open_checkpoint(path))
        perplexity, divergence = oracle.measure()
        bits = round(bits_per_weight(path), 3)
        found = round(perplexity, 4), round(divergence, 5)
        return Row(name, version, seed, *found, _tenth(seconds), _tenth(cpu), bits)


def target_of(options: QuantizeOptions) -> Target:
    """The format that a method's result is written in."""
    if options.method == "awq":
        return "autoawq"
    return "gptq" if options.symmetric else "gptq_v2"


def _tenth(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _kept(work: Path, name: str, seed: int | None) -> Path:
    return work / "rows" / f"{name}{'' if seed is None else f'-{seed}'}.json"


def _keep(work: Path, row: Row) -> None:
    file = _kept(work, row.name, row.seed)
    file.parent.mkdir(exist_ok=True)
    partial = file.with_suffix(".part")
    partial.write_text(json.dumps(asdict(row)) + "\n", encoding="utf-8")
    partial.replace(file)


def rows(bench: Bench) -> Iterator[Row]:
    """The table, a row as soon as it is known; rows of an earlier run are read back."""
    arguments = bench.arguments
    files = dict(given.split("=", 1) for given in arguments.gguf)
    bench.oracle() if not _kept(bench.work, ORIGINAL, None).is_file() else None
    yield Row(**json.loads(_kept(bench.work, ORIGINAL, None).read_text(encoding="utf-8")))
    for seed in arguments.seeds:
        for name in arguments.only:
            if seed != arguments.seeds[0] and "-rtn-" in name:
                continue
            file = _kept(bench.work, name, seed)
            if not file.is_file():
                if arguments.kept_only:
                    continue
                make = bench.ours if name in OURS else bench.theirs
                _keep(bench.work, make(name, seed))
            yield Row(**json.loads(file.read_text(encoding="utf-8")))
    for name, path in files.items():
        if not _kept(bench.work, name, None).is_file():
            _keep(bench.work, bench.file(name, Path(path)))
        yield Row(**json.loads(_kept(bench.work, name, None).read_text(encoding="utf-8")))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*OURS, *RUNS]
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", default=known, choices=known)
    parser.add_argument("--gguf", nargs="*", default=[])
    parser.add_argument(
        "--kept-only", action="store_true", help="measure nothing: make the table of what was kept"
    )
    parser.add_argument("--json", type=Path)
    numbers = {"samples": 16, "seq-len": 512, "group-size": 64, "tokens": 8192, "window": 1024, "threads": 1}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def main() -> None:
    """Print the table; write it as JSON too."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    found = []
    print("| weights | seed | perplexity | KL | bits | s | CPU s |\n|---|---|---|---|---|---|---|")
    for row in rows(Bench(arguments)):
        found.append(asdict(row))
        rest = (row.bits_per_weight, row.seconds, row.cpu_seconds)
        seed, *shown = ("" if value is None else value for value in (row.seed, *rest))
        cells = (row.name, seed, f"{row.perplexity:.3f}", f"{row.kl:.4f}", *shown)
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    if arguments.json:
        keep_rows(arguments, found)


def keep_rows(arguments: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    """Write rows to the JSON file. What it has of the same settings stays, but for the rows measured anew.

    Args:
        arguments: The command line.
        found: Rows, that of the original first: by it a model is known, whatever its folder is called.
    """
    told = ("samples", "seq_len", "group_size", "tokens", "window", "threads")
    settings: dict[str, Any] = {key: getattr(arguments, key) for key in told}
    settings |= {key: Path(getattr(arguments, key)).name for key in ("calibration", "text")}
    rows: dict[tuple[str, int | None], dict[str, Any]] = {}
    model = Path(arguments.model).name
    if arguments.json.is_file():
        kept = json.loads(arguments.json.read_text(encoding="utf-8"))
        original = kept["rows"][0]["perplexity"]
        same = {key: kept["settings"].get(key) for key in settings} == settings
        if same and math.isclose(original, found[0]["perplexity"], rel_tol=1e-4):
            rows = {(row["name"], row["seed"]): row for row in kept["rows"]}
            model = kept["settings"]["model"]
    rows |= {(row["name"], row["seed"]): row for row in found}
    shown = {"model": model, "seeds": sorted({seed for _, seed in rows if seed is not None})} | settings
    text = json.dumps({"settings": shown, "rows": list(rows.values())}, indent=1)
    arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
