"""What `paged bench tune` does: a session, the search, the file, the report. May import everything below `cli`.

Exit codes: 0 done (also where the defaults are kept), 2 nothing was run, 130 interrupted (what was shown until then is
written).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedcli.bench.environment import LoadMeter, describe_machine, provenance
from pagedcli.bench.report.files import check_outputs
from pagedcli.bench.run import Run
from pagedcli.bench.session import Session
from pagedcli.bench.tune import AIMS, SETTINGS, Aim, Candidate, Figures, Tuned, Tuner, default_space
from pagedcli.bench.tuned_file import figures_text, render, verdict_text
from pagedcli.cli.bench_output import show_and_write
from pagedcli.cli.bench_progress import TimedProgress
from pagedcli.cli.config_note import machine_facts
from pagedcli.cli.console import Messages, make_messages
from pagedcli.config import EngineConfig, ServeConfig
from pagedcli.config_file import FOLDER_FILE, TUNED, Settings, Value, load_settings
from pagedcli.core.sampling import SamplingParams
from pagedcli.errors import ConfigError, PagedError
from pagedcli.runtime.threads import compute_threads
from pagedcli.workloads.parse import parse_workload, workload_name
from pagedcli.workloads.requests import WorkloadRequest

INTERRUPTED = 130
MOST_MINUTES = 7 * 24 * 60


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """Flags of `paged bench tune` that are no settings; see `bench_tune.tune`."""

    aim: str = "throughput"
    max_ttft_ms: float | None = None
    max_itl_ms: float | None = None
    workload: str | None = None
    requests: int | None = None
    seed: int | None = None
    minutes: float = 10.0
    output: str | None = None
    overwrite: bool = False
    json_file: str | None = None
    markdown_file: str | None = None
    html_file: str | None = None
    verbose: bool = False
    quiet: bool = False


def run_tune(
    options: TuneOptions, flags: Mapping[str, Value], *, assignments: Sequence[str], config_file: str | None
) -> int:
    """Run the command; its exit code.

    Raises:
        PagedError: Something is wrong with the flags, the model or the file.
    """
    aim = aim_of(options)
    if options.output == "":
        raise ConfigError("-o: the name of the file is empty: give one")
    output = Path(options.output or FOLDER_FILE)
    check_output(output, overwrite=options.overwrite)
    check_outputs(options.json_file, options.markdown_file, html=options.html_file)
    settings = load_settings(
        config_file=Path(config_file) if config_file is not None else None,
        assignments=assignments,
        flags=flags,
        extra_sections={"sampling": SamplingParams, "serve": ServeConfig},
        read_folder_file=False,  # the search begins with the defaults, not with what an earlier one found
    )
    messages = make_messages(verbose=options.verbose, quiet=options.quiet)
    with messages.phase("model ready"), messages.waiting("loading the model"):
        session = Session(settings.engine, on_phase=messages.detail, progress=messages.transfer)
    workload = parse_workload(
        workload_name(options.workload),
        vocab_size=session.spec.vocab_size,
        seed=options.seed or 0,
        num_requests=options.requests,
        encode=session.encode,
    )
    load = LoadMeter()
    load.begin()
    tuned = search(settings, session, workload, aim, options, messages)
    load.end()
    about = _about(settings.engine, options, aim)
    try:
        if tuned.is_interrupted and tuned.found == tuned.default:
            left = "is left as it was" if output.exists() else "is not written"
            messages.say(f"{output} {left}: interrupted before anything was shown to be better")
        else:
            _write(output, render(tuned, aim, about))
            messages.say(f"{output}: {verdict_text(tuned, aim)}")
    finally:
        show_and_write(report_dict(tuned, aim, about, session, workload, load), options)
    return INTERRUPTED if tuned.is_interrupted else 0


def aim_of(options: TuneOptions) -> Aim:
    """What is wanted.

    Raises:
        ConfigError: A flag is out of range.
    """
    if options.aim not in AIMS:
        raise ConfigError(f"--aim {options.aim}: choose {', '.join(AIMS)}")
    for name, value in (
        ("--max-ttft-ms", options.max_ttft_ms),
        ("--max-itl-ms", options.max_itl_ms),
        ("--minutes", options.minutes),
        ("--requests", options.requests),
    ):
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value:g}: it must be positive")
        if value == math.inf and name != "--minutes":
            raise ConfigError(f"{name} is inf, which limits nothing: leave it out")
    ttft, itl = (None if ms is None else ms / 1e3 for ms in (options.max_ttft_ms, options.max_itl_ms))
    if options.minutes > MOST_MINUTES:
        raise ConfigError(f"--minutes is {options.minutes:g}: give at most {MOST_MINUTES}, a week")
    return Aim(options.aim, ttft, itl)


def check_output(path: Path, *, overwrite: bool) -> None:
    """Before anything is measured: whether the file may be written.

    Raises:
        ConfigError: Its folder is missing, or it is somebody's own.
    """
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"-o {path}: there is no folder {path.parent}")
    if not path.exists():
        return
    if not path.is_file():
        raise ConfigError(f"-o {path} is no file: give the name of one")
    if overwrite:
        return
    try:
        is_ours = TUNED in tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        is_ours = False
    if not is_ours:
        raise ConfigError(
            f"{path} is there, and paged bench tune did not write it: give -o FILE, or --overwrite"
        )


def search(
    settings: Settings,
    session: Session,
    workload: Sequence[WorkloadRequest],
    aim: Aim,
    options: TuneOptions,
    messages: Messages,
) -> Tuned:
    """Find the best settings, with progress shown."""
    base = settings.engine
    resolved = session.resolve(base)
    default = Candidate(
        threads=resolved.threads,
        max_num_seqs=base.scheduler.max_num_seqs,
        max_num_batched_tokens=base.scheduler.max_num_batched_tokens,
        page_size=base.cache.page_size,
    )
    space = space_of(settings, default, requests=len(workload), device=session.choice.device)
    messages.say(
        f"searching {'; '.join(f'{name} {values}' for name, values in space.items())}, "
        f"beginning with {default}, aim {aim}"
    )
    with TimedProgress(messages, options.minutes * 60) as progress:

        def measure(candidate: Candidate) -> Figures:
            config = _on_device(candidate.config(base), base, is_cuda=session.choice.device == "cuda")
            figures = figures_of(session.run(config, workload))
            messages.detail(f"  {candidate}: {figures_text(figures)}")
            return figures

        tuner = Tuner(
            measure,
            aim,
            space,
            default,
            seconds=options.minutes * 60,
            clock=time.perf_counter,
            on_run=lambda why, candidate, part: progress.say(f"{why}: {candidate}"),
        )
        return tuner.run()


def _on_device(config: EngineConfig, base: EngineConfig, *, is_cuda: bool) -> EngineConfig:
    """A GPU has no compute threads to set."""
    return dataclasses.replace(config, device=base.device) if is_cuda else config


def space_of(
    settings: Settings, default: Candidate, *, requests: int, device: str = "cpu"
) -> dict[str, list[int]]:
    """What is searched: settings that the user has not given."""
    space = default_space(default, cores=compute_threads(), requests=requests)
    if device != "cpu":
        del space["threads"]
    fixed = {name for name, section in SETTINGS.items() if f"{section}.{name}" in settings.given}
    kept = {name: values for name, values in space.items() if name not in fixed and len(values) > 1}
    if not kept:
        raise ConfigError("every setting is given, so there is nothing to search: leave one of them out")
    return kept


def figures_of(run: Run) -> Figures:
    """Of one run.

    Raises:
        ConfigError: A request failed, for want of pages as a rule: such figures are no guide.
    """
    if run.failed:
        first = run.failed[0]
        raise ConfigError(
            f"{len(run.failed)} of {len(run.requests)} requests failed, such as {first.id}: {first.error}"
        )
    gaps = [gap for request in run.served for gap in request.itl_s]
    return Figures(
        tokens_per_s=run.output_tokens_per_s,
        ttft_s=_p90([request.ttft_s for request in run.served]),
        itl_s=_p90(gaps) if gaps else 0.0,
        e2e_s=statistics.median(request.e2e_s for request in run.served),
    )


def _p90(values: Sequence[float]) -> float:
    """The smallest value that nine in ten do not exceed."""
    return sorted(values)[-(-len(values) * 9 // 10) - 1]


def _about(config: EngineConfig, options: TuneOptions, aim: Aim) -> dict[str, Any]:
    """The table `[tuned]`."""
    return {
        **machine_facts(config),
        "workload": workload_name(options.workload),
        "requests": options.requests,
        "seed": options.seed or 0,
        "aim": str(aim),
        "minutes": options.minutes,
        "cpu": describe_machine()["cpu"],
        "date": provenance()["date"],
        "version": provenance()["version"],
    }


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise PagedError(f"{path}: cannot write: {error.strerror}") from None


def report_dict(
    tuned: Tuned,
    aim: Aim,
    about: Mapping[str, Any],
    session: Session,
    workload: Sequence[WorkloadRequest],
    load: LoadMeter,
) -> dict[str, Any]:
    """All of it: what `--json` writes."""
    final = None if tuned.final is None else tuned.final.as_dict()
    return {
        "kind": "tune",
        "settings": {"model": about["model"], "dtype": session.choice.dtype, "device": session.choice.device},
        "machine": describe_machine(),
        "workload": {
            "name": about["workload"],
            "requests": len(workload),
            "prompt_tokens": sum(len(item.prompt_token_ids) for item in workload),
            "output_tokens": sum(item.output_tokens for item in workload),
        },
        "aim": str(aim),
        "default": dataclasses.asdict(tuned.default),
        "found": dataclasses.asdict(tuned.found),
        "best": dataclasses.asdict(tuned.best),
        "final": final,
        "comparison": [[dataclasses.asdict(run) for run in runs] for runs in tuned.comparison],
        "verdict": verdict_text(tuned, aim),
        "trials": [
            {
                "candidate": dataclasses.asdict(trial.candidate),
                "runs": [dataclasses.asdict(run) for run in trial.figures],
                "worth": aim.worth(trial.median()) if trial.figures else None,
                "meets_limits": aim.meets(trial.median()) if trial.figures else None,
                "problem": trial.problem,
            }
            for trial in tuned.trials
        ],
        "is_interrupted": tuned.is_interrupted,
        "is_cut": tuned.is_cut,
        "untried": list(tuned.untried),
        "other_load": load.told(),
        **provenance(),
    }
