"""Run in AutoAWQ's own environment: quantize a folder on the CPU. Imports AutoAWQ, and nothing of paged.

    python run_autoawq.py TASK.json

The task has source, output, group_size, threads and samples (token ids). Progress goes to stdout, a JSON line each.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from awq import AutoAWQForCausalLM
from awq.quantize.quantizer import AwqQuantizer
from transformers import AutoTokenizer


def undo_aliasing() -> None:
    """Keep the saved weights apart from the live ones, without which AutoAWQ 0.2.9 ruins every model on a CPU.

    It saves `{name: tensor.cpu()}` and scales the weights in place. On a CPU `.cpu()` copies nothing, so the scales of
    the first grid point stay in the weights for good.
    """
    search = AwqQuantizer._compute_best_scale

    def search_on_copies(
        self: Any, x: Any, w_mean: Any, x_mean: Any, module: Any, *rest: Any, **more: Any
    ) -> Any:
        state_dict = module.state_dict

        def copied(*args: Any, **kwargs: Any) -> dict[str, Any]:
            return {name: tensor.clone() for name, tensor in state_dict(*args, **kwargs).items()}

        module.state_dict = copied
        try:
            return search(self, x, w_mean, x_mean, module, *rest, **more)
        finally:
            del module.state_dict

    AwqQuantizer._compute_best_scale = search_on_copies


def report_layers() -> None:
    """Tell how many layers are done."""
    quantize_layer = AwqQuantizer._apply_quant
    done = 0

    def counted(self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        result = quantize_layer(self, module, *args, **kwargs)
        done += 1
        print(json.dumps({"done": done, "total": len(self.modules)}), flush=True)
        return result

    AwqQuantizer._apply_quant = counted


def main() -> int:
    """Do the task named by the first argument."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    warnings.simplefilter("ignore")
    torch.set_num_threads(task["threads"])
    undo_aliasing()
    report_layers()
    version = f"autoawq {importlib.metadata.version('autoawq')}"
    print(json.dumps({"version": version}), flush=True)
    model = AutoAWQForCausalLM.from_pretrained(task["source"], device_map="cpu", low_cpu_mem_usage=True)
    samples = task["samples"]
    wall, cpu = time.perf_counter(), time.process_time()
    model.quantize(
        AutoTokenizer.from_pretrained(task["source"]),
        quant_config={"zero_point": True, "q_group_size": task["group_size"], "w_bit": 4, "version": "GEMM"},
        calib_data=samples,
        max_calib_seq_len=max(map(len, samples)),
        max_calib_samples=len(samples),
    )
    spent = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    print(json.dumps({"version": version, **spent}), flush=True)
    model.save_quantized(task["output"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
