"""`paged quantize`: declaration of the command. Light: what it does is in `quantize_run`, imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from pagedcli.cli.options import Quiet, Verbose

METHOD, FILES, TEXT, QUALITY = (
    "How",
    "Model and files",
    "Calibration and evaluation",
    "Quality that is demanded",
)


def _option(*names: str, text: str, panel: str, metavar: str | None = None, hidden: bool = False) -> object:
    return typer.Option(
        *names, help=text, metavar=metavar, rich_help_panel=panel, show_default=False, hidden=hidden
    )


def quantize(
    *,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", show_default=False)] = None,
    model_flag: Annotated[
        str | None,
        _option(
            "--model",
            "-m",
            text="Folder, GGUF file or hub id [SmolLM2-135M-Instruct]",
            panel=FILES,
            metavar="MODEL",
        ),
    ] = None,
    output: Annotated[
        str | None,
        _option(
            "-o", "--output", text="Folder to write [MODEL-awq-4bit-g128 ...]", panel=FILES, metavar="OUT"
        ),
    ] = None,
    file_format: Annotated[
        str | None,
        _option(
            "--format",
            text="autoawq, gptq, gptq_v2, compressed-tensors [the method's]",
            panel=FILES,
            metavar="NAME",
        ),
    ] = None,
    overwrite: Annotated[
        bool, _option("--overwrite", text="Replace OUT, finished or not", panel=FILES)
    ] = False,
    awq: Annotated[bool, _option("--awq", text="AWQ: scales and ranges searched", panel=METHOD)] = False,
    gptq: Annotated[
        bool, _option("--gptq", text="GPTQ: errors compensated column by column", panel=METHOD)
    ] = False,
    rtn: Annotated[bool, _option("--rtn", text="Round to nearest: no calibration", panel=METHOD)] = False,
    bits: Annotated[
        int, _option("--bits", text="4, or 8 for --gptq and --rtn [4]", panel=METHOD, metavar="N")
    ] = 4,
    group_size: Annotated[
        int | None,
        _option(
            "--group-size",
            text="-1, 32, 64, 128 [the largest that divides every layer]",
            panel=METHOD,
            metavar="N",
        ),
    ] = None,
    sym: Annotated[
        bool | None,
        typer.Option(
            "--sym/--asym",
            help="Any zero point; --sym: the middle [--awq: --asym, else --sym]",
            rich_help_panel=METHOD,
            show_default=False,
        ),
    ] = None,
    desc_act: Annotated[
        bool, _option("--desc-act", text="--gptq: groups in order of activations", panel=METHOD)
    ] = False,
    damp: Annotated[
        float, _option("--damp", text="--gptq: damping of the Hessian [0.01]", panel=METHOD, metavar="X")
    ] = 0.01,
    keep: Annotated[
        list[str] | None,
        _option(
            "--keep", text="Leave such layers as they are; may be repeated", panel=METHOD, metavar="PATTERN"
        ),
    ] = None,
    backend: Annotated[
        str,
        _option(
            "--backend",
            text="native, autoawq, auto-gptq (the packages) [native]",
            panel=METHOD,
            metavar="NAME",
        ),
    ] = "native",
    calibration: Annotated[
        str | None,
        _option(
            "--calibration",
            text="JSONL, text, or a hub data set [the model writes it]",
            panel=TEXT,
            metavar="FILE",
        ),
    ] = None,
    samples: Annotated[
        int, _option("--samples", text="Calibration samples at most [128]", panel=TEXT, metavar="N")
    ] = 128,
    seq_len: Annotated[
        int, _option("--seq-len", text="Tokens of a sample [512]", panel=TEXT, metavar="TOKENS")
    ] = 512,
    seed: Annotated[
        int, _option("--seed", text="Chooses and writes the text [0]", panel=TEXT, metavar="N")
    ] = 0,
    evaluation: Annotated[
        str | None,
        _option("--eval", text="Held-out text to measure on [a text of our own]", panel=TEXT, metavar="FILE"),
    ] = None,
    max_kl: Annotated[
        float | None,
        _option("--max-kl", text="Most KL from the original, nats a token", panel=QUALITY, metavar="X"),
    ] = None,
    max_perplexity_increase: Annotated[
        float | None,
        _option(
            "--max-perplexity-increase",
            text="Most that perplexity may rise; 0.02 is 2%",
            panel=QUALITY,
            metavar="X",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            help="Compute threads [physical cores within the quota]",
            metavar="N",
            rich_help_panel="Other",
            show_default=False,
        ),
    ] = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Quantize MODEL with --awq, --gptq or --rtn, check the result, and report its quality.

    OUT gets safetensors that other engines read too, and quality.json. The same command goes on where it stopped.
    With a quality demanded, layers are left unquantized until it is met; exit code 4 if that is not enough.
    """
    from pagedcli.cli.quantize_run import QuantizeFlags, run_quantize

    flags = QuantizeFlags(
        methods=tuple(name for name, given in (("awq", awq), ("gptq", gptq), ("rtn", rtn)) if given),
        models=tuple(name for name in (model, model_flag) if name is not None),
        output=output,
        format=file_format,
        overwrite=overwrite,
        bits=bits,
        group_size=group_size,
        sym=sym,
        desc_act=desc_act,
        damp=damp,
        keep=tuple(keep or ()),
        backend=backend,
        calibration=calibration,
        samples=samples,
        seq_len=seq_len,
        seed=seed,
        evaluation=evaluation,
        max_kl=max_kl,
        max_perplexity_increase=max_perplexity_increase,
        threads=threads,
    )
    raise typer.Exit(run_quantize(flags, verbose=verbose, quiet=quiet))
