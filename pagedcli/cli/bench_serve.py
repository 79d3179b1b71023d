"""`paged bench serve`: declaration of the command. Light: what it does is in `bench_serve_run`, imported later."""

from __future__ import annotations

from typing import Annotated

import typer

from pagedcli.cli.bench_options import HtmlFile, JsonFile, MarkdownFile, Workload, option
from pagedcli.cli.options import Quiet, Verbose

REQUESTS, ARRIVALS, SERVER, TARGETS = "Requests", "Arrivals", "Server", "Targets"


def serve_load(
    *,
    url: Annotated[str, typer.Argument(metavar="URL", help="Of the server", show_default=False)],
    workload: Workload = None,
    requests: Annotated[
        int | None,
        option("--requests", "-n", text="Requests [32, a file's all]", panel=REQUESTS, metavar="N"),
    ] = None,
    seed: Annotated[int, option("--seed", text="Of the workload [0]", panel=REQUESTS, metavar="N")] = 0,
    chat: Annotated[bool, option("--chat", text="Ask as chats, not as completions", panel=REQUESTS)] = False,
    prompt_text: Annotated[
        bool, option("--prompt-text", text="Send texts, not token ids", panel=REQUESTS)
    ] = False,
    vocab_size: Annotated[
        int, option("--vocab-size", text="Draw token ids below this [30000]", panel=REQUESTS, metavar="N")
    ] = 30_000,
    length_scale: Annotated[
        float, option("--length-scale", text="Lengths of a trace times this [1]", panel=REQUESTS, metavar="X")
    ] = 1.0,
    body: Annotated[
        list[str] | None,
        option(
            "--body", text="Field of every request; null leaves it out", panel=REQUESTS, metavar="FIELD=JSON"
        ),
    ] = None,
    save_workload: Annotated[
        str | None,
        option("--save-workload", text="Write the requests, for other runs", panel=REQUESTS, metavar="FILE"),
    ] = None,
    concurrency: Annotated[
        int | None,
        option("--concurrency", "-c", text="Closed loop: so many at once [8]", panel=ARRIVALS, metavar="N"),
    ] = None,
    rate: Annotated[
        float | None, option("--rate", "-r", text="Requests per second", panel=ARRIVALS, metavar="R")
    ] = None,
    arrival: Annotated[
        str | None,
        option(
            "--arrival",
            text="poisson, fixed, bursts:SIZE or ramp:LAST_RATE [poisson]",
            panel=ARRIVALS,
            metavar="KIND",
        ),
    ] = None,
    time_scale: Annotated[
        float,
        option(
            "--time-scale",
            text="Gaps of a trace times this: 0.5 is twice as fast [1]",
            panel=ARRIVALS,
            metavar="X",
        ),
    ] = 1.0,
    goodput: Annotated[
        str | None,
        option(
            "--goodput",
            text="Latencies wanted, as ttft:500ms,tpot:50ms,itl:1s,e2e:10s",
            panel=TARGETS,
            metavar="TARGETS",
        ),
    ] = None,
    saturation: Annotated[
        bool, option("--saturation", text="Search the largest rate that is kept up with", panel=TARGETS)
    ] = False,
    share: Annotated[
        float,
        option("--share", text="Of requests that must be good there [0.9]", panel=TARGETS, metavar="PART"),
    ] = 0.9,
    tolerance: Annotated[
        float, option("--tolerance", text="Of the rate found there [0.1]", panel=TARGETS, metavar="PART")
    ] = 0.1,
    seconds: Annotated[
        float, option("--seconds", text="Arrivals at each rate there [20]", panel=TARGETS, metavar="S")
    ] = 20.0,
    model: Annotated[
        str | None,
        option("--model", "-m", text="Name in requests [the server's first]", panel=SERVER, metavar="NAME"),
    ] = None,
    api_key_file: Annotated[
        str | None,
        option("--api-key-file", text="File with the key [PAGED_API_KEY]", panel=SERVER, metavar="FILE"),
    ] = None,
    warm_up: Annotated[
        int, option("--warm-up", text="Requests before, not measured [2]", panel=SERVER, metavar="N")
    ] = 2,
    timeout: Annotated[
        float, option("--timeout", text="For each request [600]", panel=SERVER, metavar="S")
    ] = 600.0,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
    html_file: HtmlFile = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Load any OpenAI-compatible server and measure its answers.

    Requests come in a closed loop (--concurrency), at a rate (--rate), or as a trace says. Latencies count from when a
    request was due. Failed requests are counted apart: exit code 3.
    """
    from pagedcli.cli.bench_serve_run import LoadOptions, run_serve_load

    options = LoadOptions(
        url=url,
        workload="mixed" if workload is None else workload,
        requests=requests,
        seed=seed,
        chat=chat,
        prompt_text=prompt_text,
        vocab_size=vocab_size,
        length_scale=length_scale,
        body=tuple(body or ()),
        save_workload=save_workload,
        concurrency=concurrency,
        rate=rate,
        arrival=arrival,
        time_scale=time_scale,
        goodput=goodput,
        saturation=saturation,
        share=share,
        tolerance=tolerance,
        seconds=seconds,
        model=model,
        api_key_file=api_key_file,
        warm_up=warm_up,
        timeout=timeout,
        json_file=json_file,
        markdown_file=markdown_file,
        html_file=html_file,
        verbose=verbose,
        quiet=quiet,
    )
    raise typer.Exit(run_serve_load(options))
