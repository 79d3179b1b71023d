"""What `paged bench` does without a subcommand: measure offline, once or in a sweep. May import all below `cli`.

Exit codes: 0 done, 2 nothing was run, 3 some requests failed, 130 interrupted (what was measured is written and said).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedcli.bench.environment import describe_machine, provenance
from pagedcli.bench.report.files import check_outputs
from pagedcli.bench.results import Measured, as_dict
from pagedcli.bench.run import Run
from pagedcli.bench.session import Session
from pagedcli.bench.statistics import paired_ratio, verdict
from pagedcli.bench.sweep import Limits, Results, Setting, Sweep
from pagedcli.bench.work import RunWork
from pagedcli.cli.bench import SWEPT
from pagedcli.cli.bench_live import BenchLive, spread
from pagedcli.cli.bench_output import show_and_write
from pagedcli.cli.config_note import say_config
from pagedcli.cli.console import Messages, make_messages
from pagedcli.config import EngineConfig, ServeConfig
from pagedcli.config_file import Settings, Value, load_settings
from pagedcli.core.sampling import SamplingParams
from pagedcli.errors import ConfigError
from pagedcli.workloads.parse import parse_workload, workload_name
from pagedcli.workloads.requests import WorkloadRequest

SOME_FAILED = 3
INTERRUPTED = 130
MOST_ERRORS = 5
"""Different ones that are said."""
_NUMBERS = frozenset(SWEPT) - {"cache.kv_memory_bytes", "scheduler.policy"}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Flags of `paged bench` that are no settings; see `bench.bench`."""

    workload: str | None = None
    requests: int | None = None
    repeats: int | None = None
    seconds: float | None = None
    seed: int | None = None
    json_file: str | None = None
    markdown_file: str | None = None
    html_file: str | None = None
    verbose: bool = False
    quiet: bool = False
    no_config: bool = False


def run_bench(
    options: BenchOptions,
    flags: Mapping[str, Value],
    *,
    assignments: Sequence[str],
    config_file: str | None,
) -> int:
    """Run the command; its exit code."""
    _check(options)
    read = not options.no_config
    loaded = [
        (values, _load(given, assignments, config_file, read_folder_file=read))
        for values, given in combinations(flags)
    ]
    settings = [Setting(values, found.engine) for values, found in loaded]
    messages = make_messages(verbose=options.verbose, quiet=options.quiet)
    say_config(loaded[0][1], messages)
    session = _open(settings[0].config, messages)
    workload = make_workload(options, session)
    for setting in settings:
        for note in session.resolve(setting.config).notes:
            messages.say(note)
    with messages.waiting("measuring the machine's limits"):
        for setting in settings:
            session.machine_with(session.resolve(setting.config).threads)
    limits = Limits.of(options.repeats, options.seconds, len(settings))
    sweep = Sweep(session, settings, workload, limits)
    results = _measure(sweep, session, messages)
    return _report(options, sweep, session, results, messages)


def _check(options: BenchOptions) -> None:
    for name, value in (
        ("--requests", options.requests), ("--repeats", options.repeats), ("--seconds", options.seconds)
    ):  # fmt: skip
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value:g}: it must be positive")
    if options.seconds == math.inf:
        raise ConfigError("--seconds is inf: give a number; --repeats N runs as often as you like")
    check_outputs(options.json_file, options.markdown_file, html=options.html_file)


def combinations(flags: Mapping[str, Value]) -> Iterator[tuple[dict[str, object], dict[str, Value]]]:
    """Every combination of the values that flags list: what was swept, and the flags with one value each.

    Raises:
        ConfigError: A list has an empty item, one twice, or text where numbers are wanted; names the flag.
    """
    lists = {key: _items(key, flags[key]) for key in SWEPT if key in flags}
    swept = [key for key, values in lists.items() if len(values) > 1]
    for chosen in itertools.product(*lists.values()):
        values = dict(zip(lists, chosen, strict=True))
        given = {key: Value(value, flags[key].source) for key, value in values.items()}
        yield {key: values[key] for key in swept}, {**flags, **given}


def _items(key: str, value: Value) -> list[object]:
    texts = [text.strip() for text in str(value.value).split(",")]
    shown = f"{value.source} {value.value}"
    if "" in texts:
        raise ConfigError(f"{shown}: a value is missing beside a comma")
    repeated = [text for text in texts if texts.count(text) > 1]
    if repeated:
        raise ConfigError(f"{shown}: {repeated[0]} is there twice")
    if key not in _NUMBERS:
        return list(texts)
    for text in texts:
        if not text.isascii() or not text.isdigit():
            raise ConfigError(f"{shown}: {text!r} is no whole number: give one, or several joined by commas")
    return [int(text) for text in texts]


def _load(
    flags: Mapping[str, Value], assignments: Sequence[str], config_file: str | None, *, read_folder_file: bool
) -> Settings:
    return load_settings(
        config_file=Path(config_file) if config_file is not None else None,
        assignments=assignments,
        flags=flags,
        # One paged.toml serves all commands: what is not for this one is known and left alone.
        extra_sections={"sampling": SamplingParams, "serve": ServeConfig},
        read_folder_file=read_folder_file,
    )


def _open(config: EngineConfig, messages: Messages) -> Session:
    with messages.phase("model ready"), messages.waiting("loading the model"):
        return Session(config, on_phase=messages.detail, progress=messages.transfer)


def make_workload(options: BenchOptions, session: Session) -> list[WorkloadRequest]:
    """The requests that the flags name."""
    return parse_workload(
        workload_name(options.workload),
        vocab_size=session.spec.vocab_size,
        seed=options.seed or 0,
        num_requests=options.requests,
        encode=session.encode,
    )


def _measure(sweep: Sweep, session: Session, messages: Messages) -> Results:
    """Run everything under the live display; a line for each run."""
    choice = session.choice
    name = session.config.model.model or "SmolLM2-135M-Instruct"
    requests, tokens = len(sweep.workload), sum(item.output_tokens for item in sweep.workload)
    title = f"{name} · {choice.dtype} · {choice.device} · {requests:,} requests, {tokens:,} output tokens"
    many = len(sweep.settings)
    started = sweep.clock()
    seconds: list[float] = []
    with BenchLive(title, messages) as live:

        def before(setting: Setting, number: int) -> None:
            place = f", run {len(seconds) % many + 1} of {many}: {setting}" if many > 1 else ""
            left = _left(sweep, seconds, sweep.clock() - started)
            live.set_phase(f"round {number}{place}", str(setting), left)

        def after(setting: Setting, number: int, run: Run) -> None:
            seconds.append(run.seconds)
            messages.say(run_line(setting, number, run))

        return sweep.run(watch=live, before=before, after=after)


def _left(sweep: Sweep, seconds: Sequence[float], elapsed: float) -> str:
    """How long all rounds will take, as far as it is known."""
    from pagedcli.cli.display import duration

    limits, many = sweep.limits, len(sweep.settings)
    if limits.rounds is not None and seconds:
        runs = limits.rounds * many - len(seconds)
        return f"all rounds: ETA {duration(runs * sum(seconds) / len(seconds))}"
    if limits.rounds is None and limits.seconds is not None:
        return f"until tight, {duration(max(0.0, limits.seconds - elapsed))} left at most"
    return ""


def run_line(setting: Setting, number: int, run: Run) -> str:
    """What one run came to, in a line."""
    served = run.served
    name = f"round {number}" + (f", {setting}" if setting.values else "")
    failed = f", {len(run.failed)} failed" if run.failed else ""
    latency = f", TTFT {spread([item.ttft_s for item in served])}" if served else ""
    preemptions = f", {run.counters.preemptions} preemptions" if run.counters.preemptions else ""
    use = f", KV use {run.kv_use():.1%}" if run.holds_kv else ""
    rate = f"{run.output_tokens_per_s:,.1f} output tokens/s"
    return f"{name}: {rate}{latency}{use}{preemptions}{failed}, {run.seconds:.1f} s"


def _report(
    options: BenchOptions, sweep: Sweep, session: Session, results: Results, messages: Messages
) -> int:
    """Write and show what was measured; the exit code."""
    about = {
        "machine": describe_machine(),
        "workload": describe_workload(options, sweep.workload),
        "other_load": sweep.load.told(),
        "stopped": f"{results.why}; the warm-up before them is left out",
        **provenance(),
    }
    runs = [
        as_dict(_measured(setting, session, rounds), swept=_names(setting), **about)
        for setting, rounds in zip(sweep.settings, results.runs, strict=True)
        if rounds
    ]
    if not runs:
        raise KeyboardInterrupt
    if len(runs) == len(sweep.settings):
        add_comparisons(runs, results)
    _say_end(results, runs, messages)
    show_and_write(runs if len(sweep.settings) > 1 else runs[0], options)
    if results.is_interrupted:
        return INTERRUPTED
    return SOME_FAILED if any(run["failed"] for run in runs) else 0


def _names(setting: Setting) -> list[str]:
    """Names of the settings that were swept: others may differ because of them (pages, if their size does)."""
    names = (key.rpartition(".")[2] for key in setting.values)
    return ["kv_bytes" if name == "kv_memory_bytes" else name for name in names]


def add_comparisons(runs: Sequence[dict[str, Any]], results: Results) -> None:
    """To all but the first setting of a sweep: its rate against the first one's, in pairs of the same round."""
    first = results.rates(0)
    for place, run in enumerate(runs[1:], start=1):
        pairs = [
            (rate, base) for rate, base in zip(results.rates(place), first, strict=False) if rate and base
        ]
        if pairs:
            ratio = paired_ratio([rate for rate, _ in pairs], [base for _, base in pairs])
            told = verdict(ratio, more="faster", less="slower")
            run["against_first"] = {**ratio.as_dict(), "verdict": told}


def _measured(setting: Setting, session: Session, rounds: Sequence[Run]) -> Measured:
    resolved = session.resolve(setting.config)
    work = RunWork.of(session.spec, resolved.dtype, session.weight_bytes)
    return Measured(setting.config, resolved, rounds, session.machine_with(resolved.threads), work)


def describe_workload(options: BenchOptions, workload: Sequence[WorkloadRequest]) -> dict[str, Any]:
    """What was asked, for the head of a report."""
    return {
        "name": workload_name(options.workload),
        "seed": options.seed or 0,
        "requests": len(workload),
        "prompt_tokens": sum(len(item.prompt_token_ids) for item in workload),
        "output_tokens": sum(item.output_tokens for item in workload),
        "last_arrival_s": max(item.arrival_s for item in workload),
    }


def _say_end(results: Results, runs: Sequence[Mapping[str, Any]], messages: Messages) -> None:
    if results.is_interrupted:
        whole = sum(1 for rounds in results.runs for run in rounds if not run.is_interrupted)
        messages.say(
            f"interrupted: these are the figures of {whole} whole runs"
            if whole
            else "interrupted in the first round: these are the figures of what was answered until then"
        )
    errors = {line: count for run in runs for line, count in run["errors"].items()}
    for line, count in list(errors.items())[:MOST_ERRORS]:
        messages.say(f"{count} {'request' if count == 1 else 'requests'} failed: {line}")
    if len(errors) > MOST_ERRORS:
        messages.say(
            f"and {sum(list(errors.values())[MOST_ERRORS:])} for other reasons, which --json FILE has"
        )
