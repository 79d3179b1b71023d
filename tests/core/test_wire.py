"""Plans and results survive the way to another process unchanged."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from pagedcli.core.plan import NO_TOKEN, PlanEntry, StepPlan, StepResult, TokenLogprob
from pagedcli.core.sampling import SamplingParams
from pagedcli.core.wire import (
    params_to_dict,
    plan_from_bytes,
    plan_to_bytes,
    result_from_bytes,
    result_to_bytes,
)
from tests.core.bed import Bed, numbers

RICH = SamplingParams(
    temperature=0.1 + 0.2,
    top_k=5,
    logit_bias=((3, -1.5), (9, 100.0)),
    allowed_token_ids=(1, 2, 3),
    bad_word_ids=((1, 2), (3,)),
    seed=2**63 + 11,
    stop=('"', "\n€", "😀"),
    max_tokens=None,
    logprobs=0,
    prompt_logprobs=3,
)


def test_plans_of_a_run_survive() -> None:
    bed = Bed(page_size=4, num_pages=12, max_num_batched_tokens=16, max_num_seqs=8)
    fields = {item.name: getattr(RICH, item.name) for item in dataclasses.fields(RICH)} | {"max_tokens": 6}
    first = bed.add(numbers(7), **fields)
    bed.add(numbers(7), fork_of=first, sample_index=1, **fields)
    for index in range(4):
        bed.add(numbers(9, 20 * index), max_tokens=12)
    bed.drain()
    assert any(plan.copies for plan in bed.plans)
    assert any(plan.freed_slots for plan in bed.plans)
    for plan in bed.plans:
        again = plan_from_bytes(plan_to_bytes(plan))
        assert again == plan
        assert all(isinstance(entry, PlanEntry) for entry in again.entries)
        assert hash(again) == hash(plan), "tuples all the way down"


def test_params_travel_as_what_differs_from_the_defaults() -> None:
    assert params_to_dict(SamplingParams()) == {}
    assert SamplingParams(**params_to_dict(RICH)) == RICH


@pytest.mark.parametrize("errors", [(), (None, "logits are NaN")])
def test_results_survive(errors: tuple[str | None, ...]) -> None:
    rng = random.Random(1)
    logprob = TokenLogprob(5, -rng.random() * 1e-17, 2, ((7, -0.1), (5, float("-inf"))))
    result = StepResult(9, (5, NO_TOKEN), (logprob, None), ((), (logprob, logprob)), rng.random(), errors)
    assert result_from_bytes(result_to_bytes(result)) == result


def test_a_decode_costs_little() -> None:
    entries = tuple(PlanEntry(i, i, 0, 1000, 1, True, (0,)) for i in range(256))
    data = plan_to_bytes(StepPlan(1, entries))
    assert len(data) / 256 < 40
    assert json.loads(data)[0] == 1
