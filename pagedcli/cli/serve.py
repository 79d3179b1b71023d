"""`paged serve`: declaration of the command. Light: what it does is in `serve_run`, imported when it runs."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from pagedcli.cli.options import (
    MODEL_FLAGS,
    POOL_FLAGS,
    SAMPLING_FLAGS,
    Assignments,
    ConfigFile,
    Flag,
    NoConfig,
    Quiet,
    Verbose,
    refuse_unavailable,
    with_flags,
)
from pagedcli.config_file import Value

SERVER = "Server"
SERVE_FLAGS = (
    Flag("serve.host", ("--host",), str, "Address to listen at [127.0.0.1]", SERVER, "ADDRESS"),
    Flag("serve.port", ("--port",), int, "Port to listen at; 0: a free one [8000]", SERVER, "PORT"),
    Flag(
        "serve.api_key_file",
        ("--api-key-file",),
        str,
        "Keys, a line each, that requests must bring [PAGED_API_KEY]",
        SERVER,
        "FILE",
    ),
    Flag(
        "serve.served_model_name",
        ("--served-model-name",),
        list[str],
        "Name in requests; may be repeated [as given]",
        SERVER,
        "NAME",
    ),
    Flag("serve.max_queue", ("--max-queue",), int, "Requests that may wait; then 429 [1024]", SERVER, "N"),
    Flag(
        "scheduler.max_itl_ms",
        ("--max-itl-ms",),
        float,
        "Time between two tokens of a running request, at most",
        SERVER,
        "MS",
    ),
    Flag("serve.ssl_certfile", ("--ssl-certfile",), str, "Serve HTTPS", SERVER, "FILE", hidden=True),
    Flag("serve.ssl_keyfile", ("--ssl-keyfile",), str, "Key of the certificate", SERVER, "FILE", hidden=True),
)
_UNUSED = ("sampling.n", "sampling.echo", "sampling.logprobs", "sampling.prompt_logprobs")
# Defaults for requests that say nothing; what an answer looks like is the request's to say.
# The values in brackets are those of `paged generate`.
_SAMPLING = tuple(
    dataclasses.replace(flag, hidden=True, help=flag.help.partition(" [")[0])
    for flag in SAMPLING_FLAGS
    if flag.key not in _UNUSED
)


@with_flags((*SERVE_FLAGS, *MODEL_FLAGS, *POOL_FLAGS, *_SAMPLING))
def serve(
    *,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", show_default=False)] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="Show rates, queue and pages while serving", rich_help_panel=SERVER),
    ] = False,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key", metavar="KEY", help="A key on the command line, where others may see it", hidden=True
        ),
    ] = None,
    set_: Assignments = None,
    config: ConfigFile = None,
    no_config: NoConfig = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    flags: dict[str, Value],
) -> None:
    """Serve MODEL to OpenAI's clients.

    MODEL is a folder, GGUF file or hub id [SmolLM2-135M-Instruct]. Ctrl-C ends the server when what runs is answered,
    a second one at once. Command lines of vLLM's server work, or say what to write instead.
    """
    from pagedcli.cli.serve_run import ServeOptions, run_serve

    options = ServeOptions(
        model=model,
        live=live,
        api_keys=tuple(api_key or ()),
        verbose=verbose,
        quiet=quiet,
        no_config=no_config,
    )
    run_serve(options, refuse_unavailable(flags), assignments=set_ or [], config_file=config)
