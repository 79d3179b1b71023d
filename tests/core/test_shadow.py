"""Random workloads against the executor that remembers what every KV cell was computed from (P1, P2, P5, I1-I12)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pagedcli.core.stats import Counters
from tests.core.random_workload import Outcome, Run, make_workload

NORMAL = 1_000
NIGHTLY = 10_000
CHUNK = 50
DEPTHS = (1, 2, 3)


def run_all(seeds: Iterable[int]) -> Counters:
    """Every workload at every depth; the sums show that what should happen did happen."""
    total = Counters()
    for seed in seeds:
        for depth in DEPTHS:
            try:
                counters = Run(make_workload(seed), depth).drain().counters
            except AssertionError as error:
                raise AssertionError(f"workload {seed} at depth {depth}: {error}") from error
            total.preemptions += counters.preemptions
            total.copied_blocks += counters.copied_blocks
            total.prefix_hit_tokens += counters.prefix_hit_tokens
            total.dropped_tokens += counters.dropped_tokens
            total.recomputed_tokens += counters.recomputed_tokens
    return total


@pytest.mark.parametrize("first", range(0, NORMAL, CHUNK))
def test_P2_random_workloads_give_what_each_request_gives_alone(first: int) -> None:
    total = run_all(range(first, first + CHUNK))
    assert total.preemptions > 5, "no preemption was tried"
    assert total.copied_blocks > 5, "no fork copied a block"
    assert total.prefix_hit_tokens > 100, "no prefix was shared"
    assert total.dropped_tokens > 5, "no late token came"
    assert total.recomputed_tokens > 5, "nothing was recomputed"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(NORMAL, NORMAL + NIGHTLY, 1000))
def test_P2_ten_thousand_random_workloads(first: int) -> None:
    run_all(range(first, first + 1000))


def test_I5_outputs_at_depth_2_and_3_equal_those_at_depth_1() -> None:
    """Said directly for once; above, every depth is compared with the request alone."""
    for seed in range(20_000, 20_040):
        base, *others = (outputs_without_cuts(seed, depth) for depth in DEPTHS)
        assert base.tokens == others[0].tokens == others[1].tokens, f"workload {seed}"
        assert base.finish == others[0].finish == others[1].finish, f"workload {seed}"


def outputs_without_cuts(seed: int, depth: int) -> Outcome:
    """A run without aborts and deadlines: those cut where time says, and time differs between depths."""
    workload = make_workload(seed)
    for arrival in workload.arrivals:
        arrival.abort_step = None
        object.__setattr__(arrival.params, "deadline_s", None)
    return Run(workload, depth).drain()
