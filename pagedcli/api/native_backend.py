"""The native CPU engine as a backend. May import `models`, `ops`, `runtime`; never torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pagedcli.api.resolve import RunChoice
from pagedcli.checkpoint.base import Checkpoint
from pagedcli.config import EngineConfig
from pagedcli.models.load import Model, load_model
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.native_ops import NativeOps
from pagedcli.ops.select import make_native_ops
from pagedcli.runtime.memory import cpu_kv_budget, free_memory
from pagedcli.runtime.native_worker import NativeWorker, make_native_worker
from pagedcli.runtime.threads import core_cpus


@dataclass(frozen=True, slots=True)
class NativeBackend:
    """Implements `Backend`.

    Attributes:
        model: Weights packed, ready to be recorded.
        ops: That packed them.
    """

    model: Model
    ops: NativeOps

    @property
    def spec(self) -> ModelSpec:
        """The model's architecture."""
        return self.model.spec

    @property
    def weight_bytes(self) -> int:
        """Memory of its weights, padding of the packed layout included."""
        return self.ops.weight_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """Nothing to be told."""
        return ()

    def room_for_kv(self, config: EngineConfig) -> int:
        """Main memory that is free now."""
        return free_memory()

    def kv_budget(self, config: EngineConfig) -> int:
        """Memory for the KV pool if nobody says how much."""
        return cpu_kv_budget()

    def with_threads(self, threads: int) -> NativeBackend:
        """The same weights, computed with by so many threads."""
        ops = self.ops.with_threads(threads, _cpus(threads))
        return NativeBackend(dataclasses.replace(self.model, ops=ops), ops)

    def worker(
        self, *, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int
    ) -> NativeWorker:
        """A worker with a pool and a program of its own."""
        return make_native_worker(
            self.model,
            self.ops,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )


def _cpus(threads: int) -> tuple[int, ...]:
    """Where threads are pinned: one on each physical core, or nowhere."""
    cpus = core_cpus()
    return cpus if threads == len(cpus) else ()


def load_native(checkpoint: Checkpoint, run: RunChoice) -> NativeBackend:
    """Pack the weights.

    Raises:
        CheckpointError: The weights do not fit the configuration.
        MissingDependencyError: The kernels were not built.
    """
    ops = make_native_ops(run.dtype, threads=run.threads, cpus=_cpus(run.threads), activation=run.activation)
    return NativeBackend(load_model(checkpoint, ops, run.model_len, as_codes=run.as_codes), ops)
