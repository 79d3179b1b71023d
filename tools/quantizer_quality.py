"""Quality and time of the quantizers on one model: perplexity and KL in plain transformers on dequantized weights.

    python tools/quantizer_quality.py MODEL --calibration TEXTS.jsonl --text HELD_OUT.txt
        [--seeds 0 1 2] [--methods rtn awq gptq gptq-desc-act] [--others FOLDER ...] [--json OUT.json]

Methods all get the same samples of the calibration text, chosen by the seed. `--others` are folders that other
packages wrote; their weights are read back and measured in the same way. transformers runs the original's own code in
float32, so that nothing of ours is between the weights and the figures but the dequantization.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagedcli.checkpoint import Checkpoint, open_checkpoint, resolve_model
from pagedcli.quant.calibration import calibration_from_file
from pagedcli.quant.options import QuantizeOptions
from pagedcli.quant.pipeline import quantize_layers
from pagedcli.quant.plan import plan_quantization
from pagedcli.quant.source import Source

METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn", "sym": False},
    "rtn-sym": {"method": "rtn"},
    "awq": {"method": "awq"},
    "gptq": {"method": "gptq"},
    "gptq-asym": {"method": "gptq", "sym": False},
    "gptq-desc-act": {"method": "gptq", "desc_act": True},
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    seed: int | None
    perplexity: float
    kl: float
    seconds: float | None = None
    cpu_seconds: float | None = None


class Oracle:
    """transformers' model with weights put in, and the held-out text."""

    def __init__(self, checkpoint: Checkpoint, ids: list[int], window: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = dict(checkpoint.config)
        config.pop("quantization_config", None)
        kind = config.pop("model_type")
        config.pop("torch_dtype", None)
        self._model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).float().eval()
        self._windows = [torch.tensor([ids[at : at + window]]) for at in range(0, len(ids) - 1, window)]
        self._original: list[Tensor] = []
        self.load(checkpoint)

    def load(self, checkpoint: Checkpoint) -> None:
        """Put in all weights of a checkpoint, dequantized."""
        source, state = Source(checkpoint), self._model.state_dict()
        for name in checkpoint.names():
            if name in state:
                state[name].copy_(source.tensor(name))

    def put(self, name: str, values: Tensor) -> None:
        """Put in one tensor."""
        self._model.state_dict()[name].copy_(values)

    def measure(self) -> tuple[float, float]:
        """(perplexity, mean KL from the first call's distributions)."""
        loss = divergence = 0.0
        rows = 0
        for index, logits in enumerate(self._log_probabilities()):
            ids = self._windows[index][0]
            loss -= float(logits[:-1].gather(1, ids[1:, None]).sum())
            rows += len(ids) - 1
            if len(self._original) == index:
                self._original.append(logits.half())
            first = self._original[index].float()
            divergence += float((first.exp() * (first - logits)).sum(1)[:-1].sum())
        return math.exp(loss / rows), divergence / rows

    def _log_probabilities(self) -> Iterator[Tensor]:
        with torch.inference_mode():
            for ids in self._windows:
                yield self._model(ids).logits[0].log_softmax(-1)


def quantized(
    oracle: Oracle, checkpoint: Checkpoint, name: str, seed: int, arguments: argparse.Namespace
) -> Row:
    """Quantize, put the result in, measure."""
    options = QuantizeOptions(**METHODS[name], group_size=arguments.group_size)
    samples: Any = []
    if options.method != "rtn":
        samples = calibration_from_file(
            arguments.calibration,
            tokenizer_of(checkpoint, arguments),
            samples=arguments.samples,
            seq_len=arguments.seq_len,
            seed=seed,
        ).samples
    plan = plan_quantization(checkpoint, options, [len(sample) for sample in samples], arguments.threads)
    start, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as work:
        found = list(quantize_layers(checkpoint, plan, samples, Path(work), threads=arguments.threads))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    oracle.load(checkpoint)
    for result in found:
        for tensor in result.tensors:
            oracle.put(f"{tensor.name}.weight", torch.from_numpy(tensor.dequantize()))
        for changed, values in result.dense.items():
            oracle.put(changed, torch.from_numpy(values))
    return Row(name, None if options.method == "rtn" else seed, *oracle.measure(), seconds, cpu_seconds)


def tokenizer_of(checkpoint: Checkpoint, arguments: argparse.Namespace) -> Any:
    """The model's, or that of another copy of it."""
    if arguments.tokenizer is None:
        return checkpoint.load_tokenizer()
    return open_checkpoint(resolve_model(arguments.tokenizer)).load_tokenizer()


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """The table, a row as soon as it is known."""
    checkpoint = open_checkpoint(resolve_model(arguments.model))
    text = Path(arguments.text).read_text(encoding="utf-8")[: arguments.tokens * 8]
    ids = tokenizer_of(checkpoint, arguments).encode(text)[: arguments.tokens]
    oracle = Oracle(checkpoint, ids, arguments.window)
    yield Row("original", None, *oracle.measure())
    for name in arguments.methods:
        for seed in arguments.seeds[: 1 if METHODS[name]["method"] == "rtn" else None]:
            yield quantized(oracle, checkpoint, name, seed, arguments)
    for folder in arguments.others:
        oracle.load(open_checkpoint(Path(folder)))
        yield Row(Path(folder).name, None, *oracle.measure())


def main() -> None:
    """Print the table; write it as JSON too."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--tokenizer", help="another copy of the model, if MODEL has no tokenizer")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--others", nargs="*", default=[])
    parser.add_argument("--json")
    for name, default in {
        "samples": 16,
        "seq-len": 512,
        "group-size": 64,
        "tokens": 4092,
        "window": 1024,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found = []
    print("| weights | seed | perplexity | KL | s | CPU s |\n|---|---|---|---|---|---|")
    for row in rows(arguments):
        found.append(asdict(row))
        cost = ["" if value is None else f"{value:.1f}" for value in (row.seconds, row.cpu_seconds)]
        seed = "" if row.seed is None else row.seed
        print(
            f"| {row.name} | {seed} | {row.perplexity:.3f} | {row.kl:.4f} | {' | '.join(cost)} |", flush=True
        )
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key != "json"}
        Path(arguments.json).write_text(json.dumps({"settings": settings, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
