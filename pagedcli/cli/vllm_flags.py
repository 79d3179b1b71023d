"""Command lines written for vLLM's server: what means the same here, and what to write instead.

Standard library, typer and this package only (`--help` must stay light). A flag is passed on under our name, dropped
where it asks for what happens anyway, or refused with the remedy; none is taken and ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pagedcli.cli.help import GroupedCommand
from pagedcli.errors import ConfigError

# Names that differ; those that are the same (--max-model-len, --dtype ...) need no entry.
_RENAMED = {
    "--enable-prefix-caching": "--prefix-caching",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--scheduling-policy": "--policy",
    "--num-gpu-blocks-override": "--num-pages",
}
# vLLM takes several values after one of these.
_SEVERAL = ("--served-model-name", "--api-key")
# Switches that ask for what happens anyway.
_ANYWAY = frozenset(
    {
        "--enable-chunked-prefill",
        "--disable-frontend-multiprocessing",
        "--disable-log-requests",
        "--no-enable-log-requests",
        "--disable-uvicorn-access-log",
        "--disable-fastapi-docs",
    }
)
# Values that ask for what happens anyway; another one is refused with the remedy.
_AT_THE_VALUE: dict[str, tuple[tuple[str, ...], str]] = {
    "--generation-config": (("auto",), "requests fall back to the model's own: leave it out"),
    "--load-format": (("auto", "safetensors", "gguf"), "the format is read from MODEL: leave it out"),
    "--kv-cache-dtype": (("auto",), "KV is stored as --dtype says: leave it out"),
    "--pipeline-parallel-size": (("1",), "this version runs on one device: leave it out"),
    "--data-parallel-size": (("1",), "this version runs one engine: leave it out"),
    "--api-server-count": (("1",), "one process answers: leave it out"),
    "--swap-space": (("0",), "nothing is swapped, preempted requests are recomputed: leave it out"),
    "--cpu-offload-gb": (("0",), "weights are not offloaded: leave it out"),
    "--max-logprobs": (("20",), "20 alternatives are served: leave it out"),
    "--response-role": (("assistant",), "answers are the assistant's: leave it out"),
    "--chat-template-content-format": (("auto",), "the template is looked at for it: leave it out"),
    "--tokenizer-mode": (("auto",), "the tokenizer is the model's own: leave it out"),
    "--runner": (("auto", "generate"), "this server generates: leave it out"),
    "--task": (("auto", "generate"), "this server generates: leave it out"),
}
_REMEDIES = {
    "--allow-credentials": "write --set serve.cors_origins='[\"https://...\"]'",
    "--allowed-headers": "write --set serve.cors_origins='[\"https://...\"]'",
    "--allowed-methods": "write --set serve.cors_origins='[\"https://...\"]'",
    "--allowed-origins": "write --set serve.cors_origins='[\"https://...\"]'",
    "--async-scheduling": "write --set scheduler.depth=2",
    "--chat-template-kwargs": "requests say chat_template_kwargs",
    "--compilation-config": "leave it out: nothing is compiled at run time",
    "--config-format": "leave it out: the format is read from MODEL",
    "--default-chat-template-kwargs": "requests say chat_template_kwargs",
    "--disable-log-stats": "leave it out: /metrics and --live show statistics, the log has none",
    "--disable-sliding-window": "write --max-model-len instead",
    "--download-dir": "set HF_HOME, where models of the hub are kept",
    "--enable-auto-tool-choice": "leave it out: tools are not served in this version",
    "--enable-lora": "leave it out: adapters are not served in this version",
    "--enable-log-requests": "write -v: a line for each request, never its text",
    "--enable-prompt-tokens-details": "leave it out: cached_tokens is always told",
    "--enable-reasoning": "leave it out: reasoning is not taken apart in this version",
    "--enable-request-id-headers": "leave it out: X-Request-Id is always sent",
    "--enable-server-load-tracking": "leave it out: /metrics says it",
    "--guided-decoding-backend": "leave it out: response_format is not served in this version",
    "--hf-overrides": "change the model's config.json",
    "--hf-token": "set HF_TOKEN",
    "--limit-mm-per-prompt": "leave it out: this server takes text",
    "--log-config-file": "write -v or --quiet, or set PAGED_LOG",
    "--lora-modules": "leave it out: adapters are not served in this version",
    "--max-cpu-loras": "leave it out: adapters are not served in this version",
    "--max-log-len": "leave it out: no text of a request is logged",
    "--max-lora-rank": "leave it out: adapters are not served in this version",
    "--max-seq-len-to-capture": "leave it out: it is about CUDA graphs, which this version has none of",
    "--middleware": "put a proxy before this server",
    "--override-generation-config": "write --temperature X and so on, or --set sampling.NAME=VALUE",
    "--override-neuron-config": "leave it out",
    "--preemption-mode": "leave it out: preempted requests are recomputed",
    "--reasoning-parser": "leave it out: reasoning is not taken apart in this version",
    "--return-tokens-as-token-ids": "requests say return_token_ids",
    "--revision": "give the folder of that revision as MODEL",
    "--root-path": "have the proxy strip the path",
    "--rope-scaling": "change rope_scaling in the model's config.json",
    "--rope-theta": "change rope_theta in the model's config.json",
    "--speculative-config": "leave it out: there is no speculation in this version",
    "--ssl-ca-certs": "put a proxy before this server that asks clients for certificates",
    "--ssl-cert-reqs": "put a proxy before this server that asks clients for certificates",
    "--structured-outputs-config": "leave it out: response_format is not served in this version",
    "--tokenizer": "leave it out: the tokenizer is the model's own",
    "--tool-call-parser": "leave it out: tools are not served in this version",
    "--trust-remote-code": "leave it out: nothing from a model's folder is ever executed",
    "--uds": "write --host and --port",
    "--uvicorn-log-level": "write -v or --quiet, or set PAGED_LOG",
    "--worker-cls": "leave it out",
}


class ServeCommand(GroupedCommand):
    """`paged serve`; its command line may be one of vLLM's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what the command line means here."""
        return super().parse_args(ctx, list(translated(args)))


def translated(arguments: list[str]) -> Iterator[str]:
    """The arguments under our names.

    Raises:
        ConfigError: One asks for what this server does not do; says what to write instead.
    """
    rest = list(arguments)
    # As vLLM is called: MODEL first, so that nothing that follows a flag can be it.
    is_model_first = bool(rest) and not rest[0].startswith("-")
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            yield from (argument, *rest)
            return
        if not argument.startswith("--"):
            yield argument
            continue
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        if name in _REMEDIES:
            raise ConfigError(f"{name} is vLLM's: {_REMEDIES[name]}")
        if name in _AT_THE_VALUE:
            _check_value(name, value if equals else (rest.pop(0) if rest else ""))
        elif name not in _ANYWAY:
            yield _RENAMED.get(name, name) + equals + value
            if name in _SEVERAL and not equals and is_model_first:
                yield from _repeated(name, rest)


def _check_value(name: str, value: str) -> None:
    values, remedy = _AT_THE_VALUE[name]
    if value not in values:
        raise ConfigError(f"{name} {value} is vLLM's: {remedy}")


def _repeated(name: str, rest: list[str]) -> Iterator[str]:
    """The values of a flag that vLLM gives several of, with the flag before each but the first."""
    first = True
    while rest and not rest[0].startswith("-"):
        if not first:
            yield name
        yield rest.pop(0)
        first = False
