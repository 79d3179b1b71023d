"""The composition root: from an `EngineConfig` to a running engine. The only place that knows every layer.

May import everything below `api`; torch comes in only when the backend is made. Building happens in phases with
names and times (`Engine.phases`), and whatever fails leaves nothing running.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pagedcli.api.backend import Backend, load_backend, make_executor
from pagedcli.api.convert import load_tokenizer
from pagedcli.api.resolve import (
    ResolvedConfig,
    RunChoice,
    choose_model_len,
    choose_pages,
    choose_run,
    resolve_device,
)
from pagedcli.checkpoint.base import Checkpoint
from pagedcli.checkpoint.sources import open_checkpoint, resolve_model
from pagedcli.config import EngineConfig
from pagedcli.core.allocation import make_kv
from pagedcli.core.scheduler import Scheduler
from pagedcli.engine.admission import QueueLimits
from pagedcli.engine.client import EngineSettings, EngineThread
from pagedcli.engine.executor import Executor
from pagedcli.errors import ConfigError
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.select import has_cuda, has_int8_dot, require_cuda
from pagedcli.runtime.memory import block_bytes
from pagedcli.runtime.threads import compute_threads
from pagedcli.text.tokenizer import Tokenizer

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""Name of the model that is used when none is given."""
Progress = Callable[[str, int, int], None]
"""Told (what, done, total) while a model is fetched."""


class Phases:
    """Names and durations of what building an engine consisted of."""

    def __init__(self) -> None:
        self.seconds: list[tuple[str, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one phase."""
        started = time.perf_counter()
        yield
        self.seconds.append((name, time.perf_counter() - started))


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine and what it was made from; a context manager that closes it.

    Attributes:
        config: As asked for.
        resolved: As it runs.
        tokenizer: The model's.
        client: The engine's thread: add, abort, stats, snapshot.
        generation_config: The model's own sampling defaults, in Hugging Face terms.
        phases: (name, seconds) of what building it took.
    """

    config: EngineConfig
    resolved: ResolvedConfig
    tokenizer: Tokenizer
    client: EngineThread
    generation_config: dict[str, Any]
    phases: tuple[tuple[str, float], ...]

    def close(self, *, drain: bool = False) -> None:
        """Abort what runs (or serve it first) and free the model."""
        self.client.close(drain=drain)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def build_engine(
    config: EngineConfig, *, progress: Progress | None = None, limits: QueueLimits | None = None
) -> Engine:
    """Find, read and start a model.

    Args:
        config: Settings; what is "auto" is resolved here.
        progress: Told of downloads.
        limits: What may wait to run; None: as much as comes.

    Raises:
        ConfigError: A setting cannot be met.
        CheckpointError: The model cannot be used.
        MissingDependencyError: Something it needs is not installed.
    """
    phases = Phases()
    # What needs no model is refused before one is fetched.
    chat_template = _read_template(config.model.chat_template)
    cuda = _look_for_cuda(config)
    resolve_device(config, has_cuda=cuda)
    with phases.phase("find model"):
        path = resolve_model(config.model.model, progress=progress)
    with phases.phase("open checkpoint"):
        checkpoint = open_checkpoint(path)
        spec = ModelSpec.from_config(checkpoint.config, f"{checkpoint.path}: config")
    run = choose_run(
        config,
        spec,
        has_cuda=cuda,
        cores=compute_threads(),
        quantization=checkpoint.quantization,
        path=checkpoint.path,
        int8_dot=has_int8_dot,
    )
    with ThreadPoolExecutor(1, "paged-tokenizer") as aside:
        # Most of both is done outside the interpreter's lock.
        tokenizing = aside.submit(load_tokenizer, checkpoint)
        with phases.phase("load weights"):
            backend = load_backend(checkpoint, run)
        with phases.phase("load tokenizer (the rest of it)"):
            tokenizer = tokenizing.result()
    with phases.phase("allocate KV"):
        resolved, executor = _start(config, checkpoint, run, backend)
    scheduler = Scheduler(
        config.scheduler,
        make_kv(config.cache, resolved.num_pages, resolved.max_model_len),
        max_model_len=resolved.max_model_len,
        model_limit=spec.max_position,
        watermark=config.cache.watermark,
    )
    settings = EngineSettings(resolved.seed, resolved.depth, chat_template, limits or QueueLimits())
    client = EngineThread(scheduler, executor, tokenizer, settings).start()
    generation = checkpoint.generation_config
    return Engine(config, resolved, tokenizer, client, generation, tuple(phases.seconds))


def _look_for_cuda(config: EngineConfig) -> bool:
    """Whether a CUDA device can be used; not looked for where it would not be."""
    if config.device.device == "cuda":
        require_cuda("--device cuda")
    return config.device.device != "cpu" and has_cuda()


def _read_template(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template is {file!r}, which cannot be read: {error}") from error


def resolve(config: EngineConfig, checkpoint: Checkpoint, run: RunChoice, backend: Backend) -> ResolvedConfig:
    """Size the pool and say what was chosen; nothing is allocated."""
    spec, size = backend.spec, config.cache.page_size
    page_bytes = block_bytes(spec, size, run.dtype)
    num_pages = choose_pages(
        config,
        run,
        page_bytes,
        room_bytes=lambda: backend.room_for_kv(config),
        budget_bytes=lambda: backend.kv_budget(config),
    )
    model_len, notes = choose_model_len(config, run.model_len, num_pages)
    return ResolvedConfig(
        model=config.model.model or DEFAULT_MODEL,
        path=checkpoint.path,
        checkpoint_format=checkpoint.format,
        architecture=spec.architecture,
        dtype=run.dtype,
        quantization=run.quantization,
        activation=run.activation,
        device=run.device,
        backend=run.backend,
        threads=run.threads,
        page_size=size,
        num_pages=num_pages,
        kv_bytes_per_token=page_bytes // size,
        kv_bytes=num_pages * page_bytes,
        weight_bytes=backend.weight_bytes,
        max_model_len=model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        policy=config.scheduler.policy,
        depth=run.depth,
        prefix_caching=config.cache.prefix_caching and config.cache.allocation == "paged",
        seed=secrets.randbits(32) if config.seed is None else config.seed,
        seed_drawn=config.seed is None,
        vocab_size=spec.vocab_size,
        notes=run.notes + backend.notes + notes,
    )


def _start(
    config: EngineConfig, checkpoint: Checkpoint, run: RunChoice, backend: Backend
) -> tuple[ResolvedConfig, Executor]:
    """Size the pool and allocate it."""
    resolved = resolve(config, checkpoint, run, backend)
    worker = backend.worker(
        num_blocks=resolved.num_pages,
        block_size=resolved.page_size,
        max_num_seqs=resolved.max_num_seqs,
        max_model_len=resolved.max_model_len,
    )
    resolved = replace(resolved, notes=resolved.notes + worker.info.notes)
    return resolved, make_executor(worker, run.depth)
