"""Flags that several commands share, declared once: name, type, help, and the setting that each one gives.

Must stay light (`--help`): imports typer, `config_file` and `errors` only. `with_flags` adds them to a command, which
gets what was given as `{dotted setting: Value}`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from pagedcli.config_file import Value
from pagedcli.errors import ConfigError

MODEL, POOL, SAMPLING, OTHER = (
    "Model",
    "Pages and scheduling",
    "Sampling (a row's own fields count more)",
    "Other",
)


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag that stands for a setting.

    Attributes:
        key: Dotted setting, such as "cache.page_size".
        names: As typed; the first is the one that help shows, the others are aliases.
        kind: int, float, str, bool, or list[...] for one that may be repeated.
        help: One line.
        panel: Heading under which help shows it.
        metavar: What stands for the value in help.
        hidden: Only in docs/cli.md, not in `--help`.
    """

    key: str
    names: tuple[str, ...]
    kind: Any
    help: str
    panel: str
    metavar: str | None = None
    hidden: bool = False

    @property
    def parameter(self) -> str:
        """Name of the function's parameter."""
        return self.key.replace(".", "_")

    def as_parameter(self) -> inspect.Parameter:
        """For the signature that typer reads."""
        option = typer.Option(
            *self.names,
            help=self.help,
            rich_help_panel=self.panel,
            metavar=self.metavar,
            hidden=self.hidden,
            show_default=False,
        )
        annotation = Annotated[self.kind | None, option]  # type: ignore[name-defined]
        return inspect.Parameter(
            self.parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )


MODEL_FLAGS = (
    Flag(
        "model.model",
        ("--model", "-m"),
        str,
        "Folder, GGUF file or hub id [SmolLM2-135M-Instruct]",
        MODEL,
        "MODEL",
    ),
    Flag(
        "model.dtype",
        ("--dtype",),
        str,
        "auto, float32, bfloat16, float16 [auto: as stored]",
        MODEL,
        "TYPE",
    ),
    Flag("device.device", ("--device",), str, "auto, cpu, cuda [auto]", MODEL, "DEVICE"),
    Flag(
        "device.threads", ("--threads",), int, "Compute threads [physical cores within the quota]", MODEL, "N"
    ),
    Flag(
        "device.strict_kernels",
        ("--strict-kernels",),
        bool,
        "CUDA: fail where a kernel of ours is missing or wrong, instead of taking torch's op",
        MODEL,
        hidden=True,
    ),
    Flag(
        "device.cuda_graphs",
        ("--cuda-graphs/--no-cuda-graphs", " /--enforce-eager"),
        bool,
        "CUDA: decode steps as graphs, or op by op [graphs where they can be]",
        MODEL,
        hidden=True,
    ),
    Flag(
        "model.max_model_len",
        ("--max-model-len",),
        int,
        "Longest sequence, prompt and output [the model's]",
        MODEL,
        "TOKENS",
    ),
    Flag(
        "model.chat_template",
        ("--chat-template",),
        str,
        "File with a chat template",
        MODEL,
        "FILE",
        hidden=True,
    ),
    Flag(
        "model.activation",
        ("--activation",),
        str,
        "Inputs of quantized layers: auto, int8, bf16, float32 [auto]",
        MODEL,
        "TYPE",
    ),
    Flag(
        "model.quantization",
        ("--quantization",),
        str,
        "awq or gptq: what the weights must be [as found]",
        MODEL,
        "METHOD",
        hidden=True,
    ),
    Flag(
        "tensor_parallel_size",
        ("--tensor-parallel-size", "-tp"),
        int,
        "1: one device; nothing else in this version",
        MODEL,
        "N",
        hidden=True,
    ),
)

POOL_FLAGS = (
    Flag(
        "cache.page_size",
        ("--page-size", "--block-size"),
        int,
        "Tokens in a page, 1-256 [16]",
        POOL,
        "TOKENS",
    ),
    Flag("cache.num_pages", ("--num-pages",), int, "Usable pages [from --kv-memory]", POOL, "N"),
    Flag(
        "cache.kv_memory_bytes",
        ("--kv-memory", "--kv-cache-memory-bytes"),
        str,
        "Memory for pages, such as 2GiB [CPU: 40% of what is free]",
        POOL,
        "SIZE",
    ),
    Flag(
        "device.gpu_memory_utilization",
        ("--gpu-memory-utilization",),
        float,
        "Part of the GPU's memory to use [0.9]; CUDA only",
        POOL,
        "PART",
        hidden=True,
    ),
    Flag("scheduler.max_num_seqs", ("--max-num-seqs",), int, "Sequences running at once [256]", POOL, "N"),
    Flag(
        "scheduler.max_num_batched_tokens",
        ("--max-num-batched-tokens",),
        int,
        "Tokens in a step [2048]",
        POOL,
        "N",
    ),
    Flag(
        "scheduler.policy",
        ("--policy",),
        str,
        "fcfs, priority, shortest, longest-prefix [fcfs]",
        POOL,
        "NAME",
    ),
    Flag(
        "cache.prefix_caching",
        ("--prefix-caching/--no-prefix-caching",),
        bool,
        "Share the pages of common prefixes, or not [shared]",
        POOL,
    ),
)

SAMPLING_FLAGS = (
    Flag(
        "sampling.temperature",
        ("--temperature", "-t"),
        float,
        "0 takes the likeliest token [0]",
        SAMPLING,
        "X",
    ),
    Flag(
        "sampling.top_p",
        ("--top-p",),
        float,
        "Smallest set of tokens with this probability [1]",
        SAMPLING,
        "X",
    ),
    Flag("sampling.top_k", ("--top-k",), int, "The k likeliest tokens; 0: all [0]", SAMPLING, "K"),
    Flag(
        "sampling.min_p",
        ("--min-p",),
        float,
        "Tokens at least x times as likely as the first [0]",
        SAMPLING,
        "X",
    ),
    Flag("sampling.max_tokens", ("--max-tokens",), int, "Output tokens at most [256]", SAMPLING, "N"),
    Flag(
        "sampling.stop", ("--stop",), list[str], "Text that ends an answer; may be repeated", SAMPLING, "TEXT"
    ),
    Flag("sampling.ignore_eos", ("--ignore-eos",), bool, "Go on at the model's end of sequence", SAMPLING),
    Flag("sampling.n", ("-n", "--n"), int, "Answers to each prompt [1]", SAMPLING, "N"),
    Flag(
        "sampling.logprobs",
        ("--logprobs",),
        int,
        "Log-probabilities of the k likeliest tokens",
        SAMPLING,
        "K",
    ),
    Flag("seed", ("--seed",), int, "Makes sampling repeatable [drawn and recorded]", SAMPLING, "N"),
    Flag("sampling.min_tokens", ("--min-tokens",), int, "Output tokens at least", SAMPLING, "N", hidden=True),
    Flag(
        "sampling.repetition_penalty",
        ("--repetition-penalty",),
        float,
        "Over prompt and output tokens; 1: none",
        SAMPLING,
        "X",
        hidden=True,
    ),
    Flag(
        "sampling.presence_penalty",
        ("--presence-penalty",),
        float,
        "Once for each token that occurs in the output",
        SAMPLING,
        "X",
        hidden=True,
    ),
    Flag(
        "sampling.frequency_penalty",
        ("--frequency-penalty",),
        float,
        "For each occurrence of a token in the output",
        SAMPLING,
        "X",
        hidden=True,
    ),
    Flag(
        "sampling.stop_token_ids",
        ("--stop-token-id",),
        list[int],
        "Token that ends an answer; may be repeated",
        SAMPLING,
        "ID",
        hidden=True,
    ),
    Flag(
        "sampling.include_stop_str_in_output",
        ("--include-stop-str-in-output",),
        bool,
        "Keep the stop text",
        SAMPLING,
        hidden=True,
    ),
    Flag(
        "sampling.prompt_logprobs",
        ("--prompt-logprobs",),
        int,
        "Log-probabilities of prompt tokens",
        SAMPLING,
        "K",
        hidden=True,
    ),
    Flag("sampling.echo", ("--echo",), bool, "Return the prompt before the answer", SAMPLING, hidden=True),
)

ConfigFile = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="TOML file with settings", rich_help_panel=OTHER),
]
NoConfig = Annotated[
    bool,
    typer.Option("--no-config", help="Leave the paged.toml of this folder unread", rich_help_panel=OTHER),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any other setting, as section.key=value", rich_help_panel=OTHER
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Phases and timings; tracebacks", rich_help_panel=OTHER)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Errors only", rich_help_panel=OTHER)]


def with_flags(flags: Sequence[Flag]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the flags to a command function, which takes what was given of them as `flags`."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**parameters: Any) -> None:
            given = {}
            for flag in flags:
                value = parameters.pop(flag.parameter)
                if value is not None and value != []:
                    given[flag.key] = Value(value, flag.names[0])
            function(flags=given, **parameters)

        signature = inspect.signature(function, eval_str=True)
        own = [item for item in signature.parameters.values() if item.name != "flags"]
        added = [flag.as_parameter() for flag in flags]
        wrapper: Any = command
        del wrapper.__wrapped__
        wrapper.__signature__ = signature.replace(parameters=[*own, *added])
        wrapper.__annotations__ = {item.name: item.annotation for item in (*own, *added)}
        return command

    return decorate


def refuse_unavailable(flags: Mapping[str, Value]) -> dict[str, Value]:
    """Without the flags that are taken and change nothing; ConfigError for what this version cannot do."""
    rest = dict(flags)
    parallel = rest.pop("tensor_parallel_size", None)
    if parallel is not None and parallel.value != 1:
        raise ConfigError(
            f"--tensor-parallel-size {parallel.value}: this version runs on one device: leave it out"
        )
    if "device.gpu_memory_utilization" in rest and rest.get("device.device", Value("", "")).value == "cpu":
        raise ConfigError("--gpu-memory-utilization: for CUDA only; on a CPU give --kv-memory, such as 2GiB")
    return rest
