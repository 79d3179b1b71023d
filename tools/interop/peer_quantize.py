"""Quantizes a folder with another package, in that package's own environment. Imports nothing of paged.

    python peer_quantize.py HOW TASK.json

HOW is one of gptqmodel-gptq, gptqmodel-awq, llm-compressor-gptq, llm-compressor-awq, auto-round. The task has source,
output, group_size, sym, desc_act, threads and samples (token ids); AutoAWQ and AutoGPTQ are run by the scripts of
`paged quantize --backend`. The last line of stdout is JSON: the package's version and the seconds that quantizing took
(wall and CPU; loading and saving are not in them).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its pools ask for two, whatever there is

Task = dict[str, Any]


class Clock:
    """Wall and CPU seconds of a block."""

    def __enter__(self) -> Self:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._wall
        self.cpu_seconds = time.process_time() - self._cpu


def rows_of(task: Task) -> list[dict[str, Any]]:
    """The samples as the packages want them."""
    return [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in task["samples"]]


def run_gptqmodel(task: Task, method: str) -> Clock:
    """GPTQModel. AWQ needs the backend to be named: what it chooses by itself wants CUDA."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.quantization import FORMAT, METHOD

    settings: dict[str, Any] = {
        "bits": 4,
        "group_size": task["group_size"],
        "sym": task["sym"],
        "desc_act": task["desc_act"],
    }
    if method == "awq":
        settings |= {"method": METHOD.AWQ, "format": FORMAT.GEMM}
    elif not task["sym"]:
        settings |= {"format": FORMAT.GPTQ_V2}
    model = GPTQModel.load(task["source"], QuantizeConfig(**settings), device="cpu")
    backend = {"backend": BACKEND.AWQ_TORCH} if method == "awq" else {}
    with Clock() as clock:
        model.quantize(rows_of(task), batch_size=1, **backend)
    model.save(task["output"])
    return clock


def run_llm_compressor(task: Task, method: str) -> Clock:
    """llm-compressor, which has no `desc_act`. AWQ pins memory, which torch without CUDA refuses: it stays."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    model = AutoModelForCausalLM.from_pretrained(task["source"], dtype="auto")
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": task["sym"],
        "strategy": "group",
        "group_size": task["group_size"],
    }
    scheme: dict[str, Any] = {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    if method == "awq":
        recipe = [AWQModifier(), QuantizationModifier(**scheme)]
    else:
        recipe = [GPTQModifier(**scheme, actorder="static")]
    data = Dataset.from_list(rows_of(task))
    longest = max(map(len, task["samples"]))
    with Clock() as clock:
        oneshot(
            model=model,
            dataset=data,
            recipe=recipe,
            max_seq_length=longest,
            num_calibration_samples=len(data),
        )
    model.save_pretrained(task["output"], save_compressed=True)
    AutoTokenizer.from_pretrained(task["source"]).save_pretrained(task["output"])
    return clock


def run_auto_round(task: Task, method: str) -> Clock:
    """AutoRound, `iters` steps of `batch_size` samples for each layer; it writes GPTQ's format."""
    import torch
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(task["source"], dtype="auto")
    rounder = AutoRound(
        model,
        AutoTokenizer.from_pretrained(task["source"]),
        bits=4,
        group_size=task["group_size"],
        sym=task["sym"],
        iters=task.get("iters", 200),
        nsamples=len(task["samples"]),
        seqlen=max(map(len, task["samples"])),
        batch_size=task.get("batch_size", 8),
        dataset=[torch.tensor([ids]) for ids in task["samples"]],
        device_map="cpu",
    )
    with Clock() as clock:
        rounder.quantize()
    rounder.save_quantized(task["output"], format="auto_gptq")
    return clock


RUNS: dict[str, tuple[str, Callable[[Task, str], Clock], str]] = {
    "gptqmodel-gptq": ("gptqmodel", run_gptqmodel, "gptq"),
    "gptqmodel-awq": ("gptqmodel", run_gptqmodel, "awq"),
    "llm-compressor-gptq": ("llmcompressor", run_llm_compressor, "gptq"),
    "llm-compressor-awq": ("llmcompressor", run_llm_compressor, "awq"),
    "auto-round": ("auto-round", run_auto_round, "signround"),
}


def main() -> None:
    """Do the task."""
    import torch

    package, run, method = RUNS[sys.argv[1]]
    task = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    warnings.simplefilter("ignore")
    torch.set_num_threads(task["threads"])
    clock = run(task, method)
    told = {
        "version": f"{package} {importlib.metadata.version(package)}",
        "seconds": round(clock.seconds, 1),
        "cpu_seconds": round(clock.cpu_seconds, 1),
        "memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    print("\n" + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
