"""`paged bench kernels`: declaration of the command. Light: what it does is imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from pagedcli.cli.bench_options import MEASURING, HtmlFile, JsonFile, MarkdownFile, option
from pagedcli.cli.options import Quiet, Verbose

WHAT = "What is measured"


def kernels(
    *,
    shapes: Annotated[
        str,
        option(
            "--shapes",
            text="smollm2-135m, qwen2.5-0.5b, llama-3-8b, mistral-7b, or all; a list [all]",
            panel=WHAT,
            metavar="NAMES",
        ),
    ] = "all",
    ops: Annotated[
        str,
        option(
            "--op",
            text="embedding, norm, linear, rope, attention, gated, head, sampler; a list [all]",
            panel=WHAT,
            metavar="NAMES",
        ),
    ] = "all",
    variants: Annotated[
        str,
        option(
            "--variant",
            text="best, all, amx, avx2, torch-engine, ...; a list; torch's own op runs beside them [best]",
            panel=WHAT,
            metavar="NAMES",
        ),
    ] = "best",
    formats: Annotated[
        str,
        option(
            "--format",
            text="float32, bfloat16, int4-g128, int8-g128, ...; a list [all]",
            panel=WHAT,
            metavar="NAMES",
        ),
    ] = "all",
    rows: Annotated[
        str,
        option(
            "--m", "--rows", text="Rows: tokens of a step; a list [1,8,64,512]", panel=WHAT, metavar="LIST"
        ),
    ] = "1,8,64,512",
    contexts: Annotated[
        str,
        option(
            "--context",
            text="Tokens that attention looks back; a list [256,2048,8192]",
            panel=WHAT,
            metavar="LIST",
        ),
    ] = "256,2048,8192",
    page_sizes: Annotated[
        str,
        option("--page-size", text="Of attention; a list [1,8,16,32,64,256]", panel=WHAT, metavar="LIST"),
    ] = "1,8,16,32,64,256",
    threads: Annotated[
        int | None,
        option(
            "--threads",
            text="Compute threads [physical cores within the quota]",
            panel=MEASURING,
            metavar="N",
        ),
    ] = None,
    device: Annotated[
        str,
        option(
            "--device",
            text="cpu; cuda: our CUDA kernels and torch's ops there [cpu]",
            panel=MEASURING,
            metavar="DEVICE",
        ),
    ] = "cpu",
    seconds: Annotated[
        float,
        option("--seconds", text="For each variant of a case [0.15]", panel=MEASURING, metavar="S"),
    ] = 0.15,
    rounds: Annotated[
        int, option("--rounds", text="Turns of the variants of a case [7]", panel=MEASURING, metavar="N")
    ] = 7,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
    html_file: HtmlFile = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Measure every op alone, beside torch's own op and the machine's limits.

    Shapes are those of models; of the large ones a single layer. Weights and cached keys come from memory, not from
    caches. Each result is checked against float64 before it is timed.
    """
    from pagedcli.cli.bench_kernels_run import KernelOptions, run_kernels

    options = KernelOptions(
        shapes=shapes,
        ops=ops,
        variants=variants,
        formats=formats,
        rows=rows,
        contexts=contexts,
        page_sizes=page_sizes,
        threads=threads,
        device=device,
        seconds=seconds,
        rounds=rounds,
        json_file=json_file,
        markdown_file=markdown_file,
        html_file=html_file,
        verbose=verbose,
        quiet=quiet,
    )
    raise typer.Exit(run_kernels(options))
