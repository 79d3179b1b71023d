"""Torch as a backend: CUDA, and the reference on a CPU. May import `models`, `ops`, `runtime`, and torch."""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass
from functools import partial

import torch

from pagedcli.api.resolve import RunChoice
from pagedcli.checkpoint.base import Checkpoint
from pagedcli.checkpoint.sources import cache_folder
from pagedcli.config import EngineConfig
from pagedcli.config_file import show_bytes
from pagedcli.errors import ConfigError
from pagedcli.models.load import Model, load_model
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.cuda_library import library_in
from pagedcli.ops.select import make_ops
from pagedcli.ops.torch_ops import TorchOps
from pagedcli.runtime.gpu_memory import UTILIZATION, GpuUse, out_of_memory
from pagedcli.runtime.graph_trial import STEPS, why_not_recorded
from pagedcli.runtime.graphs import Captures, CudaCaptures, sizes_for
from pagedcli.runtime.memory import block_bytes, cpu_kv_budget, free_memory
from pagedcli.runtime.profile import largest_step, measure
from pagedcli.runtime.samplers import sampler_for, sampling_notes
from pagedcli.runtime.worker import Worker

logger = logging.getLogger(__name__)
_FOR_BUFFERS = "for tokens, block tables and logits beside the KV pool"
_SMALLER_POOL = "lower --gpu-memory-utilization or --num-pages, or --max-num-seqs"
_SMALLER = "take a smaller or a quantized model, or free the GPU"


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """Implements `Backend`.

    Attributes:
        model: Ready to compute.
        run: Device, dtype and threads it was loaded for.
        weight_bytes: Memory of its weights.
        notes: What a user should know of the ops that were taken.
        captures: Records decode steps; None: they are issued op by op.
    """

    model: Model
    run: RunChoice
    weight_bytes: int
    notes: tuple[str, ...]
    captures: Captures | None = None

    @property
    def spec(self) -> ModelSpec:
        """The model's architecture."""
        return self.model.spec

    def room_for_kv(self, config: EngineConfig) -> int:
        """On a GPU all that the rest was measured not to take, however much of it is to be used."""
        if self.run.device == "cpu":
            return free_memory()
        use = self._measure(config)
        left = max(0, use.total - use.fixed)
        logger.info(
            "%s: %s less %s leave %s", use.device, show_bytes(use.total), use.shares(), show_bytes(left)
        )
        return left

    def kv_budget(self, config: EngineConfig) -> int:
        """Memory for the KV pool if nobody says how much."""
        if self.run.device == "cpu":
            return cpu_kv_budget()
        share = config.device.gpu_memory_utilization or UTILIZATION
        use = self._measure(config)
        page_bytes = block_bytes(self.spec, config.cache.page_size, self.run.dtype)
        budget = use.kv_budget(share, page_bytes)
        logger.info(
            "%s: %g of %s less %s leave %s for KV",
            use.device, share, show_bytes(use.total), use.shares(), show_bytes(budget),
        )  # fmt: skip
        return budget

    def _measure(self, config: EngineConfig) -> GpuUse:
        scheduler, size = config.scheduler, config.cache.page_size
        sizes = (size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, self.run.model_len)
        make = partial(
            self._make_worker,
            block_size=size,
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=self.run.model_len,
        )
        use = measure(self.run.device, make, largest_step(*sizes), captures=self.captures)
        if self.captures is None:
            return use
        scratch = block_bytes(self.spec, size, self.run.dtype)  # the page of rows that only fill up
        return dataclasses.replace(use, buffers=use.buffers + scratch)

    def with_threads(self, threads: int) -> TorchBackend:
        """The same weights, computed with by so many threads."""
        return dataclasses.replace(self, run=dataclasses.replace(self.run, threads=threads))

    def worker(self, *, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int) -> Worker:
        """A worker with a pool of its own, its decode steps recorded where they can be."""
        try:
            worker = self._make_worker(
                num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, max_model_len=max_model_len
            )
        except torch.OutOfMemoryError as error:
            raise out_of_memory(torch.device(self.run.device), _FOR_BUFFERS, _SMALLER_POOL, error) from error
        if self.run.device != "cpu":
            worker.add_notes(_pool_note(worker))
        if self.captures is not None:
            worker.add_notes(self._capture(worker, self.captures))
        return worker

    def trial_worker(self, graph_sizes: tuple[int, ...]) -> Worker:
        """The smallest that there is."""
        sizes = {"block_size": STEPS, "max_num_seqs": 1, "max_model_len": STEPS}
        return self._make_worker(1, **sizes, graph_sizes=graph_sizes)

    def _make_worker(
        self,
        num_blocks: int,
        *,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        graph_sizes: tuple[int, ...] | None = None,
    ) -> Worker:
        if graph_sizes is None:
            graph_sizes = () if self.captures is None else sizes_for(max_num_seqs, self.run.graph_sizes)
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
            graph_sizes=graph_sizes,
        )

    def _capture(self, worker: Worker, captures: Captures) -> str:
        """What it took, for the user."""
        before, started = self._free_bytes(), time.perf_counter()
        try:
            worker.capture(captures)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(
                torch.device(self.run.device),
                "while decode steps were recorded as CUDA graphs",
                "lower --gpu-memory-utilization, or leave them out with --enforce-eager",
                error,
            ) from error
        taken = max(0, before - self._free_bytes())
        sizes = worker.graph_sizes
        return (
            f"decode steps of up to {sizes[-1]} sequences are {len(sizes)} CUDA graphs "
            f"({time.perf_counter() - started:.1f} s, {show_bytes(taken)}); other steps are issued op by op"
        )

    def _free_bytes(self) -> int:
        """Of the device, now."""
        if self.run.device == "cpu":
            return free_memory()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(torch.device(self.run.device))[0]


def _pool_note(worker: Worker) -> str:
    info = worker.info
    tokens = info.num_blocks * info.block_size
    return f"KV: {info.num_blocks:,} pages, {tokens:,} tokens, {show_bytes(info.kv_bytes)}"


def load_torch(checkpoint: Checkpoint, run: RunChoice) -> TorchBackend:
    """Load the weights onto the device.

    Raises:
        CheckpointError: The weights do not fit the configuration.
        ConfigError: Kernels are to be ours alone, and something of the model has none.
    """
    kernels = library_in(cache_folder()) if run.device != "cpu" else None
    spec = ModelSpec.from_config(checkpoint.config, f"{checkpoint.path}: config")
    device = torch.device(run.device)
    try:
        ops = make_ops(
            run.device, run.dtype, kernels=kernels, strict=run.strict_kernels,
            head_dim=spec.head_dim, vocab_size=spec.vocab_size,
        )  # fmt: skip
    except torch.OutOfMemoryError as error:
        raise out_of_memory(device, "while the kernels were tried", _SMALLER, error) from error
    assert isinstance(ops, TorchOps)
    try:
        model = load_model(checkpoint, ops, run.model_len, as_codes=run.as_codes)
    except torch.OutOfMemoryError as error:
        when = f"after {show_bytes(ops.weight_bytes)} of weights"
        raise out_of_memory(device, when, _SMALLER, error) from error
    notes = ops.load_notes() + sampling_notes(ops, model.spec.vocab_size)
    if run.strict_kernels and notes:
        raise ConfigError(
            f"device.strict_kernels is set, and {notes[0]}: leave out --strict-kernels to allow it"
        )
    backend = TorchBackend(model, run, ops.weight_bytes, notes)
    return backend if run.device == "cpu" or run.cuda_graphs is False else _with_graphs(backend, ops, device)


def _with_graphs(backend: TorchBackend, ops: TorchOps, device: torch.device) -> TorchBackend:
    """The backend, with graphs of its decode steps if they can be made here, else with a note that says why not."""
    captures = CudaCaptures(device)
    try:
        reason = ops.why_eager() or why_not_recorded(backend.trial_worker, captures)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(device, "once the weights were loaded", _SMALLER, error) from error
    if reason is None:
        return dataclasses.replace(backend, captures=captures)
    if backend.run.cuda_graphs:
        raise ConfigError(f"device.cuda_graphs is true, and {reason}: leave out --cuda-graphs")
    note = f"decode steps are issued op by op, not as CUDA graphs: {reason}"
    return dataclasses.replace(backend, notes=(*backend.notes, note))
