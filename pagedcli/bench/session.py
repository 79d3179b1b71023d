"""A model loaded once, and workloads run through engines of different settings over it. May import below `bench`.

Requests go the way that users' requests go (queue, scheduler, executor, output stage with its detokenizer), as token
ids, greedy, and end at their workload's length. Every run has a scheduler of its own, so that no prefix is cached from
the run before; the worker with its pool is kept for as long as the settings stay the same, and is warmed up once.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pagedcli.api.backend import Backend, load_backend, make_executor
from pagedcli.api.build import Progress, resolve
from pagedcli.api.convert import load_tokenizer
from pagedcli.api.resolve import ResolvedConfig, RunChoice, choose_run
from pagedcli.bench.drive import Drive
from pagedcli.bench.machine import MachineLimits, measure_limits
from pagedcli.bench.recorder import Recorder, TableClock
from pagedcli.bench.run import Interrupted, Run, StepTimes, Watch
from pagedcli.checkpoint.quant_tensor import Quantization
from pagedcli.checkpoint.sources import open_checkpoint, resolve_model
from pagedcli.config import EngineConfig
from pagedcli.core.allocation import make_kv
from pagedcli.core.scheduler import Scheduler
from pagedcli.engine.admission import QueueLimits
from pagedcli.engine.client import EngineSettings, EngineThread
from pagedcli.errors import ConfigError
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.select import has_cuda, has_int8_dot, require_cuda
from pagedcli.runtime.executors import Launches
from pagedcli.runtime.threads import compute_threads
from pagedcli.workloads.requests import Messages, WorkloadRequest

WARM_UP_REQUESTS, WARM_UP_TOKENS = 4, 4
_UNLIMITED = QueueLimits(1 << 30, 1 << 50)


@dataclass(slots=True)
class _Worker:
    """A worker and what it was made for.

    Attributes:
        key: Threads, pages, page size, slots, longest sequence.
        launches: The worker.
        is_used: Whether a scheduler may have left slots occupied.
    """

    key: tuple[int, ...]
    launches: Launches
    is_used: bool = False


class Session:
    """A model and its backend.

    Args:
        config: Model, device and dtype, which stay; the other settings may change with every run.
        on_phase: Told what is being done now, in a few words.
        progress: Told of downloads.

    Attributes:
        spec: Sizes of the model.
        choice: Device, dtype and threads of `config`.
        tokenizer: The model's.

    Raises:
        ConfigError: A setting cannot be met.
        CheckpointError: The model cannot be used.
        MissingDependencyError: Something it needs is not installed.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_phase: Callable[[str], None] = lambda phase: None,
        progress: Progress | None = None,
    ) -> None:
        self.config = config
        self._on_phase = on_phase
        on_phase("loading the model")
        if config.device.device == "cuda":
            require_cuda("--device cuda")
        self._cuda = config.device.device != "cpu" and has_cuda()
        self._checkpoint = open_checkpoint(resolve_model(config.model.model, progress=progress))
        self.spec = ModelSpec.from_config(self._checkpoint.config, f"{self._checkpoint.path}: config")
        self.choice = self._choose(config)
        self.tokenizer = load_tokenizer(self._checkpoint)
        self.backend: Backend = load_backend(self._checkpoint, self.choice)
        self._by_threads: dict[int, Backend] = {self.choice.threads: self.backend}
        self._limits: dict[int, MachineLimits] = {}
        self._budget: int | None = None
        self._worker: _Worker | None = None
        self._resolved: dict[EngineConfig, ResolvedConfig] = {}

    def encode(self, prompt: str | Messages) -> tuple[int, ...]:
        """Token ids of a text, or of a conversation in the model's template: what `parse_workload` wants."""
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        messages = [{"role": role, "content": content} for role, content in prompt]
        return tuple(self.tokenizer.encode_chat(messages))

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        return self.backend.weight_bytes

    @property
    def quantization(self) -> Quantization | None:
        """How the checkpoint's weights are stored; None: not quantized."""
        return self._checkpoint.quantization

    @property
    def isa(self) -> str:
        """Variant of the native kernels; empty where others compute."""
        ops = getattr(self.backend, "ops", None)
        return "" if ops is None else str(ops.runtime.isa)

    @property
    def machine(self) -> MachineLimits:
        """What the machine can do at most with the threads of `config`, measured once."""
        return self.machine_with(self.choice.threads)

    def machine_with(self, threads: int) -> MachineLimits:
        """The same with so many threads."""
        if threads not in self._limits:
            self._on_phase("measuring the machine's limits")
            products = "int8" if self.choice.activation == "int8" else self.choice.dtype
            self._limits[threads] = measure_limits(self.choice.device, products, self.isa, threads)
        return self._limits[threads]

    def _choose(self, config: EngineConfig) -> RunChoice:
        return choose_run(
            config,
            self.spec,
            has_cuda=self._cuda,
            cores=compute_threads(),
            quantization=self._checkpoint.quantization,
            path=self._checkpoint.path,
            int8_dot=has_int8_dot,
        )

    def resolve(self, config: EngineConfig) -> ResolvedConfig:
        """What a run with these settings would have; the automatic pool has the same memory in all of them.

        Raises:
            ConfigError: The settings cannot be met, or are of another model, dtype or device.
        """
        if (config.model.model, config.model.dtype) != (self.config.model.model, self.config.model.dtype):
            raise ConfigError("the settings are of another model or dtype: they need a session of their own")
        if config not in self._resolved:
            self._worker = None  # its pool would count as memory that is not free
            self._resolved[config] = self._resolve(config)
        return self._resolved[config]

    def _resolve(self, config: EngineConfig) -> ResolvedConfig:
        return resolve(self._with_pool(config), self._checkpoint, self._choose(config), self._backend(config))

    def _with_pool(self, config: EngineConfig) -> EngineConfig:
        if config.cache.num_pages is not None or config.cache.kv_memory_bytes is not None:
            return config
        if self._budget is None:
            self._budget = self.backend.kv_budget(config)
        cache = dataclasses.replace(config.cache, kv_memory_bytes=self._budget)
        return dataclasses.replace(config, cache=cache)

    def _backend(self, config: EngineConfig) -> Backend:
        threads = self._choose(config).threads
        if threads not in self._by_threads:
            self._by_threads[threads] = self.backend.with_threads(threads)
        return self._by_threads[threads]

    def run(
        self,
        config: EngineConfig,
        workload: Sequence[WorkloadRequest],
        *,
        watch: Watch | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Run:
        """Answer a workload, arrivals honoured.

        Args:
            config: Cache, scheduler and threads may differ from the session's.
            workload: Requests; those that are refused are in the run with their errors.
            watch: Told of it.
            clock: Seconds.

        Raises:
            Interrupted: By Ctrl-C; holds what was measured.
            ConfigError: The settings cannot be met.
            EngineDead: The engine failed.
        """
        resolved = self.resolve(config)
        worker = self._ready_worker(config, resolved, workload)
        return self._run(config, resolved, worker, workload, watch, clock)

    def _ready_worker(
        self, config: EngineConfig, resolved: ResolvedConfig, workload: Sequence[WorkloadRequest]
    ) -> _Worker:
        """The worker of these settings, warm."""
        key = (
            resolved.threads,
            resolved.num_pages,
            resolved.page_size,
            resolved.max_num_seqs,
            resolved.max_model_len,
        )
        if self._worker is None or self._worker.key != key:
            self._worker = None  # its pool is given back before the next one is taken
            launches = self._backend(config).worker(
                num_blocks=resolved.num_pages,
                block_size=resolved.page_size,
                max_num_seqs=resolved.max_num_seqs,
                max_model_len=resolved.max_model_len,
            )
            self._worker = _Worker(key, launches)
            self._on_phase("warming up")
            try:
                self._run(config, resolved, self._worker, warm_up(workload), None, time.perf_counter)
            except Interrupted:
                raise KeyboardInterrupt from None  # nothing was measured
        return self._worker

    def _run(
        self,
        config: EngineConfig,
        resolved: ResolvedConfig,
        worker: _Worker,
        workload: Sequence[WorkloadRequest],
        watch: Watch | None,
        clock: Callable[[], float],
    ) -> Run:
        kv = make_kv(config.cache, resolved.num_pages, resolved.max_model_len)
        tables = TableClock(kv)
        scheduler = Scheduler(
            config.scheduler,
            kv,
            max_model_len=resolved.max_model_len,
            model_limit=self.spec.max_position,
            watermark=config.cache.watermark,
        )
        leftover = tuple(range(resolved.max_num_seqs)) if worker.is_used else ()
        worker.is_used = True
        recorder = Recorder(
            make_executor(worker.launches, resolved.depth), clock, self.spec.vocab_size, leftover
        )
        settings = EngineSettings(resolved.seed, resolved.depth, None, _UNLIMITED)
        client = EngineThread(scheduler, recorder, self.tokenizer, settings, clock=clock)
        kernels = KernelClock(worker.launches)
        with _running(client):
            drive = Drive(client, scheduler, recorder, workload, clock, watch)
            return drive.run(
                lambda stats: StepTimes(
                    stats.executor_seconds, kernels.seconds(), tables.seconds, stats.gap_seconds
                )
            )


class KernelClock:
    """Seconds inside the native kernels since it was made; None where nobody counts them."""

    def __init__(self, worker: Launches) -> None:
        self._worker = worker
        self._before: float | None = getattr(worker, "native_seconds", None)

    def seconds(self) -> float | None:
        """Until now."""
        if self._before is None:
            return None
        now: float = getattr(self._worker, "native_seconds")  # noqa: B009 - only the native worker has it
        return now - self._before


@contextmanager
def _running(client: EngineThread) -> Iterator[None]:
    client.start()
    try:
        yield
    finally:
        client.close()


def warm_up(workload: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """A few of the requests, with short outputs, all at once."""
    return [
        dataclasses.replace(
            request,
            arrival_s=0.0,
            output_tokens=min(request.output_tokens, WARM_UP_TOKENS),
            follows=None,
        )
        for request in workload[:WARM_UP_REQUESTS]
    ]
