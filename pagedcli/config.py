"""All settings of the engine as frozen dataclasses, one per section of `paged.toml`.

Standard library only; may import `errors`. Each field has its default (nowhere else), its unit and its meaning
in `metadata`, from which help texts and docs are generated. Values that depend on the machine or the model are
`None` here ("auto") and are resolved once, in `api`, into a new frozen value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pagedcli.errors import ConfigError

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
ActivationName = Literal["auto", "int8", "bf16", "float32"]
QuantizationName = Literal["awq", "gptq"]
DeviceName = Literal["auto", "cpu", "cuda"]
BackendName = Literal["auto", "native", "torch"]
PolicyName = Literal["fcfs", "priority", "shortest", "longest-prefix"]
BatchingName = Literal["continuous", "static"]
AllocationName = Literal["paged", "contiguous", "first-fit"]

MAX_PAGE_SIZE = 256
# Far above any use: what is larger is a slip, and would end in an allocation or a thread that cannot be made.
MAX_NUM_SEQS = 1 << 16
MAX_BATCHED_TOKENS = 1 << 20
MAX_THREADS = 1024


def setting(default: Any, doc: str, unit: str = "") -> Any:
    """A dataclass field that carries its own documentation (`doc`) and unit."""
    return field(default=default, metadata={"doc": doc, "unit": unit})


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Section `[model]`: what is loaded and how its weights are represented."""

    model: str | None = setting(None, "Folder, GGUF file or hub id; none: SmolLM2-135M-Instruct.")
    dtype: DTypeName = setting(
        "auto", "Weights and activations; auto: as stored. Given, it dequantizes a GGUF file."
    )
    quantization: QuantizationName | None = setting(
        None, "awq or gptq: what the checkpoint must be; none: whatever it is."
    )
    activation: ActivationName = setting(
        "auto",
        "Inputs of quantized linears: int8, bf16, float32; auto: int8 for 4 bits where the CPU has it, else dtype.",
    )
    max_model_len: int | None = setting(
        None, "Longest sequence, prompt and output; auto: the model's, at most what the pool holds.", "tokens"
    )
    chat_template: str | None = setting(None, "File with a chat template to use instead of the model's own.")

    def __post_init__(self) -> None:
        _require(
            self.max_model_len is None or self.max_model_len >= 2,
            f"model.max_model_len is {self.max_model_len}: it must be at least 2 (one prompt token, one output token)",
        )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Section `[cache]`: the pool of KV blocks (the user's pages)."""

    page_size: int = setting(16, "Tokens in a page of KV, 1 to 256.", "tokens")
    num_pages: int | None = setting(None, "Usable pages; auto: from kv_memory_bytes.", "pages")
    kv_memory_bytes: int | None = setting(
        None, "Memory for KV; auto: 40% of free memory on a CPU, gpu_memory_utilization on CUDA.", "bytes"
    )
    prefix_caching: bool = setting(True, "Share the KV of common prefixes between requests.")
    watermark: float = setting(
        0.01, "Part of the pool kept free when a request is admitted while others run.", "fraction"
    )
    allocation: AllocationName = setting(
        "paged", "paged; contiguous and first-fit are the baselines that the benchmark compares with."
    )

    def __post_init__(self) -> None:
        _require(
            1 <= self.page_size <= MAX_PAGE_SIZE,
            f"cache.page_size is {self.page_size}: choose 1 to {MAX_PAGE_SIZE}",
        )
        _require(
            self.num_pages is None or self.num_pages >= 1,
            f"cache.num_pages is {self.num_pages}: it must be at least 1",
        )
        _require(
            self.num_pages is None or self.kv_memory_bytes is None,
            "cache.num_pages and cache.kv_memory_bytes both set the size of the pool: give one of them",
        )
        _require(
            self.kv_memory_bytes is None or self.kv_memory_bytes >= 1,
            f"cache.kv_memory_bytes is {self.kv_memory_bytes}: it must be positive",
        )
        _require(
            0.0 <= self.watermark < 1.0,
            f"cache.watermark is {self.watermark}: choose a fraction from 0 up to, not including, 1",
        )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Section `[scheduler]`: who runs in a step and with how many tokens."""

    max_num_seqs: int = setting(256, "Sequences running at once.", "sequences")
    max_num_batched_tokens: int = setting(
        2048, "Token budget of one step, decodes and prefill chunks.", "tokens"
    )
    policy: PolicyName = setting("fcfs", "Order of admission: fcfs, priority, shortest, longest-prefix.")
    batching: BatchingName = setting("continuous", "continuous; static is the baseline of the benchmark.")
    decode_interval: int = setting(
        1, "A running decode advances at least once in so many steps, whatever is being prefilled.", "steps"
    )
    max_preemptions: int = setting(
        3, "Preemptions of one request, after which it runs only with all its pages reserved.", "preemptions"
    )
    max_itl_ms: float | None = setting(
        None,
        "Longest time wanted between two tokens of a running request: prefill chunks follow it; none: no limit.",
        "milliseconds",
    )
    depth: int | None = setting(
        None, "Steps in flight: 1 synchronous, 2 schedules a step while the device runs another.", "steps"
    )

    def __post_init__(self) -> None:
        for name, least in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("decode_interval", 1),
            ("max_preemptions", 0),
        ):
            value = getattr(self, name)
            _require(value >= least, f"scheduler.{name} is {value}: it must be at least {least}")
        for name, most in (("max_num_seqs", MAX_NUM_SEQS), ("max_num_batched_tokens", MAX_BATCHED_TOKENS)):
            value = getattr(self, name)
            _require(value <= most, f"scheduler.{name} is {value}: it can be at most {most}")
        _require(
            self.max_itl_ms is None or self.max_itl_ms > 0,
            f"scheduler.max_itl_ms is {self.max_itl_ms}: it must be positive",
        )
        _require(
            self.depth is None or 1 <= self.depth <= 8, f"scheduler.depth is {self.depth}: choose 1 to 8"
        )


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Section `[device]`: where the model runs."""

    device: DeviceName = setting("auto", "cpu, cuda, or auto: cuda where there is one.")
    threads: int | None = setting(
        None, "Compute threads; auto: physical cores within the CPU quota.", "threads"
    )
    backend: BackendName = setting(
        "auto",
        "What computes: native (CPU only) or torch, the reference; auto: native on a CPU, torch on CUDA.",
    )
    gpu_memory_utilization: float | None = setting(
        None, "Part of the GPU's memory to use (CUDA only; 0.9 if not given).", "fraction"
    )
    strict_kernels: bool = setting(
        False,
        "Fail where one of our CUDA kernels is missing or wrong, instead of taking torch's op (CUDA only).",
    )
    cuda_graphs: bool | None = setting(
        None,
        "Record decode steps as CUDA graphs: true fails where that cannot be; none: where it can (CUDA only).",
    )
    cuda_graph_sizes: tuple[int, ...] = setting(
        (),
        "Sequences in the decode steps that are recorded, a step takes the next larger; none: some from 1 to 512.",
        "sequences",
    )

    def __post_init__(self) -> None:
        _require(
            self.threads is None or self.threads >= 1,
            f"device.threads is {self.threads}: it must be at least 1",
        )
        _require(
            self.threads is None or self.threads <= MAX_THREADS,
            f"device.threads is {self.threads}: it can be at most {MAX_THREADS}",
        )
        _require(
            self.gpu_memory_utilization is None or 0.0 < self.gpu_memory_utilization <= 1.0,
            f"device.gpu_memory_utilization is {self.gpu_memory_utilization}: choose a fraction above 0, at most 1",
        )
        _require(
            all(1 <= size <= MAX_NUM_SEQS for size in self.cuda_graph_sizes),
            f"device.cuda_graph_sizes is {list(self.cuda_graph_sizes)}: choose sizes from 1 to {MAX_NUM_SEQS}",
        )
        _require(
            not self.cuda_graph_sizes or self.cuda_graphs is not False,
            "device.cuda_graph_sizes is given, and device.cuda_graphs is false: leave one of them out",
        )


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Section `[serve]`: the server round the engine. Only `paged serve` reads it."""

    host: str = setting("127.0.0.1", "Address to listen at; 0.0.0.0 or :: are all of this machine's.")
    port: int = setting(8000, "Port to listen at; 0: one that is free.")
    api_key_file: str | None = setting(
        None, "File with a key a line, one of which every request must bring; none: PAGED_API_KEY, if set."
    )
    served_model_name: tuple[str, ...] = setting(
        (), "Names under which the model is served; none: as it was given, and its folder's or file's name."
    )
    max_queue: int = setting(1024, "Requests that may wait to run; one more is refused with 429.", "requests")
    max_queued_tokens: int = setting(
        1 << 20, "Prompt tokens of all that wait; more is refused with 429.", "tokens"
    )
    drain_s: float = setting(
        30.0, "Time that a stopping server gives to what is running before it aborts it.", "seconds"
    )
    keep_alive_s: float = setting(
        5.0,
        "A stream that has nothing to say for so long sends a comment, so that nobody hangs up.",
        "seconds",
    )
    max_body_bytes: int = setting(
        16 << 20, "Largest body of a request; a larger one is refused with 413.", "bytes"
    )
    max_depth: int = setting(32, "Deepest nesting of objects and lists in a body.", "levels")
    max_n: int = setting(128, "Choices of one prompt.", "choices")
    max_prompts: int = setting(256, "Prompts of one request.", "prompts")
    max_choices: int = setting(1024, "Choices of one request, over all of its prompts.", "choices")
    max_messages: int = setting(4096, "Messages of one conversation.", "messages")
    max_stop_sequences: int = setting(64, "Stop texts, stop token ids or bad words of one request.", "items")
    max_stop_chars: int = setting(1024, "Length of a stop text or bad word.", "characters")
    max_logit_bias: int = setting(1024, "Entries of logit_bias, or allowed token ids.", "entries")
    cors_origins: tuple[str, ...] = setting(
        (), 'Web pages that may ask, such as "https://example.org"; "*": all; none: none.'
    )
    ssl_certfile: str | None = setting(None, "Certificate chain (PEM): serve HTTPS.")
    ssl_keyfile: str | None = setting(None, "Its private key (PEM).")

    def __post_init__(self) -> None:
        for name in (
            "max_queue",
            "max_queued_tokens",
            "max_body_bytes",
            "max_depth",
            "max_n",
            "max_prompts",
            "max_choices",
            "max_messages",
            "max_stop_sequences",
            "max_stop_chars",
            "max_logit_bias",
        ):
            value = getattr(self, name)
            _require(value >= 1, f"serve.{name} is {value}: it must be at least 1")
        _require(0 <= self.port <= 65535, f"serve.port is {self.port}: choose 0 to 65535")
        _require(self.host != "", "serve.host is empty: give an address, such as 127.0.0.1")
        _require(self.keep_alive_s > 0, f"serve.keep_alive_s is {self.keep_alive_s:g}: it must be positive")
        _require("" not in self.served_model_name, "serve.served_model_name has an empty name: leave it out")
        _require(
            self.ssl_keyfile is None or self.ssl_certfile is not None,
            "serve.ssl_keyfile needs serve.ssl_certfile: give the certificate too",
        )
        _require(self.drain_s >= 0, f"serve.drain_s is {self.drain_s}: it must not be negative")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that builds an engine. Passed by part: each piece gets only its section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    seed: int | None = setting(None, "Seed of unseeded requests; none: one is drawn and recorded.")
