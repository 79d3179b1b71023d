"""Writes what a search found as a `paged.toml`, with what was searched and measured as comments. Standard library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pagedcli.bench.statistics import NO_DIFFERENCE
from pagedcli.bench.tune import SETTINGS, Aim, Figures, Trial, Tuned

LISTED = 40
"""Candidates that are told of, the best first."""


def verdict_text(tuned: Tuned, aim: Aim) -> str:
    """What the search has shown, in a sentence, whether limits are missed, and what it had no time for."""
    return "; ".join(filter(None, (_shown(tuned), _missed(tuned, aim), _left_out(tuned))))


def _missed(tuned: Tuned, aim: Aim) -> str:
    ran = [trial for trial in tuned.trials if trial.figures]
    if all(aim.meets(trial.median()) for trial in ran if trial.candidate == tuned.best):
        return ""
    others = [trial for trial in ran if aim.meets(trial.median())]
    return "the limits are missed, though not by all that was tried" if others else "nothing keeps the limits"


def _left_out(tuned: Tuned) -> str:
    if not tuned.is_cut:
        return ""
    if not tuned.untried:
        return "the time was over before the search was: more --minutes make it surer"
    return f"the time was over before all of {', '.join(tuned.untried)} was tried: give more --minutes"


def _shown(tuned: Tuned) -> str:
    if tuned.found == tuned.default:
        when = "until it was interrupted" if tuned.is_interrupted else "that was tried"
        return f"{NO_DIFFERENCE} to the defaults by anything {when}: they are kept"
    if tuned.final is None:
        return "interrupted before the comparison with the defaults: each step of the search was shown, not the whole"
    low, middle, high = tuned.final.low, tuned.final.middle, tuned.final.high
    rounds = len(tuned.comparison[0])
    figures = f"{middle:.3f} times the defaults ({low:.3f} to {high:.3f}, {rounds} rounds in turns)"
    return figures if tuned.is_better else f"{figures}: {NO_DIFFERENCE}, the defaults are kept"


def render(tuned: Tuned, aim: Aim, about: Mapping[str, Any]) -> str:
    """The file.

    Args:
        tuned: Of the search.
        aim: What was wanted.
        about: Facts for `[tuned]`, which are checked where the file is read: model, threads, cores and the like.
    """
    lines = [
        "# Written by `paged bench tune`. Commands of paged read it in the folder where it lies; flags count more.",
        f"# Aim: {aim}. Result: {verdict_text(tuned, aim)}.",
    ]
    changes = tuned.best.differing(tuned.default)
    for section in dict.fromkeys(SETTINGS.values()):
        own = {name: value for name, value in changes.items() if SETTINGS[name] == section}
        if own:
            lines += ["", f"[{section}]"]
            lines += [
                f"{name} = {value}  # default here: {getattr(tuned.default, name)}"
                for name, value in own.items()
            ]
    lines += [
        "",
        "# What it was measured for; another model or machine is said when the file is read.",
        "[tuned]",
    ]
    lines += [f"{name} = {_toml(value)}" for name, value in about.items() if value is not None]
    lines += ["", *_measured(tuned, aim)]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A value: text, number or truth; JSON's forms of these are TOML's."""
    return json.dumps(value, ensure_ascii=False)


def _measured(tuned: Tuned, aim: Aim) -> Iterator[str]:
    """Comments: every candidate, its medians, how often it ran."""
    ran = [trial for trial in tuned.trials if trial.figures]
    ranked = sorted(ran, key=lambda trial: -aim.worth(trial.median()))
    yield f"# Measured: {sum(len(trial.figures) for trial in ran)} runs of {len(ran)} settings, medians:"
    for trial in ranked[:LISTED]:
        yield f"#   {trial.candidate}: {figures_text(trial.median())}, {_runs(trial)}"
    if len(ranked) > LISTED:
        yield f"#   and {len(ranked) - LISTED} that were worse"
    for trial in tuned.trials:
        if trial.problem is not None:
            yield f"#   {trial.candidate}: cannot run: {trial.problem}"


def _runs(trial: Trial) -> str:
    count = len(trial.figures)
    return f"{count} run{'' if count == 1 else 's'}"


def figures_text(figures: Figures) -> str:
    """In words."""
    return (
        f"{figures.tokens_per_s:.1f} tokens/s, TTFT p90 {figures.ttft_s * 1e3:.0f} ms, "
        f"ITL p90 {figures.itl_s * 1e3:.1f} ms, answers {figures.e2e_s:.2f} s"
    )
