"""Small models and runs for the tests of quantizers. Needs torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedcli.checkpoint import open_checkpoint
from pagedcli.quant.options import LayerResult, Progress, QuantizeOptions
from pagedcli.quant.pipeline import quantize_layers
from pagedcli.quant.plan import plan_quantization

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
}
MakeModel = Callable[..., Path]


def some_samples(lengths: Sequence[int] = (40, 33, 7, 64), seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, 320, length).tolist() for length in lengths]


def run(
    model: Path,
    work: Path,
    options: QuantizeOptions,
    samples: Sequence[Sequence[int]] | None = None,
    *,
    threads: int = 1,
    progress: Progress | None = None,
) -> list[LayerResult]:
    if samples is None:
        samples = [] if options.method == "rtn" else some_samples()
    checkpoint = open_checkpoint(model)
    plan = plan_quantization(checkpoint, options, [len(sample) for sample in samples], threads)
    return list(quantize_layers(checkpoint, plan, samples, work, threads=threads, progress=progress))


def folder_digest(work: Path) -> dict[str, str]:
    """Of everything in a work folder but the lock."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(work.iterdir())
        if file.name != "lock"
    }


def transformers_model(model: Path, results: Sequence[LayerResult]) -> Any:
    """The model in transformers, float64, with the dequantized and changed tensors put in."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    state = oracle.state_dict()
    for result in results:
        for tensor in result.tensors:
            state[f"{tensor.name}.weight"].copy_(torch.from_numpy(tensor.dequantize()))
        for name, values in result.dense.items():
            state[name].copy_(torch.from_numpy(values))
    return oracle.eval()


def last_hidden(oracle: Any, samples: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """What leaves the last decoder layer, before the last norm, [rows, hidden_size] of each sample."""
    caught: list[torch.Tensor] = []

    def catch(module: Any, args: Any, output: Any) -> None:
        caught.append((output[0] if isinstance(output, tuple) else output).reshape(-1, SMALL["hidden_size"]))

    handle = oracle.model.layers[-1].register_forward_hook(catch)
    with torch.inference_mode():
        for sample in samples:
            oracle(torch.tensor([list(sample)]))
    handle.remove()
    return caught
