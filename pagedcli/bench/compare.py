"""`paged bench compare`: the experiments run in turns, their figures, the claims, and all of it as one dictionary.

May import all of `bench`. Rounds go over the arms forwards and backwards in turn, so that a drift of the machine meets
all of them. Answers are compared: whatever runs a request on the same weights must give the same token ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagedcli.bench.claims import Measurements, as_dict
from pagedcli.bench.claims_list import CLAIMS
from pagedcli.bench.compare_figures import figures_of, medians, row_of
from pagedcli.bench.experiments import Arm, Experiment
from pagedcli.bench.run import Run, Watch
from pagedcli.bench.statistics import paired_ratio
from pagedcli.config import EngineConfig
from pagedcli.workloads.requests import WorkloadRequest

NOT_GIVEN = {
    name: f"no {name.upper()} checkpoint: give --{name} DIR, or --quantize DIR" for name in ("awq", "gptq")
}


class RunsWorkloads(Protocol):
    """What is asked of a session."""

    def run(
        self, config: EngineConfig, workload: Sequence[WorkloadRequest], *, watch: Watch | None = None
    ) -> Run:
        """See `session.Session.run`."""


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint that is loaded: what runs it and its settings."""

    session: RunsWorkloads
    config: EngineConfig


@dataclass(slots=True)
class Results:
    """What was run so far.

    Attributes:
        runs: By experiment and arm, a run for each round.
        ids: The token ids of each request on each model, when it was first answered.
        differing: Requests that were answered otherwise another time.
        failed: Errors by experiment, arm and request.
        turns: How many runs were to be made.
        is_interrupted: Whether Ctrl-C ended it before all of them were.
    """

    runs: dict[tuple[str, str], list[Run]] = field(default_factory=dict)
    ids: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    turns: int = 0
    is_interrupted: bool = False

    @property
    def num_runs(self) -> int:
        """How many were made."""
        return sum(map(len, self.runs.values()))

    def take(self, experiment: Experiment, arm: Arm, run: Run) -> None:
        """One more run of an arm."""
        self.runs.setdefault((experiment.name, arm.name), []).append(run)
        for request in run.requests:
            where = f"{experiment.name}/{arm.name}: {request.id}"
            if not request.is_served:
                self.failed.append(f"{where}: {request.error or 'not answered'}")
            elif self.ids.setdefault((arm.model, request.id), request.token_ids) != request.token_ids:
                self.differing.append(where)


OnTurn = Callable[[Experiment, Arm, int, int], None]
"""Told before each run: what it is, the number of this run, and of how many."""


def run_all(
    models: Mapping[str, Model],
    experiments: Sequence[Experiment],
    *,
    on_turn: OnTurn = lambda experiment, arm, number, total: None,
    watch: Watch | None = None,
) -> Results:
    """Run everything, an experiment after the other; Ctrl-C ends it with the whole runs that there are.

    Raises:
        ConfigError: An arm's settings cannot be met.
    """
    results = Results()
    turns = [
        (experiment, arm)
        for experiment in experiments
        for number in range(experiment.rounds)
        for arm in (experiment.arms if number % 2 == 0 else experiment.arms[::-1])
    ]
    results.turns = len(turns)
    try:
        for number, (experiment, arm) in enumerate(turns, start=1):
            on_turn(experiment, arm, number, len(turns))
            model = models[arm.model]
            run = model.session.run(arm.configure(model.config), arm.workload, watch=watch)
            results.take(experiment, arm, run)
    except KeyboardInterrupt:
        results.is_interrupted = True
    return results


def what_was_run(results: Results, experiments: Sequence[Experiment]) -> list[Experiment]:
    """The experiments with the arms that were run; takes away the runs of rounds that other arms do not have."""
    kept = []
    for experiment in experiments:
        arms = tuple(arm for arm in experiment.arms if results.runs.get((experiment.name, arm.name)))
        rounds = min((len(results.runs[(experiment.name, arm.name)]) for arm in arms), default=0)
        for arm in arms:
            del results.runs[(experiment.name, arm.name)][rounds:]
        if arms:
            kept.append(dataclasses.replace(experiment, arms=arms))
    return kept


def measurements(results: Results, facts: Mapping[str, float], missing: Mapping[str, str]) -> Measurements:
    """What claims are judged by."""
    rounds = {
        f"{experiment}/{arm}": [figures_of(run) for run in runs]
        for (experiment, arm), runs in results.runs.items()
    }
    return Measurements(rounds, facts, missing)


def report_dict(
    results: Results,
    experiments: Sequence[Experiment],
    facts: Mapping[str, float],
    missing: Mapping[str, str],
) -> dict[str, Any]:
    """Rows, experiments and claims; the caller adds settings, machine, date and the like."""
    done = results.num_runs
    experiments = what_was_run(results, experiments)
    left_out = [f"+ {name.upper()} was not run: {NOT_GIVEN[name]}." for name in missing if name in NOT_GIVEN]
    if results.is_interrupted:
        missing = {**missing, "": "interrupted before it was run"}
        left_out.append(f"Interrupted after {done} of {results.turns} runs: the others are missing here.")
    measured = measurements(results, facts, missing)
    return {
        "kind": "compare",
        "interrupted": results.is_interrupted,
        "about": _about(experiments[0]),
        "rows": _rows(results, experiments),
        "left_out": left_out,
        "note": (
            "Medians over the rounds. KV use: tokens stored over token slots allocated to running requests; "
            "internal "
            "fragmentation is the rest of it. External fragmentation: free slots that the largest single "
            "request could "
            "not get. Longest context: from the experiment of that name."
        ),
        "same_ids": not results.differing,
        "failed": results.failed,
        "experiments": [
            _experiment(results, experiment) for experiment in experiments if experiment.name != "modes"
        ],
        "claims": [as_dict(claim, claim.check(measured)) for claim in CLAIMS],
    }


def _about(modes: Experiment) -> str:
    arm = modes.arms[0]
    prompts = [len(request.prompt_token_ids) for request in arm.workload]
    outputs = [request.output_tokens for request in arm.workload]
    return (
        f"The same {len(arm.workload)} requests (prompts of {min(prompts)} to {max(prompts)} tokens, outputs of "
        f"{min(outputs)} to {max(outputs)}, all there from the start) in the same memory: KV for "
        f"{arm.pool_tokens:,} tokens. "
        f"Contiguous reserves {arm.max_model_len:,} tokens for each request, first-fit its prompt and "
        "max_tokens; paged takes "
        "pages of 16 tokens as they are needed. Static batching starts a batch when the last one has ended. "
        "Each row "
        "marked + adds to the one above it; 4-bit rows replace each other."
    )


def _rows(results: Results, experiments: Sequence[Experiment]) -> list[dict[str, Any]]:
    modes = experiments[0]
    context = {
        arm.name: medians([figures_of(run) for run in results.runs[("context", arm.name)]])
        for experiment in experiments
        for arm in experiment.arms
        if experiment.name == "context"
    }
    rates = {
        arm.name: [run.output_tokens_per_s for run in results.runs[("modes", arm.name)]] for arm in modes.arms
    }
    base = rates[modes.arms[0].name]
    rows = []
    for arm in modes.arms:
        row = row_of(arm.name, results.runs[("modes", arm.name)])
        row["speedup"] = paired_ratio(rates[arm.name], base).middle
        row["output_tokens_per_s_interval"] = [min(rates[arm.name]), max(rates[arm.name])]
        row["model"] = arm.model
        row["context_tokens"] = context.get(arm.allocation, {}).get("longest_tokens")
        rows.append(row)
    return rows


def _experiment(results: Results, experiment: Experiment) -> dict[str, Any]:
    arms = []
    for arm in experiment.arms:
        rounds = [figures_of(run) for run in results.runs[(experiment.name, arm.name)]]
        figures = medians(rounds)
        if experiment.name == "pages":
            figures["scheduler_us_per_step"] = figures["scheduler_s_per_step"] * 1e6
        arms.append({"name": arm.name, **figures, "rounds": rounds})
    return {
        "name": experiment.name,
        "title": experiment.title,
        "about": experiment.about,
        "of": experiment.of,
        "arms": arms,
    }


def quality_facts(name: str, quality: Mapping[str, Any]) -> dict[str, float]:
    """What a checkpoint's quality.json says of it, by names that claims use."""
    perplexity = quality.get("perplexity") or {}
    before, after = perplexity.get("original"), perplexity.get("quantized")
    facts = {}
    if before and after:
        facts[f"{name}.perplexity_increase"] = after / before - 1.0
    if quality.get("seconds"):
        facts[f"{name}.making_s"] = float(quality["seconds"])
    return facts
