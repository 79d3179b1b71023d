"""The JSON of `paged bench serve`: figures of a run over HTTP, what was counted how, and the client's own load.

Standard library only. What was not measured is null, never 0 or NaN. Failed requests appear in `failed` and
`errors` and in no distribution; requests that were still under way at an interruption in `unfinished`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pagedcli.bench.goodput import Targets
from pagedcli.bench.http_answer import Answer
from pagedcli.bench.http_drive import LoadState
from pagedcli.bench.latency import Distribution, LoadReport, summarize

LATE_S = 0.01
"""From here on a client that sends late is said to."""
BUSY = 0.8
"""Share of a core from which the client itself may be the limit."""
KNOWN = 0.05
"""Share of prompts in the server's cache from which a workload that shares nothing is said to have been seen."""
APART = ("mixed", "fixed", "random")
"""Workloads whose prompts have nothing in common."""
_MAX_POINTS = 2000


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One run against a server.

    Attributes:
        state: When it had ended.
        settings: What was asked, and of whom.
        arrivals: How requests came.
        server: Who answered.
        cpu_s: That the client computed.
        wall_s: That the run took.
        machine: Where the client ran; the server may run elsewhere.
        engine: What the server said of its engine.
        targets: For goodput.
        is_interrupted: Whether it was ended early.
    """

    state: LoadState
    settings: Mapping[str, Any]
    arrivals: Mapping[str, Any]
    server: Mapping[str, Any]
    cpu_s: float
    wall_s: float
    machine: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, float | None] = field(default_factory=dict)
    targets: Targets | None = None
    is_interrupted: bool = False

    def as_dict(self) -> dict[str, Any]:
        """As in a benchmark's file."""
        answers = self.state.answers
        report = summarize(answers)
        figures: dict[str, Any] = {
            "kind": "serve",
            "settings": dict(self.settings),
            "machine": dict(self.machine),
            "server": dict(self.server),
            "arrivals": dict(self.arrivals),
            **_latencies(report),
            **self.engine,
            "limits": {},
            "unfinished": self.state.total - len(answers),
            "interrupted": self.is_interrupted,
            "client": self._client(),
            "counted": counted(answers),
        }
        if self.targets is not None:
            figures["goodput"] = self.targets.report(answers, report.seconds)
        figures["notes"] = self._notes(figures)
        figures["series"] = series(self.state)
        return figures

    def _client(self) -> dict[str, Any]:
        late = [answer.late_s for answer in self.state.answers if answer.status or answer.error is None]
        return {
            "cpu": self.cpu_s / self.wall_s if self.wall_s > 0 else 0.0,
            "late_s": _known(Distribution.of(late)) | {"max": max(late, default=None)},
            "late_requests": sum(seconds > LATE_S for seconds in late),
        }

    def _notes(self, figures: Mapping[str, Any]) -> list[str]:
        client, notes = figures["client"], []
        if client["late_requests"]:
            notes.append(
                f"the client sent {client['late_requests']} of the requests more than {LATE_S * 1e3:g} ms late "
                f"(at most {client['late_s']['max'] * 1e3:.0f} ms): latencies count from when they were due"
            )
        if client["cpu"] > BUSY:
            notes.append(f"the client was busy for {client['cpu']:.0%} of the time: it may be the limit")
        hits = figures.get("prefix_hit_rate")
        if hits is not None and hits > KNOWN and str(self.settings.get("workload")).split(":")[0] in APART:
            notes.append(
                f"the server knew {hits:.0%} of the prompts' tokens, as if it had been asked the same before: "
                "that flatters it; another --seed asks others"
            )
        if self.is_interrupted:
            notes.append(f"interrupted: {figures['unfinished']} requests had no answer yet and are left out")
        return notes


def _latencies(report: LoadReport) -> dict[str, Any]:
    figures = report.as_dict()
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        figures[name] = _known(getattr(report, name))
    return figures


def _known(distribution: Distribution) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in asdict(distribution).items()}


def counted(answers: Sequence[Answer]) -> dict[str, Any]:
    """How tokens were counted: as the server said in its usage, or as events with text."""
    served = [answer for answer in answers if answer.is_served]
    doubts = Counter(doubt for answer in served for doubt in set(answer.doubts))
    by_events = sum(bool({"no usage", "usage cannot be true"} & set(answer.doubts)) for answer in served)
    events = sum(len(answer.token_times) for answer in served)
    tokens = sum(answer.output_tokens for answer in served)
    return {
        "from": "when a request was due, connecting included",
        "by_usage": len(served) - by_events,
        "by_events": by_events,
        "doubts": dict(doubts),
        "tokens_per_event": tokens / events if events else None,
    }


def series(state: LoadState) -> dict[str, Any]:
    """Columns for plots: requests in flight over time, and the latencies of the served requests."""
    served = [answer for answer in state.answers if answer.is_served]
    points = state.in_flight[:: max(1, len(state.in_flight) // _MAX_POINTS)]
    per_token = [answer.tpot_s for answer in served]
    return {
        "time_s": [moment - state.started_s for moment, _ in points],
        "running": [count for _, count in points],
        "ttft_s": [answer.ttft_s for answer in served],
        "tpot_s": [seconds for seconds in per_token if seconds is not None],
        "itl_s": _thinned([gap for answer in served for gap in answer.itl_s]),
        "e2e_s": [answer.e2e_s for answer in served],
    }


def _thinned(values: Sequence[float]) -> list[float]:
    """As many as a plot can show, of the sorted values; the smallest and largest among them."""
    ordered = sorted(values)
    if len(ordered) <= _MAX_POINTS:
        return ordered
    last = len(ordered) - 1
    return [ordered[round(index * last / (_MAX_POINTS - 1))] for index in range(_MAX_POINTS)]
