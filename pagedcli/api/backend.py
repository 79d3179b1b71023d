"""A loaded model on its device, and the executors made from it. May import `models`, `ops`, `runtime`, and torch.

Kept apart from the composition root because this is the part that later backends replace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagedcli.api.resolve import ResolvedConfig, RunChoice
from pagedcli.checkpoint.base import Checkpoint
from pagedcli.config import EngineConfig
from pagedcli.engine.executor import Executor
from pagedcli.models.load import Model, expected_tensors, load_model
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.select import make_ops
from pagedcli.runtime.executors import InlineExecutor, ThreadExecutor
from pagedcli.runtime.memory import (
    GPU_MEMORY_UTILIZATION,
    cpu_kv_budget,
    cuda_kv_budget,
    free_memory,
)
from pagedcli.runtime.profile import step_bytes
from pagedcli.runtime.worker import Worker

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Backend:
    """A model whose weights are loaded.

    Attributes:
        model: Ready to compute.
        run: Device, dtype and threads it was loaded for.
        weight_bytes: Memory of its weights.
    """

    model: Model
    run: RunChoice
    weight_bytes: int

    @property
    def spec(self) -> ModelSpec:
        """The model's architecture."""
        return self.model.spec

    def free_bytes(self) -> int:
        """Memory that is free on the device now."""
        if self.run.device == "cpu":
            return free_memory()
        import torch

        return torch.cuda.mem_get_info(torch.device(self.run.device))[0]

    def kv_budget(self, config: EngineConfig) -> int:
        """Memory for the KV pool if nobody says how much."""
        if self.run.device == "cpu":
            return cpu_kv_budget()
        scheduler = config.scheduler
        step = step_bytes(
            self.model,
            self.spec,
            dtype=self.run.dtype,
            device=self.run.device,
            block_size=config.cache.page_size,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=self.run.model_len,
        )
        share = config.device.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
        return cuda_kv_budget(self.run.device, share, step)

    def executor(self, resolved: ResolvedConfig) -> Executor:
        """The executor that runs plans: on a thread of its own where steps are scheduled ahead, else inline."""
        worker = Worker(
            self.model,
            self.spec,
            dtype=self.run.dtype,
            device=self.run.device,
            num_blocks=resolved.num_pages,
            block_size=resolved.page_size,
            max_num_seqs=resolved.max_num_seqs,
            max_model_len=resolved.max_model_len,
            threads=self.run.threads,
            weight_bytes=self.weight_bytes,
        )
        return InlineExecutor(worker) if resolved.depth == 1 else ThreadExecutor(worker)


def load_backend(checkpoint: Checkpoint, run: RunChoice) -> Backend:
    """Load the weights onto the device.

    Raises:
        CheckpointError: The weights do not fit the configuration.
    """
    ops = make_ops(run.device, run.dtype)
    model = load_model(checkpoint, ops, run.model_len)
    shapes = expected_tensors(model.spec).values()
    weight_bytes = ITEM_BYTES[run.dtype] * sum(math.prod(shape) for shape in shapes)
    return Backend(model, run, weight_bytes)
