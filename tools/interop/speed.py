"""How long quantizing takes, ours beside other packages', on the same text and threads, in turns.

    python tools/interop/speed.py MODEL --calibration TEXTS.jsonl --work FOLDER --only NAME ... [--layers 3]
        [--rounds 1] [--json FILE]

All decoder layers of a model cost the same, so the first few are quantized: MODEL cut to them is written to the work
folder. A package's seconds are those of its quantizing call, ours those of all that `quantize_layers` does and of
writing the files; loading and importing are in neither. Every turn is a process of its own, ours as theirs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "kernels")]

from quality import OURS, target_of  # noqa: E402
from their_quantizers import RUNS, run_quantizer  # noqa: E402

from pagedcli import __version__  # noqa: E402
from pagedcli.checkpoint import open_checkpoint  # noqa: E402
from pagedcli.quant.calibration import calibration_from_file  # noqa: E402
from pagedcli.quant.options import QuantizeOptions  # noqa: E402
from pagedcli.quant.pipeline import quantize_layers  # noqa: E402
from pagedcli.quant.plan import plan_quantization  # noqa: E402
from pagedcli.quant.writing import write_checkpoint  # noqa: E402

Turn = tuple[str, float, float]
"""Version, wall and CPU seconds."""


def cut_model(source: Path, folder: Path, layers: int) -> None:
    """The first decoder layers of a model, with everything else of it."""
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        name: tensor
        for file in sorted(source.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < layers
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for file in source.glob("*token*.json"):
        shutil.copyfile(file, folder / file.name)


def ours(
    name: str, source: Path, samples: list[list[int]], group_size: int, threads: int
) -> tuple[float, float]:
    """(wall, CPU) seconds of paged."""
    options, checkpoint = QuantizeOptions(**OURS[name], group_size=group_size), open_checkpoint(source)
    start, cpu = time.perf_counter(), time.process_time()
    plan = plan_quantization(checkpoint, options, [len(sample) for sample in samples], threads)
    with tempfile.TemporaryDirectory() as work:
        found = quantize_layers(checkpoint, plan, samples, Path(work), threads=threads)
        write_checkpoint(Path(work) / "made", checkpoint, plan, target_of(options), found)
    return time.perf_counter() - start, time.process_time() - cpu


def ours_in_new_process(name: str, source: Path, samples: list[list[int]], size: int, threads: int) -> Turn:
    """A turn of paged, by this program started again (`--one`)."""
    task = {"name": name, "source": str(source), "samples": samples, "group_size": size, "threads": threads}
    command = [sys.executable, str(Path(__file__)), "--one"]
    run = subprocess.run(command, input=json.dumps(task), stdout=subprocess.PIPE, text=True, check=True)
    seconds, cpu = json.loads(run.stdout.splitlines()[-1])
    return f"paged {__version__}", seconds, cpu


def one_turn() -> None:
    """What `ours_in_new_process` asks for on stdin; the seconds to stdout."""
    task = json.load(sys.stdin)
    torch.set_num_threads(task["threads"])
    print(json.dumps(ours(**task | {"source": Path(task["source"])})))


def theirs(
    name: str, source: Path, samples: list[list[int]], group_size: int, threads: int, work: Path
) -> Turn:
    """A turn of a package."""
    with tempfile.TemporaryDirectory(dir=work) as made:
        said = run_quantizer(name, source, samples, group_size, 0, threads, Path(made))[1]
    return said["version"], said["seconds"], said["cpu_seconds"]


def main() -> None:
    """Measure in turns; print and keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=[*OURS, *RUNS], required=True)
    parser.add_argument("--json", type=Path)
    numbers = {"samples": 16, "seq-len": 512, "group-size": 64, "threads": 1, "layers": 3, "rounds": 1}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    source = arguments.work / f"first-{arguments.layers}-layers"
    if not (source / "config.json").is_file():
        cut_model(arguments.model, source, arguments.layers)
    tokenizer = open_checkpoint(arguments.model).load_tokenizer()
    text = calibration_from_file(
        arguments.calibration, tokenizer, samples=arguments.samples, seq_len=arguments.seq_len, seed=0
    )
    samples, size, threads = text.samples.tolist(), arguments.group_size, arguments.threads
    rows = []
    for turn in range(arguments.rounds):
        for name in arguments.only:
            if name in OURS:
                version, seconds, cpu = ours_in_new_process(name, source, samples, size, threads)
            else:
                version, seconds, cpu = theirs(name, source, samples, size, threads, arguments.work)
            layer = seconds / arguments.layers
            row = {
                "name": name,
                "version": version,
                "turn": turn,
                "layers": arguments.layers,
                "threads": threads,
            }
            rows.append(row | {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2)})
            print(
                f"{name:34} {version:24} {seconds:7.1f} s, {layer:6.2f} s a layer, {cpu:7.1f} CPU s",
                flush=True,
            )
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    one_turn() if sys.argv[1:] == ["--one"] else main()
