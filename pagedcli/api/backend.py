"""A loaded model on its device, and the executors made from it. May import `models`, `ops`, `runtime`.

Kept apart from the composition root because this is the part that differs by backend. Each comes in only when it is
chosen: the native one imports no torch.
"""

from __future__ import annotations

from typing import Protocol

from pagedcli.api.resolve import RunChoice
from pagedcli.checkpoint.base import Checkpoint
from pagedcli.config import EngineConfig
from pagedcli.engine.executor import Executor
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.select import require_native, require_torch
from pagedcli.runtime.executors import InlineExecutor, Launches, ThreadExecutor


class Backend(Protocol):
    """A model whose weights are loaded."""

    @property
    def spec(self) -> ModelSpec:
        """The model's architecture."""

    @property
    def weight_bytes(self) -> int:
        """Memory of its weights."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how it computes."""

    def room_for_kv(self, config: EngineConfig) -> int:
        """Memory that a KV pool may take at most, if its size is given."""

    def kv_budget(self, config: EngineConfig) -> int:
        """Memory for the KV pool if nobody says how much."""

    def with_threads(self, threads: int) -> Backend:
        """The same weights, computed with by so many threads; on a CPU."""

    def worker(self, *, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int) -> Launches:
        """A worker with a pool of its own."""


def load_backend(checkpoint: Checkpoint, run: RunChoice) -> Backend:
    """Load the weights onto the device.

    Raises:
        CheckpointError: The weights do not fit the configuration.
        MissingDependencyError: The backend is not installed.
    """
    if run.backend == "native":
        require_native()
        from pagedcli.api.native_backend import load_native

        return load_native(checkpoint, run)
    require_torch(f"--device {run.device}" if run.device != "cpu" else "device.backend is torch")
    from pagedcli.api.torch_backend import load_torch

    return load_torch(checkpoint, run)


def make_executor(worker: Launches, depth: int) -> Executor:
    """The executor that runs plans: on a thread of its own where steps are scheduled ahead, else inline."""
    return InlineExecutor(worker) if depth == 1 else ThreadExecutor(worker)
