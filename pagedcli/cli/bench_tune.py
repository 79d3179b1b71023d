"""`paged bench tune`: declaration of the command. Light: what it does is imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from pagedcli.cli.bench_options import (
    MEASURING,
    HtmlFile,
    JsonFile,
    MarkdownFile,
    Requests,
    Seed,
    Workload,
    option,
)
from pagedcli.cli.options import (
    MODEL_FLAGS,
    POOL_FLAGS,
    Assignments,
    ConfigFile,
    Quiet,
    Verbose,
    refuse_unavailable,
    with_flags,
)
from pagedcli.config_file import Value

AIM = "What is wanted"


@with_flags((*MODEL_FLAGS, *POOL_FLAGS))
def tune(
    *,
    aim: Annotated[
        str, option("--aim", text="throughput, latency, balanced [throughput]", panel=AIM, metavar="NAME")
    ] = "throughput",
    max_ttft_ms: Annotated[
        float | None,
        option(
            "--max-ttft-ms", text="Limit of the 90th percentile to the first token", panel=AIM, metavar="MS"
        ),
    ] = None,
    max_itl_ms: Annotated[
        float | None,
        option(
            "--max-itl-ms", text="Limit of the 90th percentile between two tokens", panel=AIM, metavar="MS"
        ),
    ] = None,
    workload: Workload = None,
    requests: Requests = None,
    seed: Seed = None,
    minutes: Annotated[
        float, option("--minutes", text="For search and comparison [10]", panel=MEASURING, metavar="N")
    ] = 10.0,
    output: Annotated[
        str | None, option("-o", "--output", text="File to write [paged.toml]", panel=AIM, metavar="FILE")
    ] = None,
    overwrite: Annotated[
        bool, option("--overwrite", text="Replace a FILE that was not written by this command", panel=AIM)
    ] = False,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
    html_file: HtmlFile = None,
    set_: Assignments = None,
    config: ConfigFile = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    flags: dict[str, Value],
) -> None:
    """Search the threads, batch, prefill chunk and page size that suit a workload on this machine, by measuring.

    Writes them as paged.toml, which generate, serve and bench read in this folder. What is not shown to be better, in
    turns with the defaults, is not written. A setting that is given (--threads 2) stays as it is.
    """
    from pagedcli.cli.bench_tune_run import TuneOptions, run_tune

    options = TuneOptions(
        aim=aim,
        max_ttft_ms=max_ttft_ms,
        max_itl_ms=max_itl_ms,
        workload=workload,
        requests=requests,
        seed=seed,
        minutes=minutes,
        output=output,
        overwrite=overwrite,
        json_file=json_file,
        markdown_file=markdown_file,
        html_file=html_file,
        verbose=verbose,
        quiet=quiet,
    )
    raise typer.Exit(run_tune(options, refuse_unavailable(flags), assignments=set_ or [], config_file=config))
