"""What `paged bench compare` does: models, experiments in turns, claims, reports. May import everything below `cli`.

Exit codes: 0 done, 1 an answer differed between two ways to run the same request (the reports are written), 2 nothing
was run, 3 requests failed, 130 interrupted (what was measured is written and said).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedcli.bench.compare import Results, report_dict, run_all
from pagedcli.bench.environment import LoadMeter, describe_machine, provenance
from pagedcli.bench.experiments import ORIGINAL, RESERVED_TOKENS, Arm, Experiment, Plan
from pagedcli.bench.machine import MachineLimits
from pagedcli.bench.report.files import check_outputs
from pagedcli.bench.report.head import model_name
from pagedcli.bench.scales import FULL, SHORT, Scale
from pagedcli.bench.session import Session
from pagedcli.cli.bench_compare_models import (
    METHODS,
    Given,
    Known,
    find_quantized,
    load_models,
    what_is_missing,
)
from pagedcli.cli.bench_live import BenchLive
from pagedcli.cli.bench_output import show_and_write
from pagedcli.cli.config_note import say_config
from pagedcli.cli.console import Messages, make_messages
from pagedcli.config import EngineConfig, ServeConfig
from pagedcli.config_file import Value, load_settings
from pagedcli.core.sampling import SamplingParams
from pagedcli.errors import ConfigError, PagedError

SOME_FAILED, INTERRUPTED = 3, 130
SET_BY_ARMS = (
    "cache.allocation",
    "cache.kv_memory_bytes",
    "cache.num_pages",
    "cache.page_size",
    "cache.prefix_caching",
    "scheduler.batching",
    "scheduler.max_num_seqs",
    "scheduler.policy",
)
"""Settings that are compared, or must be equal in what is."""


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Flags of `paged bench compare` that are no settings; see `bench_compare.compare`."""

    short: bool = False
    workload: str | None = None
    requests: int | None = None
    kv_tokens: int | None = None
    repeats: int | None = None
    seed: int = 0
    awq: str | None = None
    gptq: str | None = None
    quantize: str | None = None
    json_file: str | None = None
    markdown_file: str | None = None
    html_file: str | None = None
    verbose: bool = False
    quiet: bool = False
    no_config: bool = False


def run_compare(
    options: CompareOptions,
    flags: Mapping[str, Value],
    *,
    assignments: Sequence[str],
    config_file: str | None,
) -> int:
    """Run the command; its exit code.

    Raises:
        PagedError: Something is wrong with the flags or a model, or an answer differed.
    """
    check_outputs(options.json_file, options.markdown_file, html=options.html_file)
    scale_of(options, None)
    messages = make_messages(verbose=options.verbose, quiet=options.quiet)
    settings = load_settings(
        config_file=Path(config_file) if config_file is not None else None,
        assignments=assignments,
        flags=flags,
        # One paged.toml serves all commands: what is not for this one is known and left alone.
        extra_sections={"sampling": SamplingParams, "serve": ServeConfig},
        read_folder_file=not options.no_config,
    )
    say_config(settings, messages)
    say_what_arms_set(settings.given, messages)
    config = settings.engine
    scale = scale_of(options, config.model.max_model_len)
    known = find_quantized(
        Given(options.awq, options.gptq, options.quantize, options.short), config, messages
    )
    data, results = _measure(options, config, scale, known, messages)
    show_and_write(data, options)
    return _code(results, messages)


def say_what_arms_set(given: Mapping[str, Value], messages: Messages) -> None:
    """A line for settings of a file that count for nothing here.

    Raises:
        ConfigError: One was given on the command line.
    """
    found = {key: given[key].source for key in SET_BY_ARMS if key in given}
    for key, source in found.items():
        if source.startswith("--"):
            raise ConfigError(f"{source}: the comparison sets {key} itself: leave it out")
    if found:
        messages.say(
            f"{', '.join(sorted(set(found.values())))}: the comparison sets {', '.join(found)} itself: "
            "these are not used"
        )


def _measure(
    options: CompareOptions, config: EngineConfig, scale: Scale, known: Known, messages: Messages
) -> tuple[dict[str, Any], Results]:
    """Load everything, run everything, judge it."""
    sessions, models = load_models(config, known.folders, messages)
    original = sessions[ORIGINAL]
    plan = Plan(
        scale,
        options.seed,
        original.spec.vocab_size,
        original.spec.max_position,
        tuple(models),
        original.encode,
    )
    missing = what_is_missing(known, original)
    if plan.longest < RESERVED_TOKENS:
        missing["reserved"] = f"the model's longest sequence is {plan.longest:,} tokens"
    experiments = [item for item in plan.experiments() if item.name not in missing]
    start, load = time.perf_counter(), LoadMeter()
    with BenchLive(_title(original), messages) as live:
        results = run_all(models, experiments, on_turn=_Turns(messages, live, start), watch=live)
    load.end()
    if not results.runs:
        raise KeyboardInterrupt
    figures = report_dict(results, experiments, known.facts, missing)
    return {**figures, **_about(config, original, options, time.perf_counter() - start, load)}, results


def scale_of(options: CompareOptions, longest: int | None) -> Scale:
    """How much is run; `longest` is what contiguous allocation reserves, None: as the scale says.

    Raises:
        ConfigError: A number is out of range.
    """
    scale = SHORT if options.short else FULL
    for name, value in (
        ("--requests", options.requests), ("--kv-tokens", options.kv_tokens), ("--repeats", options.repeats)
    ):  # fmt: skip
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}: it must be at least 1")
    given: dict[str, Any] = {
        "workload": options.workload,
        "requests": options.requests,
        "pool_tokens": options.kv_tokens,
        "longest": longest,
        "rounds": options.repeats,
        "many_rounds": options.repeats,
    }
    return dataclasses.replace(scale, **{name: value for name, value in given.items() if value is not None})


def _title(session: Session) -> str:
    choice = session.choice
    return f"{model_name(session.config.model.model)} · {choice.dtype} · {choice.device} · comparison"


class _Turns:
    """Says what is run now: in the live display, and in a line when the experiment changes."""

    def __init__(self, messages: Messages, live: BenchLive, start: float) -> None:
        self._messages, self._live, self._start, self._shown = messages, live, start, ""

    def __call__(self, experiment: Experiment, arm: Arm, number: int, total: int) -> None:
        if experiment.name != self._shown:
            self._shown = experiment.name
            seconds = time.perf_counter() - self._start
            self._messages.say(f"{seconds:5.0f} s, run {number} of {total}: {experiment.title.lower()}")
        self._live.set_phase(
            f"{experiment.title}: {arm.name}", f"{experiment.name}/{arm.name}", f"run {number} of {total}"
        )


def _about(
    config: EngineConfig, session: Session, options: CompareOptions, seconds: float, load: LoadMeter
) -> dict[str, Any]:
    """Head of the report."""
    choice = session.choice
    return {
        "settings": {
            "model": model_name(config.model.model),
            "dtype": choice.dtype,
            "quantization": choice.quantization,
            "activation": choice.activation,
            "device": choice.device,
            "backend": choice.backend,
            "threads": choice.threads,
            "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
            "seed": options.seed,
            "short": options.short,
        },
        "machine": describe_machine(),
        "limits": {} if options.short else _limits(session.machine),
        **provenance(),
        "command": _command(options, config),  # without folders of this machine
        "seconds": seconds,
        "other_load": load.told(),
    }


def _limits(machine: MachineLimits) -> dict[str, Any]:
    return {
        "read_bytes_per_s": machine.read_bytes_per_s,
        f"{machine.products}_products_flops_per_s": machine.flops_per_s,
    }


def _command(options: CompareOptions, config: EngineConfig) -> str:
    """As somebody else would type it; folders by their last name."""
    words = ["paged bench compare"]
    if config.model.model is not None:
        words += ["-m", Path(config.model.model).name]
    words += ["--dtype", config.model.dtype] if config.model.dtype != "auto" else []
    words += ["--threads", str(config.device.threads)] if config.device.threads is not None else []
    words += ["--short"] if options.short else []
    for item in ("workload", "requests", "kv_tokens", "repeats"):
        value = getattr(options, item)
        words += [] if value is None else [f"--{item.replace('_', '-')}", str(value)]
    for item in METHODS:
        words += [] if getattr(options, item) is None else [f"--{item}", Path(getattr(options, item)).name]
    words += [] if options.quantize is None else ["--quantize", Path(options.quantize).name]
    return " ".join(words)


def _code(results: Results, messages: Messages) -> int:
    for text in results.failed[:5]:
        messages.say(f"failed: {text}")
    if results.differing:
        raise PagedError(
            f"{len(results.differing)} answers differ from the first one to the same request, such as "
            f"{results.differing[0]}: the schedule has changed an answer"
        )
    if results.is_interrupted:
        messages.say(
            f"interrupted: these are the figures of {results.num_runs} whole runs; "
            f"{results.turns} were to be made"
        )
        return INTERRUPTED
    return SOME_FAILED if results.failed else 0
