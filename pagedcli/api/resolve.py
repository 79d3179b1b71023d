"""Every "auto" of the configuration replaced by a value, once, from facts about machine and model.

May import `config`, `models.spec`, `runtime.memory` and `errors`, no torch; pure functions of what they are given, so
that each rule can be tested. What was decided against the user's expectation is said in `ResolvedConfig.notes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pagedcli.api.resolve_quantization import check_method, choose_weights
from pagedcli.checkpoint.quant_tensor import Quantization
from pagedcli.config import EngineConfig
from pagedcli.errors import ConfigError
from pagedcli.models.spec import ModelSpec
from pagedcli.runtime.memory import automatic_blocks, blocks_within, check_kv_fits

DEFAULT_DEPTH = {"cpu": 1, "cuda": 2}
"""Steps in flight by device. On a CPU with torch's ops (SmolLM2 bfloat16, two threads on two cores, 1 and 16 sequences,
six alternating runs each) depth 1 and 2 could not be told apart: scheduling and text take 0.2% of the time at depth 1,
so there is nothing to hide, while depth 2 computes one token more for each request that a stop ends."""


@dataclass(frozen=True, slots=True)
class RunChoice:
    """What must be known before the weights are loaded.

    Attributes:
        device: "cpu" or "cuda".
        backend: "native" or "torch".
        dtype: Weights and activations.
        threads: Compute threads; 0 on CUDA.
        depth: Steps in flight.
        model_len: Longest sequence that is wanted; the pool may hold less.
        as_codes: Whether quantized linears run as they are stored.
        quantization: Method of those; None: there are none.
        activation: Inputs of quantized linears: "int8", "bf16" or "float32"; else the dtype's own.
        strict_kernels: Whether torch's op may not stand in for a CUDA kernel.
        cuda_graphs: Whether decode steps are to be CUDA graphs; None: where they can be.
        graph_sizes: Sequences in the steps that are recorded, ascending.
        notes: What a user might not expect.
    """

    device: str
    backend: str
    dtype: str
    threads: int
    depth: int
    model_len: int
    as_codes: bool
    quantization: str | None
    activation: str
    strict_kernels: bool
    cuda_graphs: bool | None
    graph_sizes: tuple[int, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """What an engine runs with: for displays, manifests and benchmark files.

    Attributes:
        model: As the user named it.
        path: Folder or file that it was found in.
        checkpoint_format: "safetensors" or "gguf".
        architecture: As in its configuration.
        dtype: Weights and activations.
        quantization: "awq", "gptq", "compressed-tensors" or "gguf", where weights run as codes; else None.
        activation: Inputs of quantized linears: "int8", "bf16" or "float32"; else the dtype's own.
        device: "cpu" or "cuda".
        backend: "native" or "torch".
        threads: Compute threads; 0 on CUDA.
        page_size: Tokens in a page.
        num_pages: Usable pages.
        kv_bytes_per_token: KV of one token, all layers.
        kv_bytes: Memory of the pool.
        weight_bytes: Memory of the weights.
        max_model_len: Longest sequence, prompt and output.
        max_num_seqs: Sequences running at once.
        max_num_batched_tokens: Token budget of a step.
        policy: Order of admission.
        depth: Steps in flight.
        prefix_caching: Whether prefixes are shared.
        seed: Of requests that bring none.
        seed_drawn: Whether it was drawn rather than given.
        vocab_size: Rows of the model's head.
        notes: What a user might not expect, one line each.
    """

    model: str
    path: Path
    checkpoint_format: str
    architecture: str
    dtype: str
    quantization: str | None
    activation: str
    device: str
    backend: str
    threads: int
    page_size: int
    num_pages: int
    kv_bytes_per_token: int
    kv_bytes: int
    weight_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    depth: int
    prefix_caching: bool
    seed: int
    seed_drawn: bool
    vocab_size: int
    notes: tuple[str, ...]


def resolve_device(config: EngineConfig, *, has_cuda: bool) -> str:
    """Cuda where there is one, unless the user says otherwise; settings that mean nothing there are refused."""
    device = config.device.device
    if device == "auto":
        device = "cuda" if has_cuda else "cpu"
    if device == "cuda" and not has_cuda:
        raise ConfigError("device.device is cuda, but there is no CUDA device here: use --device cpu")
    share = config.device.gpu_memory_utilization
    if share is not None and device == "cpu":
        raise ConfigError(
            f"device.gpu_memory_utilization is {share}, and this runs on a CPU: give the size of the KV pool with "
            "--kv-memory 2GiB or --num-pages 1024"
        )
    if config.device.strict_kernels and device == "cpu":
        raise ConfigError(
            "device.strict_kernels is set, and this runs on a CPU, where kernels are ours anyway: leave it out"
        )
    if device == "cpu" and (config.device.cuda_graphs or config.device.cuda_graph_sizes):
        raise ConfigError(
            "device.cuda_graphs or device.cuda_graph_sizes is set, and this runs on a CPU, where a step is one call "
            "anyway: leave it out"
        )
    return device


def resolve_backend(wanted: str, device: str) -> str:
    """Native kernels on a CPU, torch on CUDA, unless the user says otherwise."""
    if wanted == "native" and device != "cpu":
        raise ConfigError(
            f"device.backend is native, which computes on a CPU, and the device is {device}: "
            "use --device cpu, or device.backend=torch"
        )
    if wanted != "auto":
        return wanted
    return "native" if device == "cpu" else "torch"


def resolve_dtype(wanted: str, stored: str, device: str, notes: list[str]) -> str:
    """The dtype that weights and activations have."""
    dtype = stored if wanted == "auto" else wanted
    if dtype == "float16" and device == "cpu":
        notes.append("float16 runs as bfloat16 on a CPU")
        return "bfloat16"
    return dtype


def choose_run(
    config: EngineConfig,
    spec: ModelSpec,
    *,
    has_cuda: bool,
    cores: int,
    quantization: Quantization | None = None,
    path: Path = Path("the model"),
    int8_dot: Callable[[], bool] = lambda: False,
) -> RunChoice:
    """Device, dtype and what depends on them.

    Args:
        config: Settings.
        spec: The model.
        has_cuda: Whether a CUDA device can be used.
        cores: Compute threads that this machine is good for.
        quantization: Of the checkpoint.
        path: Of the checkpoint, for messages.
        int8_dot: Whether int8 is multiplied in one instruction here.

    Raises:
        ConfigError: A setting cannot be met here.
    """
    notes: list[str] = []
    device = resolve_device(config, has_cuda=has_cuda)
    backend = resolve_backend(config.device.backend, device)
    dtype = resolve_dtype(config.model.dtype, spec.dtype, device, notes)
    check_method(config.model.quantization, quantization, path)
    weights = choose_weights(config.model, quantization, dtype=dtype, backend=backend, int8_dot=int8_dot)
    return RunChoice(
        device=device,
        backend=backend,
        dtype=dtype,
        threads=(config.device.threads or cores) if device == "cpu" else 0,
        depth=config.scheduler.depth or DEFAULT_DEPTH[device],
        model_len=_wanted_len(config, spec),
        as_codes=weights.as_codes,
        quantization=weights.quantization,
        activation=weights.activation,
        strict_kernels=config.device.strict_kernels,
        cuda_graphs=config.device.cuda_graphs,
        graph_sizes=tuple(sorted(set(config.device.cuda_graph_sizes))),
        notes=(*notes, *weights.notes),
    )


def _wanted_len(config: EngineConfig, spec: ModelSpec) -> int:
    wanted = config.model.max_model_len
    if wanted is not None and wanted > spec.max_position:
        raise ConfigError(
            f"model.max_model_len is {wanted}, and the model was made for {spec.max_position}: "
            f"--max-model-len {spec.max_position}"
        )
    return wanted or spec.max_position


def choose_pages(
    config: EngineConfig,
    run: RunChoice,
    page_bytes: int,
    *,
    room_bytes: Callable[[], int],
    budget_bytes: Callable[[], int],
) -> int:
    """Usable pages, once the weights are loaded.

    Args:
        config: Settings.
        run: Device and longest sequence.
        page_bytes: KV of one page, all layers.
        room_bytes: What a pool whose size is given may take at most; found out on demand.
        budget_bytes: What the pool gets if nothing is said; measured on demand.

    Raises:
        ConfigError: What was asked for does not fit, or not even one page does.
    """
    cache = config.cache
    if cache.num_pages is not None or cache.kv_memory_bytes is not None:
        num_pages = cache.num_pages or blocks_within(cache.kv_memory_bytes or 0, page_bytes)
        check_kv_fits(num_pages, page_bytes, room_bytes(), asked_bytes=cache.kv_memory_bytes)
        return num_pages
    return automatic_blocks(
        budget_bytes(),
        page_bytes,
        block_size=cache.page_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=run.model_len,
    )


def choose_model_len(config: EngineConfig, wanted: int, num_pages: int) -> tuple[int, tuple[str, ...]]:
    """Longest sequence, and what to say of it: as wanted, at most what the pool holds.

    The last token of a sequence needs no KV, so the limit lies one above the pool's tokens.
    """
    fits = num_pages * config.cache.page_size + 1
    if wanted <= fits:
        return wanted, ()
    if config.model.max_model_len is None:
        return fits, ()
    needed = -(-(wanted - 1) // config.cache.page_size)
    note = (
        f"max_model_len is {fits}, not {wanted}: the pool's {num_pages} pages hold no more "
        f"(--num-pages {needed} would)"
    )
    return fits, (note,)
