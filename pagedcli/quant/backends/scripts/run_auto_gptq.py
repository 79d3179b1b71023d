"""Run in AutoGPTQ's own environment: quantize a folder on the CPU. Imports AutoGPTQ, and nothing of paged.

    python run_auto_gptq.py TASK.json

The task has source, output, bits, group_size, sym, desc_act, damp, threads and samples (token ids). Progress goes to
stdout, a JSON line each, and in the end the seconds that quantizing took.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import auto_gptq.modeling._base as base
import torch
from auto_gptq import AutoGPTQForCausalLM, BaseQuantizeConfig


def do_without_cuda() -> None:
    """Take out the three places where AutoGPTQ 0.7.1 insists on CUDA, and halve the model only when it is packed.

    It refuses to load a model without CUDA, moves inputs to `CUDA_0`, and synchronizes a device after each linear.
    float32 is the precision to calibrate in on a CPU: its float16 products are several times slower.
    """
    base.CUDA_0 = torch.device("cpu")
    torch.cuda.synchronize = lambda *args, **kwargs: None
    pack = base.pack_model

    def pack_halved(model: Any, **kwargs: Any) -> Any:
        return pack(model=model.half(), **kwargs)

    base.pack_model = pack_halved


def load(task: dict[str, Any]) -> Any:
    """The model in float32; torch says for a moment that there is CUDA, which is all that is asked."""
    config = BaseQuantizeConfig(
        bits=task["bits"],
        group_size=task["group_size"],
        sym=task["sym"],
        desc_act=task["desc_act"],
        damp_percent=task["damp"],
    )
    asked, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        return AutoGPTQForCausalLM.from_pretrained(task["source"], config, torch_dtype=torch.float32)
    finally:
        torch.cuda.is_available = asked


def report_layers(layers: int) -> None:
    """Tell how many layers are done: AutoGPTQ says the start of each in its log."""
    info = base.logger.info

    def heard(message: Any, *args: Any, **kwargs: Any) -> None:
        if str(message).startswith("Start quantizing layer "):
            print(
                json.dumps({"done": int(str(message).split()[-1].split("/")[0]) - 1, "total": layers}),
                flush=True,
            )
        info(message, *args, **kwargs)

    base.logger.info = heard


def main() -> int:
    """Do the task named by the first argument."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    warnings.simplefilter("ignore")
    torch.set_num_threads(task["threads"])
    do_without_cuda()
    version = f"auto-gptq {importlib.metadata.version('auto-gptq')}"
    print(json.dumps({"version": version}), flush=True)
    model = load(task)
    report_layers(model.model.config.num_hidden_layers)
    rows = [torch.tensor([ids]) for ids in task["samples"]]
    wall, cpu = time.perf_counter(), time.process_time()
    model.quantize([{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in rows])
    spent = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    print(json.dumps({"version": version, **spent}), flush=True)
    model.save_quantized(task["output"], use_safetensors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
