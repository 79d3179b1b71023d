"""What `paged bench kernels` does: which cases, on what, then report. May import everything below `cli`.

Exit codes: 0 done, 1 a result was wrong (the reports are written), 2 nothing was run, 130 interrupted (what was
measured until then is reported).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedcli.bench.environment import LoadMeter, describe_machine, provenance
from pagedcli.bench.kernel_results import case_dict, report_dict
from pagedcli.bench.kernels import (
    CUDA_VARIANT,
    TORCH_VARIANTS,
    KernelBench,
    KernelTimes,
    Worker,
    start_workers,
)
from pagedcli.bench.machine import MachineLimits, measure_limits
from pagedcli.bench.report.files import check_outputs
from pagedcli.checkpoint.sources import cache_folder
from pagedcli.cli.bench_output import show_and_write
from pagedcli.cli.bench_progress import CountedProgress
from pagedcli.cli.console import Messages, make_messages
from pagedcli.config_file import show_bytes, suggestion
from pagedcli.errors import ConfigError, PagedError, how_to_install
from pagedcli.ops.cuda_library import library_in
from pagedcli.ops.kernel_cases import FAMILIES, FORMATS, OPS, Case, list_cases, native_variants
from pagedcli.ops.select import require_cuda, require_native, require_torch, torch_is_installed
from pagedcli.runtime.threads import compute_threads, core_cpus

ALL = "all"
MAX_ROWS, MAX_CONTEXT, MAX_PAGE = 8192, 131072, 256
NO_TORCH = "torch is not installed, so nothing stands beside the kernels"
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Flags of `paged bench kernels`; see `bench_kernels.kernels`."""

    shapes: str = ALL
    ops: str = ALL
    variants: str = "best"
    formats: str = ALL
    rows: str = "1,8,64,512"
    contexts: str = "256,2048,8192"
    page_sizes: str = "1,8,16,32,64,256"
    threads: int | None = None
    device: str = "cpu"
    seconds: float = 0.15
    rounds: int = 7
    json_file: str | None = None
    markdown_file: str | None = None
    html_file: str | None = None
    verbose: bool = False
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Backends:
    """Where the cases run.

    Attributes:
        native: Variants of the native kernels.
        torch: Torch's variants; none where it is not installed.
        notes: What a user must know.
        library: Of our CUDA kernels, measured in the process of torch.
    """

    native: tuple[str, ...]
    torch: tuple[str, ...]
    notes: tuple[str, ...] = ()
    library: Path | None = None


def run_kernels(options: KernelOptions) -> int:
    """Run the command; its exit code.

    Raises:
        PagedError: Something is wrong with the flags, or a result is wrong.
    """
    check_outputs(options.json_file, options.markdown_file, html=options.html_file)
    cases = cases_of(options)
    backends = choose_backends(options)
    if not 0 < options.seconds < math.inf or options.rounds < 1:
        raise ConfigError(
            f"--seconds {options.seconds:g} --rounds {options.rounds}: both must be positive, and numbers"
        )
    messages = make_messages(verbose=options.verbose, quiet=options.quiet)
    threads = _threads(options)
    with messages.waiting("measuring the machine's limits"):
        machine = measure_limits(options.device, "bfloat16", "", threads)
    load, start = LoadMeter(), time.perf_counter()
    load.begin()
    workers = start_workers(
        native=bool(backends.native),
        torch_device=options.device if backends.torch else None,
        threads=threads,
        cpus=core_cpus()[:threads] if threads <= len(core_cpus()) else (),
        library=backends.library,
    )
    times, is_whole = _measure(options, backends, workers, cases, messages)
    load.end()
    seen = load.seen()
    data = report_dict(
        _settings(options, backends, threads),
        {**describe_machine(), **_about(workers)},
        [case_dict(item, machine) for item in times],
        notes=[*backends.notes, *([] if is_whole else [f"interrupted: {len(times)} of {len(cases)} cases"])],
        limits=_limits(machine),
        other_load=None if seen is None else str(seen),
        seconds=time.perf_counter() - start,
        **provenance(),
    )
    _report(data, options)
    if seen is not None and seen.is_noticeable:
        messages.say(f"other load was {seen}; torch's threads wait for each other and suffer most")
    _refuse_wrong(times)
    return 0 if is_whole else INTERRUPTED


def _measure(
    options: KernelOptions,
    backends: Backends,
    workers: Sequence[Worker],
    cases: Sequence[Case],
    messages: Messages,
) -> tuple[list[KernelTimes], bool]:
    """What was measured, and whether that is all."""
    found: list[KernelTimes] = []
    bench = KernelBench(
        workers, (*backends.native, *backends.torch), seconds=options.seconds, rounds=options.rounds
    )
    with bench, CountedProgress(messages, len(cases), "kernels") as progress:
        try:
            for times in bench.run(cases, lambda case: progress.say(_name(case))):
                found.append(times)
                progress.advance()
        except KeyboardInterrupt:
            return found, False
    return found, True


def _name(case: Case) -> str:
    return f"{case.families[0]} {case.op} {case.label} {case.format.name}, {case.rows} rows"


def _report(data: Mapping[str, Any], options: KernelOptions) -> None:
    show_and_write(data, options)


def _refuse_wrong(results: Iterable[KernelTimes]) -> None:
    wrong = [f"{_name(item.case)} on {variant}" for item in results for variant in item.wrong]
    if wrong:
        raise PagedError(
            f"{len(wrong)} results differ from float64 by more than rounding, such as {wrong[0]}"
        )


# ---- what is measured


def cases_of(options: KernelOptions) -> list[Case]:
    """The cases that the flags ask for.

    Raises:
        ConfigError: A name is unknown or a number out of range.
    """
    names = _names("--shapes", options.shapes, list(FAMILIES))
    formats = _names("--format", options.formats, list(FORMATS))
    chosen = [FORMATS[name] for name in formats]
    if options.formats != ALL:  # named formats are wanted for all matrices
        chosen = [_everywhere(item) for item in chosen]
    cases = list_cases(
        [FAMILIES[name] for name in names],
        ops=_names("--op", options.ops, list(OPS)),
        formats=chosen,
        rows=_numbers("--m", options.rows, MAX_ROWS),
        contexts=_numbers("--context", options.contexts, MAX_CONTEXT),
        page_sizes=_numbers("--page-size", options.page_sizes, MAX_PAGE),
    )
    if not cases:
        raise ConfigError(f"nothing is left to measure of --op {options.ops} with --format {options.formats}")
    return cases


def _everywhere(item: Any) -> Any:
    import dataclasses

    return dataclasses.replace(item, everywhere=True)


def _names(flag: str, text: str, known: Sequence[str]) -> list[str]:
    if text == ALL:
        return list(known)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{flag} {text}: {name!r} is unknown: "
                f"{suggestion(name, known, 'choose of ' + ', '.join(known) + ', or all')}"
            )
    return list(dict.fromkeys(names))


def _numbers(flag: str, text: str, most: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text}: give whole numbers, such as 1,64") from None
    for number in numbers:
        if not 1 <= number <= most:
            raise ConfigError(f"{flag} {text}: {number} is out of range: choose 1 to {most:,}")
    return sorted(set(numbers))


# ---- where


def choose_backends(options: KernelOptions) -> Backends:
    """Variants that are wanted and there.

    Raises:
        ConfigError: A variant is unknown, or not for this machine.
        MissingDependencyError: Kernels or torch are not there.
    """
    if options.device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {options.device}: choose cpu or cuda")
    wanted = [name.strip() for name in options.variants.split(",")]
    if options.device == "cuda":
        return _cuda_backends(wanted)
    available = native_variants()
    native: list[str] = []
    for name in wanted:
        if name in ("best", ALL):
            require_native()
            native += available[:1] if name == "best" else available
        elif name in available:
            native.append(name)
        elif name not in TORCH_VARIANTS:
            known = ("best", ALL, *available, *TORCH_VARIANTS)
            raise ConfigError(
                f"--variant {options.variants}: {name!r} is not to be had here: choose of {', '.join(known)}"
            )
    named = [name for name in TORCH_VARIANTS if name in wanted]
    if not torch_is_installed():
        if named:
            require_torch(f"--variant {named[0]}")
        return Backends(tuple(dict.fromkeys(native)), (), (f"{NO_TORCH}: {how_to_install(ALL)}",))
    torch = TORCH_VARIANTS if ALL in wanted or "torch-engine" in wanted else TORCH_VARIANTS[:1]
    return Backends(tuple(dict.fromkeys(native)), torch)


def _cuda_backends(wanted: Sequence[str]) -> Backends:
    require_cuda("--device cuda")
    known = (*TORCH_VARIANTS, CUDA_VARIANT)
    for name in wanted:
        if name not in ("best", ALL, *known):
            raise ConfigError(f"--variant {name} runs on a CPU: with --device cuda choose {', '.join(known)}")
    library = library_in(cache_folder())
    if not library.is_file():
        if CUDA_VARIANT in wanted:
            raise ConfigError("--variant cuda: our CUDA kernels are not built: run paged build-cuda")
        return Backends((), TORCH_VARIANTS, ("our CUDA kernels are not built (run: paged build-cuda)",))
    return Backends((), known, library=library)


def _threads(options: KernelOptions) -> int:
    threads = compute_threads() if options.threads is None else options.threads
    if not 1 <= threads <= 1024:
        raise ConfigError(f"--threads is {threads}: choose 1 to 1024")
    return threads


# ---- head of the report


def _settings(options: KernelOptions, backends: Backends, threads: int) -> dict[str, Any]:
    return {
        "model": f"shapes of {options.shapes}",
        "device": options.device,
        "threads": threads,
        "variants": [*backends.native, *backends.torch],
        "seconds_each": options.seconds,
        "rounds": options.rounds,
    }


def _about(workers: Sequence[Worker]) -> dict[str, Any]:
    """Versions, and how cold the weights are."""
    cold = max(worker.cold_bytes for worker in workers)
    return {
        "measured": [worker.about for worker in workers],
        "weights": f"cold: copies of {show_bytes(cold)} take turns",
    }


def _limits(machine: MachineLimits) -> dict[str, Any]:
    limits: dict[str, Any] = {
        "read_bytes_per_s": machine.read_bytes_per_s,
        "measured_by": machine.measured_by,
    }
    if machine.rates is None:
        return {**limits, f"{machine.products}_flops_per_s": machine.flops_per_s}
    rates = machine.rates
    return {
        **limits,
        "float32_256_bit_flops_per_s": rates.f32_flops_per_s,
        "float32_512_bit_flops_per_s": rates.f32_wide_flops_per_s,
        "bfloat16_dot_flops_per_s": rates.bf16_dot_flops_per_s,
        "bfloat16_tile_flops_per_s": rates.bf16_tile_flops_per_s,
        "int8_dot_flops_per_s": rates.int8_dot_ops_per_s,
        "int8_tile_flops_per_s": rates.int8_tile_ops_per_s,
    }
