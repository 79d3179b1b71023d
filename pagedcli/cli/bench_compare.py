"""`paged bench compare`: declaration of the command. Light: what it does is imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from pagedcli.cli.bench_options import MEASURING, HtmlFile, JsonFile, MarkdownFile, Seed, option
from pagedcli.cli.options import (
    MODEL_FLAGS,
    Assignments,
    ConfigFile,
    NoConfig,
    Quiet,
    Verbose,
    refuse_unavailable,
    with_flags,
)
from pagedcli.config_file import Value

QUANTIZED = "Quantized copies of the model"


@with_flags(MODEL_FLAGS)
def compare(
    *,
    short: Annotated[
        bool, option("--short", text="Less of everything: about a minute", panel=MEASURING)
    ] = False,
    workload: Annotated[
        str | None,
        option(
            "--workload",
            text="Of the main comparison, as in paged bench [shared-prefix:128:16-192:16-192]",
            panel=MEASURING,
            metavar="WORKLOAD",
        ),
    ] = None,
    requests: Annotated[
        int | None, option("--requests", text="Requests of that workload [24]", panel=MEASURING, metavar="N")
    ] = None,
    kv_tokens: Annotated[
        int | None,
        option("--kv-tokens", text="Memory for its KV, in tokens [6144]", panel=MEASURING, metavar="TOKENS"),
    ] = None,
    repeats: Annotated[
        int | None,
        option(
            "--repeats", text="Rounds of all that is timed [3; 6 where quick]", panel=MEASURING, metavar="N"
        ),
    ] = None,
    seed: Seed = None,
    awq: Annotated[
        str | None, option("--awq", text="An AWQ checkpoint of the model", panel=QUANTIZED, metavar="DIR")
    ] = None,
    gptq: Annotated[
        str | None, option("--gptq", text="A GPTQ checkpoint of the model", panel=QUANTIZED, metavar="DIR")
    ] = None,
    quantize: Annotated[
        str | None,
        option(
            "--quantize", text="Make both in this folder, which takes long", panel=QUANTIZED, metavar="DIR"
        ),
    ] = None,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
    html_file: HtmlFile = None,
    set_: Assignments = None,
    config: ConfigFile = None,
    no_config: NoConfig = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    flags: dict[str, Value],
) -> None:
    """Show what paging, continuous batching, prefix sharing and quantization each bring.

    Runs the same requests in the same memory in every way, in turns, and tests the claims that are made for paged
    engines on this machine. Every way must give the same token ids.
    """
    from pagedcli.cli.bench_compare_run import CompareOptions, run_compare

    options = CompareOptions(
        short=short,
        workload=workload,
        requests=requests,
        kv_tokens=kv_tokens,
        repeats=repeats,
        seed=seed or 0,
        awq=awq,
        gptq=gptq,
        quantize=quantize,
        json_file=json_file,
        markdown_file=markdown_file,
        html_file=html_file,
        verbose=verbose,
        quiet=quiet,
        no_config=no_config,
    )
    raise typer.Exit(
        run_compare(options, refuse_unavailable(flags), assignments=set_ or [], config_file=config)
    )
