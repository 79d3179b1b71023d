"""Step plans and results as bytes, for executors in other processes and ranks. Standard library and `core` only.

JSON of nested lists: readable, safe to read from an untrusted peer, and the same on every Python version. All
containers of the values are tuples, so that lists read back are turned into tuples and the round trip is exact.
Sampling parameters travel as the fields that differ from their defaults.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from pagedcli.core.plan import Admission, PlanEntry, StepPlan, StepResult, TokenLogprob
from pagedcli.core.sampling import SamplingParams

_DEFAULTS = {item.name: item.default for item in fields(SamplingParams)}


def plan_to_bytes(plan: StepPlan) -> bytes:
    """A plan as bytes that `plan_from_bytes` turns into an equal plan."""
    entries = [(*entry[:-1], _admission_row(entry.admission)) for entry in plan.entries]
    return _dump([plan.step, entries, plan.copies, plan.freed_slots])


def plan_from_bytes(data: bytes) -> StepPlan:
    """The plan that `plan_to_bytes` was given."""
    step, entries, copies, freed_slots = _load(data)
    made = tuple(PlanEntry._make((*fixed, _admission(row))) for *fixed, row in entries)
    return StepPlan(step, made, copies, freed_slots)


def result_to_bytes(result: StepResult) -> bytes:
    """A result as bytes that `result_from_bytes` turns into an equal result."""
    return _dump(
        [
            result.step,
            result.tokens,
            [_logprob_row(logprob) for logprob in result.logprobs],
            [[_logprob_row(logprob) for logprob in rows] for rows in result.prompt_logprobs],
            result.seconds,
            result.errors,
        ]
    )


def result_from_bytes(data: bytes) -> StepResult:
    """The result that `result_to_bytes` was given."""
    step, tokens, logprobs, prompt_logprobs, seconds, errors = _load(data)
    return StepResult(
        step=step,
        tokens=tokens,
        logprobs=tuple(_logprob(row) for row in logprobs),
        prompt_logprobs=tuple(tuple(TokenLogprob(*row) for row in rows) for rows in prompt_logprobs),
        seconds=seconds,
        errors=errors,
    )


def params_to_dict(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    values = {name: getattr(params, name) for name in _DEFAULTS}
    return {name: value for name, value in values.items() if value != _DEFAULTS[name]}


def _admission_row(admission: Admission | None) -> list[Any] | None:
    if admission is None:
        return None
    values = {item.name: getattr(admission, item.name) for item in fields(Admission)}
    return list({**values, "params": params_to_dict(admission.params)}.values())


def _admission(row: Any) -> Admission | None:
    if row is None:
        return None
    values = dict(zip((item.name for item in fields(Admission)), row, strict=True))
    return Admission(**{**values, "params": SamplingParams(**values["params"])})


def _logprob_row(logprob: TokenLogprob | None) -> list[Any] | None:
    return None if logprob is None else [logprob.token, logprob.logprob, logprob.rank, logprob.top]


def _logprob(row: Any) -> TokenLogprob | None:
    return None if row is None else TokenLogprob(*row)


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _load(data: bytes) -> Any:
    return _tupled(json.loads(data))


def _tupled(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tupled(item) for item in value)
    if isinstance(value, dict):
        return {name: _tupled(item) for name, item in value.items()}
    return value
