"""What `paged bench serve` does: find the server, make the requests, measure, report. May import all below `cli`."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagedcli.bench.environment import describe_machine, provenance
from pagedcli.bench.goodput import Targets
from pagedcli.bench.http_bench import Bench
from pagedcli.bench.http_drive import LoadState
from pagedcli.bench.http_prompts import Asking, PromptForm
from pagedcli.bench.http_report import LoadRun
from pagedcli.bench.http_server import UnreachableError, discover
from pagedcli.bench.http_target import parse_target
from pagedcli.bench.latency import run_seconds
from pagedcli.bench.load import Client
from pagedcli.bench.report.files import check_outputs
from pagedcli.bench.saturation import KEEPS_UP, Saturation, Trial, find_saturation, kept_share
from pagedcli.cli.bench_output import show_and_write
from pagedcli.cli.bench_serve_display import LoadDisplay
from pagedcli.cli.console import Messages, make_messages
from pagedcli.errors import ConfigError
from pagedcli.workloads.arrivals import Arrivals
from pagedcli.workloads.files import save_workload
from pagedcli.workloads.parse import KINDS, parse_workload
from pagedcli.workloads.requests import WorkloadRequest, at, most_turns, num_arriving

FAILED, INTERRUPTED = 3, 130
DEFAULT_CONCURRENCY = 8
SHARE, TOLERANCE, SECONDS = 0.9, 0.1, 20.0
"""Of the search, where nothing else is given."""
FEWEST = 16
"""Requests of a trial of the search, at least."""
_FIRST_SHARE = 40
_OTHER_SEED = 7919
"""Added to the workload's seed for the warm-up."""
_SPARSE = 0.1
"""Part of the rate of one request after the other below which requests hardly ever meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Flags of `paged bench serve`; see `bench_serve.serve_load`."""

    url: str
    workload: str = "mixed"
    requests: int | None = None
    seed: int = 0
    chat: bool = False
    prompt_text: bool = False
    vocab_size: int = 30_000
    length_scale: float = 1.0
    body: Sequence[str] = ()
    save_workload: str | None = None
    concurrency: int | None = None
    rate: float | None = None
    arrival: str | None = None
    time_scale: float = 1.0
    goodput: str | None = None
    saturation: bool = False
    share: float = SHARE
    tolerance: float = TOLERANCE
    seconds: float = SECONDS
    model: str | None = None
    api_key_file: str | None = None
    warm_up: int = 2
    timeout: float = 600.0
    json_file: str | None = None
    markdown_file: str | None = None
    html_file: str | None = None
    verbose: bool = False
    quiet: bool = False


def run_serve_load(options: LoadOptions) -> int:
    """Run the command; its exit code."""
    check(options)
    check_outputs(options.json_file, options.markdown_file, options.save_workload, html=options.html_file)
    messages = make_messages(verbose=options.verbose, quiet=options.quiet)
    run = _Command(options, messages)
    if options.saturation:
        return run.search()
    return run.measure()


def check(options: LoadOptions) -> None:
    """Refuse what contradicts itself.

    Raises:
        ConfigError: Names the flag.
    """
    least: Mapping[str, tuple[float | None, float]] = {
        "--requests": (options.requests, 1),
        "--concurrency": (options.concurrency, 1),
        "--vocab-size": (options.vocab_size, 2),
        "--warm-up": (options.warm_up, 1),
    }
    for flag, (value, smallest) in least.items():
        if value is not None and value < smallest:
            raise ConfigError(f"{flag} {value:g}: give {smallest:g} or more")
    positive = {
        "--length-scale": options.length_scale,
        "--time-scale": options.time_scale,
        "--timeout": options.timeout,
        "--seconds": options.seconds,
        "--tolerance": options.tolerance,
        "--share": options.share,
    }
    for flag, value in positive.items():
        if not 0 < value < 1e9:
            raise ConfigError(f"{flag} {value:g}: give a number over 0")
    if options.share > 1:
        raise ConfigError(f"--share {options.share:g}: give a part of all, such as 0.9")
    _refuse_unused(options)
    if options.concurrency is not None and (options.rate is not None or options.saturation):
        raise ConfigError("--concurrency is a closed loop: leave it out with --rate or --saturation")
    if options.arrival is not None and options.rate is None and not options.saturation:
        raise ConfigError("--arrival needs --rate, the requests per second")
    if options.saturation and (options.arrival or "").startswith("ramp"):
        raise ConfigError("--saturation tries one rate after the other: leave out --arrival ramp")


def _refuse_unused(options: LoadOptions) -> None:
    """Flags that nothing would read."""
    if not options.saturation:
        of_search = ("--share", options.share, SHARE), ("--tolerance", options.tolerance, TOLERANCE)
        for flag, value, usual in (*of_search, ("--seconds", options.seconds, SECONDS)):
            if value != usual:
                raise ConfigError(f"{flag} is for the search: give --saturation, or leave it out")
    if options.share != SHARE and options.goodput is None:
        raise ConfigError("--share is of requests that meet targets: give --goodput, or leave it out")
    paced = options.concurrency is not None or options.rate is not None or options.saturation
    if options.time_scale != 1 and paced:
        raise ConfigError(
            "--time-scale is for arrivals as a trace says: leave --concurrency, --rate and --saturation out"
        )


def read_key(file: str | None) -> str | None:
    """The API key: of the file, or of PAGED_API_KEY.

    Raises:
        ConfigError: There is no such file, or no key in it.
    """
    if file is None:
        return os.environ.get("PAGED_API_KEY", "").strip() or None
    try:
        lines = Path(file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {file}: cannot be read: {error}") from error
    if not lines or not lines[0].isascii() or not lines[0].isprintable():
        raise ConfigError(f"--api-key-file {file}: holds no key")
    return lines[0]


def parse_body(fields: Sequence[str]) -> dict[str, Any]:
    """From FIELD=JSON; what is no JSON is text.

    Raises:
        ConfigError: There is no field.
    """
    found: dict[str, Any] = {}
    for text in fields:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ConfigError(
                f"--body {text!r}: give FIELD=VALUE, such as temperature=0.7 or ignore_eos=null"
            )
        if name in ("prompt", "messages", "stream", "max_tokens", "n"):
            raise ConfigError(f"--body {name}: the workload sets it")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


class _NoAnswerError(Exception):
    """A rate of which no request was served: the server is gone, or answers none, at whatever rate."""


class _Command:
    """One run of the command."""

    def __init__(self, options: LoadOptions, messages: Messages) -> None:
        self.options = options
        self.messages = messages
        self.targets = Targets.parse(options.goodput) if options.goodput else None
        with messages.waiting("making the requests"):
            self.first = self.workload(options.seed, options.requests)
        if options.time_scale != 1 and not any(request.arrival_s for request in self.first):
            raise ConfigError(
                f"--time-scale: all requests of workload {options.workload!r} come at once: leave it out"
            )
        more = parse_body(options.body)
        if options.arrival is not None or options.rate is not None:
            self.arrivals(
                1.0 if options.rate is None else options.rate
            )  # before anything is measured: whether they can be made
        api = parse_target(options.url, read_key(options.api_key_file))
        self.info = discover(api, options.model)
        api = replace(api, address=self.info.address)
        form = self.form()
        display = LoadDisplay(messages, f"{self.info.model} at {self.info.url}", self.targets)
        self.display = display
        self.bench = Bench(
            api,
            Asking(form, self.info.model, more),
            self.settings(form),
            {"url": self.info.url, "model": self.info.model, "software": self.info.software},
            {"role": "client", **describe_machine()},
            Client(options.timeout),
            self.targets,
            display.watch,
        )

    def workload(self, seed: int, num: int | None, *, name: str | None = None) -> list[WorkloadRequest]:
        """The requests; other seeds give others, where they are drawn."""
        options = self.options
        return parse_workload(
            name or options.workload,
            vocab_size=options.vocab_size,
            first_token=options.vocab_size // _FIRST_SHARE,
            seed=seed,
            num_requests=num,
            text_only=True,
            length_scale=options.length_scale if name is None else 1.0,
            time_scale=options.time_scale,
        )

    def form(self) -> PromptForm:
        """How prompts are sent; token ids where nothing forbids it."""
        if self.options.chat:
            return PromptForm.CHAT
        if self.options.prompt_text:
            return PromptForm.TEXT
        if any(request.follows is not None for request in self.first):
            self.messages.say("Prompts go as text: later turns carry the answers, which come as text.")
            return PromptForm.TEXT
        if not all(request.prompt_token_ids for request in self.first):
            self.messages.say("Prompts go as text, as the workload has them.")
            return PromptForm.TEXT
        return PromptForm.IDS

    def settings(self, form: PromptForm) -> dict[str, Any]:
        """What was asked, for the file."""
        options = self.options
        return {
            "model": self.info.model,
            "workload": options.workload,
            "seed": options.seed,
            "prompts": form.value,
            "length_scale": options.length_scale if options.length_scale != 1 else None,
            "timeout_s": options.timeout,
            "warm_up_requests": options.warm_up,
        }

    def arrivals(self, rate: float) -> Arrivals:
        """The pattern at a rate."""
        return Arrivals.parse(self.options.arrival or "poisson", rate=rate, seed=self.options.seed)

    def warm_up(self, num: int) -> float | None:
        """Send requests that nobody measures; the median latency of a server with nothing else to do, if it answers."""
        requests = self.workload(self.options.seed + _OTHER_SEED, num)
        if requests[0].prompt_token_ids == self.first[0].prompt_token_ids and not self.options.saturation:
            # A file has the same prompts whatever the seed: a prefix cache must not know them.
            requests = self.workload(self.options.seed + _OTHER_SEED, num, name="random:16-64:8-16")
        requests = [replace(request, follows=None, new_tokens=0) for request in requests]
        with self.messages.waiting("warming up"):
            answers = self.bench.warm_up(requests)
        failures = [answer.error for answer in answers if answer.error is not None]
        if failures:
            self.messages.say(f"{len(failures)} of {num} requests of the warm-up failed: {failures[0]}")
        served = [answer.e2e_s for answer in answers if answer.is_served]
        return statistics.median(served) if served else None

    def measure(self) -> int:
        """One run and its reports."""
        options, requests = self.options, self.first
        described: dict[str, Any]
        concurrency: int | None = None
        if options.rate is not None:
            arrivals = self.arrivals(options.rate)
            requests, described = at(requests, arrivals.times(num_arriving(requests))), arrivals.as_dict()
        elif options.concurrency is None and any(request.arrival_s for request in requests):
            described = {"kind": "trace", "time_scale": options.time_scale}
        else:
            concurrency = options.concurrency or DEFAULT_CONCURRENCY
            described = {"kind": "closed loop", "concurrency": concurrency}
        if options.save_workload is not None:
            save_workload(Path(options.save_workload), requests)
        self.warm_up(options.warm_up)
        self.display.asked_per_s = options.rate
        self.display.last_due_s = (
            max(request.arrival_s for request in requests) if concurrency is None else None
        )
        run = self.bench.run(requests, described, concurrency=concurrency)
        return self.report(run.as_dict())

    def search(self) -> int:
        """The saturation point and its reports."""
        num = max(3, self.options.warm_up)
        unloaded = self.warm_up(num)
        if unloaded is None:
            raise UnreachableError(
                f"none of the {num} requests of the warm-up was answered: a search has no first rate"
            )
        runs: list[LoadRun] = []
        trials: list[Trial] = []

        def measure(rate: float) -> Trial:
            run, trial = self.trial(rate, len(runs), unloaded)
            runs.append(run)
            if run.is_interrupted:
                raise KeyboardInterrupt
            if not any(answer.is_served for answer in run.state.answers):
                raise _NoAnswerError
            trials.append(trial)
            word = "kept up" if trial.is_kept else "not kept up"
            self.messages.say(f"{rate:.3g} requests/s: {word} ({trial.share:.0%})")
            return trial

        alone = 1 / max(unloaded, 1e-3)
        first = self.options.rate or alone
        try:
            find_saturation(measure, first, tolerance=self.options.tolerance, least_rate=_SPARSE * alone)
        except KeyboardInterrupt:
            if not runs:
                raise
            return self.report(self.found(runs, trials) | {"interrupted": True})
        except _NoAnswerError:
            failed = next(iter(runs[-1].as_dict()["errors"]), "no answer")
            self.messages.say(f"nothing was answered at the last rate, so the search ends: {failed}")
            return self.report(self.found(runs, trials)) or FAILED
        return self.report(self.found(runs, trials))

    def found(self, runs: Sequence[LoadRun], trials: Sequence[Trial]) -> dict[str, Any]:
        """The run at the largest rate that was kept, with every trial; of a search without any the last run."""
        if not trials:
            return runs[-1].as_dict()
        best = max(
            (run for run, trial in zip(runs, trials, strict=False) if trial.is_kept),
            key=lambda run: float(run.arrivals["requests_per_s"]),
            default=runs[len(trials) - 1],
        )
        known = Saturation.of(trials, self.options.tolerance)
        return best.as_dict() | {"saturation": self.saturation(known)}

    def trial(self, rate: float, number: int, unloaded_s: float) -> tuple[LoadRun, Trial]:
        """One rate of the search, with requests that no earlier one has asked."""
        options = self.options
        count = options.requests or max(FEWEST, round(rate * options.seconds))
        requests = self.workload(options.seed + 1009 * (number + 1), count)
        arrivals = self.arrivals(rate)
        times = arrivals.times(num_arriving(requests))
        self.display.last_due_s, self.display.asked_per_s = times[-1], rate
        run = self.bench.run(at(requests, times), arrivals.as_dict(), concurrency=None)
        alone_s = unloaded_s * most_turns(requests)
        share, wanted = self._share(run.state, times[-1] - times[0], alone_s)
        figures = run.as_dict()
        kept = {
            name: figures[name] for name in ("requests", "failed", "throughput", "ttft_s", "tpot_s", "e2e_s")
        }
        return run, Trial(rate, share >= wanted, share, kept)

    def _share(self, state: LoadState, span_s: float, unloaded_s: float) -> tuple[float, float]:
        answers = state.answers
        if self.targets is not None:
            return sum(map(self.targets.are_met, answers)) / max(1, state.total), self.options.share
        served = sum(answer.is_served for answer in answers) / max(1, state.total)
        return served * kept_share(span_s, run_seconds(answers), unloaded_s), KEEPS_UP

    def saturation(self, found: Saturation) -> dict[str, Any]:
        """For the file, with what was wanted."""
        criterion = (
            f"{self.options.share:.0%} of requests within the targets"
            if self.targets is not None
            else f"answered at {KEEPS_UP:.0%} of the rate of arrival"
        )
        same = self.options.workload.partition(":")[0] not in KINDS
        note = "the same prompts at every rate: a prefix cache may have served them" if same else None
        return found.as_dict() | {"criterion": criterion, "seconds": self.options.seconds, "note": note}

    def report(self, figures: dict[str, Any]) -> int:
        """Show and write it."""
        options = self.options
        show_and_write(provenance() | figures, options)
        if figures["interrupted"]:
            return INTERRUPTED
        return FAILED if figures["failed"] else 0
