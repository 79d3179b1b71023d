"""Torch as a backend: CUDA, and the reference on a CPU. May import `models`, `ops`, `runtime`, and torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from pagedcli.api.resolve import RunChoice
from pagedcli.checkpoint.base import Checkpoint
from pagedcli.checkpoint.sources import cache_folder
from pagedcli.config import EngineConfig
from pagedcli.errors import ConfigError
from pagedcli.models.load import Model, load_model
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.cuda_library import library_in
from pagedcli.ops.select import make_ops
from pagedcli.ops.torch_ops import TorchOps
from pagedcli.runtime.memory import GPU_MEMORY_UTILIZATION, cpu_kv_budget, cuda_kv_budget, free_memory
from pagedcli.runtime.profile import step_bytes
from pagedcli.runtime.samplers import sampler_for, sampling_notes
from pagedcli.runtime.worker import Worker


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """Implements `Backend`.

    Attributes:
        model: Ready to compute.
        run: Device, dtype and threads it was loaded for.
        weight_bytes: Memory of its weights.
        notes: What a user should know of the ops that were taken.
    """

    model: Model
    run: RunChoice
    weight_bytes: int
    notes: tuple[str, ...]

    @property
    def spec(self) -> ModelSpec:
        """The model's architecture."""
        return self.model.spec

    def free_bytes(self) -> int:
        """Memory that is free on the device now."""
        if self.run.device == "cpu":
            return free_memory()
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

    def with_threads(self, threads: int) -> TorchBackend:
        """The same weights, computed with by so many threads."""
        return dataclasses.replace(self, run=dataclasses.replace(self.run, threads=threads))

    def worker(self, *, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int) -> Worker:
        """A worker with a pool of its own."""
        return Worker(
            self.model,
            self.spec,
            dtype=self.run.dtype,
            device=self.run.device,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            threads=self.run.threads,
            weight_bytes=self.weight_bytes,
            sampler=sampler_for(self.model.ops, self.spec.vocab_size),
        )


def load_torch(checkpoint: Checkpoint, run: RunChoice) -> TorchBackend:
    """Load the weights onto the device.

    Raises:
        CheckpointError: The weights do not fit the configuration.
        ConfigError: Kernels are to be ours alone, and something of the model has none.
    """
    kernels = library_in(cache_folder()) if run.device != "cpu" else None
    ops = make_ops(run.device, run.dtype, kernels=kernels, strict=run.strict_kernels)
    assert isinstance(ops, TorchOps)
    model = load_model(checkpoint, ops, run.model_len, as_codes=run.as_codes)
    notes = ops.load_notes() + sampling_notes(ops, model.spec.vocab_size)
    if run.strict_kernels and notes:
        raise ConfigError(
            f"device.strict_kernels is set, and {notes[0]}: leave out --strict-kernels to allow it"
        )
    return TorchBackend(model, run, ops.weight_bytes, notes)
