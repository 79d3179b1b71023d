"""What `paged quantize` does: flags to a request, the run with its display, the table at its end.

May import everything below `cli`. Exit codes: 0 done, 2 nothing was run, 4 the quality demanded was missed (the
checkpoint is kept and marked), 130 interrupted.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedcli.cli.console import Messages, make_messages
from pagedcli.cli.quantize_display import QuantizeDisplay
from pagedcli.errors import ConfigError
from pagedcli.quant.options import QuantizeOptions
from pagedcli.quant.quality import Contract, Quality, quality_rows
from pagedcli.quant.request import QuantizeRequest
from pagedcli.quant.result import QuantizeResult
from pagedcli.runtime.threads import compute_threads

DONE, CONTRACT_MISSED, INTERRUPTED = 0, 4, 130
_SHOWN_SUSPECTS = 5


@dataclass(frozen=True, slots=True)
class QuantizeFlags:
    """The command line of `paged quantize`; see `quantize.quantize`."""

    methods: tuple[str, ...]
    models: tuple[str, ...]
    output: str | None
    format: str | None
    overwrite: bool
    bits: int
    group_size: int | None
    sym: bool | None
    desc_act: bool
    damp: float
    keep: tuple[str, ...]
    backend: str
    calibration: str | None
    samples: int
    seq_len: int
    seed: int
    evaluation: str | None
    max_kl: float | None
    max_perplexity_increase: float | None
    threads: int | None


def run_quantize(flags: QuantizeFlags, *, verbose: bool, quiet: bool) -> int:
    """Run the command; its exit code."""
    request = make_request(flags)
    messages = make_messages(verbose=verbose, quiet=quiet)
    from pagedcli.api.quantize import quantize, require_torch_for_quantizing

    require_torch_for_quantizing()
    try:
        with QuantizeDisplay(messages) as display:
            result = quantize(request, display)
    except KeyboardInterrupt:
        messages.say("interrupted: the same command goes on")
        return INTERRUPTED
    _report(result, messages)
    return CONTRACT_MISSED if result.missed else DONE


def make_request(flags: QuantizeFlags) -> QuantizeRequest:
    """The request that the flags make.

    Raises:
        ConfigError: They contradict each other, or a value is out of range.
    """
    method: Any = _one_method(flags.methods)
    if len(flags.models) > 1:
        raise ConfigError(
            f"the model is given twice, as {flags.models[0]} and {flags.models[1]}: give it once"
        )
    if flags.output is not None and not flags.output.strip():
        raise ConfigError("-o is empty: give a folder, or leave it out")
    if flags.threads is not None and flags.threads < 1:
        raise ConfigError(f"--threads is {flags.threads}: it must be at least 1")
    options = QuantizeOptions(
        method=method,
        bits=flags.bits,
        group_size=flags.group_size,
        sym=flags.sym,
        desc_act=flags.desc_act,
        damp=flags.damp,
        keep=flags.keep,
    )
    file_format: Any = flags.format
    backend: Any = flags.backend
    return QuantizeRequest(
        options=options,
        model=flags.models[0] if flags.models else None,
        output=flags.output,
        calibration=flags.calibration,
        samples=flags.samples,
        seq_len=flags.seq_len,
        seed=flags.seed,
        format=file_format,
        backend=backend,
        evaluation=flags.evaluation,
        contract=Contract(flags.max_kl, flags.max_perplexity_increase),
        overwrite=flags.overwrite,
        threads=flags.threads or compute_threads(),
    )


def _one_method(methods: tuple[str, ...]) -> str:
    if len(methods) == 1:
        return methods[0]
    if not methods:
        raise ConfigError("say how to quantize: --awq, --gptq or --rtn")
    raise ConfigError(f"{' and '.join(f'--{name}' for name in methods)} are given: give one of them")


def _report(result: QuantizeResult, messages: Messages) -> None:
    """The table on stdout: it is the result; the rest on stderr."""
    if warnings := result.quality.warnings():  # said even to those who want errors only
        text = f"WARNING: {result.folder} is not usable: {'; '.join(warnings)}"
        with contextlib.suppress(OSError):
            messages.console.print(text, style="bold red")
    if not messages.quiet:
        console = Console(highlight=False, emoji=False, markup=False)
        console.print(quality_table(result.quality))
        for line in verdict(result):
            console.print(line, soft_wrap=True)
    elif result.missed:
        messages.console.print(f"paged: {'; '.join(result.missed)}: {result.folder} is kept and marked")


def quality_table(quality: Quality) -> Table:
    """Original and quantized side by side."""
    table = Table(title=None, box=None, pad_edge=False, padding=(0, 2))
    table.add_column("")
    table.add_column("original", justify="right")
    table.add_column("quantized", justify="right")
    for what, first, second in quality_rows(quality):
        table.add_row(Text(what, "bold"), first, second)
    return table


def verdict(result: QuantizeResult) -> list[Text]:
    """What the table does not say: suspects, the contract, where it is and how to use it."""
    lines = []
    suspects = result.quality.suspects()
    for layer in suspects[:_SHOWN_SUSPECTS]:
        lines.append(
            Text(
                f"suspect: {layer.name} has error {layer.error:.3g}, far above its kind in other layers",
                "red",
            )
        )
    if len(suspects) > _SHOWN_SUSPECTS:
        lines.append(Text(f"suspect: {len(suspects) - _SHOWN_SUSPECTS} more, see quality.json", "red"))
    if result.missed:
        lines.append(
            Text(f"missed: {'; '.join(result.missed)}; {result.folder} is kept and marked", "bold red")
        )
    else:
        lines.append(
            Text(f"written: {result.folder}; try: paged generate --chat -m {result.folder}", "bold green")
        )
    return lines
