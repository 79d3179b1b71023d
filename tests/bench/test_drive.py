"""Runs over the scripted executor on a clock that only its steps move: times, gauges and counts are exactly known."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from pagedcli.bench.run import Interrupted, RequestRun, Run
from pagedcli.workloads.requests import WorkloadRequest, mixed_lengths, prompt_after
from tests.bench.scripted import request, run_scripted


@pytest.fixture(scope="module")
def two() -> Run:
    """Steps of 30, 2, 2, 1 and 1 positions."""
    return run_scripted([request("a", 10, 3), request("b", 20, 5)])


def test_every_token_has_the_time_of_its_step(two: Run) -> None:
    a, b = two.requests
    assert a.token_times == pytest.approx([0.130, 0.232, 0.334])
    assert b.token_times == pytest.approx([0.130, 0.232, 0.334, 0.435, 0.536])
    assert (a.ttft_s, b.ttft_s) == pytest.approx((0.130, 0.130))
    assert (a.tpot_s, b.tpot_s) == pytest.approx((0.102, (0.536 - 0.130) / 4))
    assert b.itl_s == pytest.approx([0.102, 0.102, 0.101, 0.101])
    assert (a.e2e_s, b.e2e_s) == pytest.approx((0.334, 0.536))
    assert two.seconds == pytest.approx(0.536)


def test_rates_are_over_the_whole_run(two: Run) -> None:
    assert two.requests_per_s == pytest.approx(2 / 0.536)
    assert two.output_tokens_per_s == pytest.approx(8 / 0.536)
    assert two.total_tokens_per_s == pytest.approx(38 / 0.536)


def test_use_of_the_pool_is_averaged_over_time(two: Run) -> None:
    held = [(s.t, s.running, s.stored_tokens, s.allocated_tokens) for s in two.samples]
    times, counts = [row[0] for row in held], [row[1:] for row in held]
    assert times == pytest.approx([0.130, 0.232, 0.334, 0.435, 0.536])
    assert counts == [(2, 30, 48), (2, 32, 48), (1, 22, 32), (1, 23, 32), (0, 0, 0)]
    stored = 30 * 0.102 + 32 * 0.102 + 22 * 0.101 + 23 * 0.101
    assert two.kv_use() == pytest.approx(stored / (48 * 0.204 + 32 * 0.202))
    assert two.external_fragmentation() == 0.0
    assert two.pool_use() == pytest.approx((48 * 0.204 + 32 * 0.202) / 0.406 / (64 * 16))
    assert two.peak_running == 2


def test_steps_tell_what_they_computed(two: Run) -> None:
    first, second, *_, last = two.steps
    assert (first.num_seqs, first.num_tokens, first.num_logits) == (2, 30, 2)
    assert first.num_pairs == 10 * 11 // 2 + 20 * 21 // 2
    assert (first.num_kv, first.num_blocks) == (30, 3)
    assert (second.num_tokens, second.num_pairs, second.num_kv, second.num_blocks) == (2, 11 + 21, 32, 0)
    assert (last.num_seqs, last.num_kv) == (1, 24)
    assert [step.seconds for step in two.steps] == pytest.approx([0.130, 0.102, 0.102, 0.101, 0.101])


def test_an_executor_that_never_waits_is_busy_all_the_time(two: Run) -> None:
    assert two.executor_busy == pytest.approx(1.0)
    assert two.times.executor == pytest.approx(0.536)


def test_a_gap_without_requests_has_no_work_as_its_cause() -> None:
    run = run_scripted([request("a", 10, 1), request("b", 20, 2, arrival_s=1.0)])
    a, b = run.requests
    assert a.e2e_s == pytest.approx(0.110)
    assert b.token_times == pytest.approx([1.120, 1.221])
    assert b.ttft_s == pytest.approx(0.120)
    assert run.times.gaps.no_work == pytest.approx(0.890)
    assert run.executor_busy == pytest.approx(0.331 / 1.221)


def test_a_request_waits_for_a_step_that_is_under_way() -> None:
    """It arrives at 0.05, in the middle of the first step, and is measured from there, not from when it was sent."""
    run = run_scripted([request("a", 10, 30), request("b", 20, 2, arrival_s=0.05)])
    b = run.requests[1]
    assert b.ttft_s > 0.100
    assert b.ttft_s == pytest.approx(b.token_times[0] - 0.05)
    assert run.late_s > 0.04


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_lengths_are_those_of_the_workload_at_every_depth(depth: int) -> None:
    workload = mixed_lengths(12, seed=depth, vocab_size=200, prompt_tokens=(1, 40), output_tokens=(1, 20))
    run = run_scripted(workload, depth=depth)
    assert [len(item.token_ids) for item in run.requests] == [item.output_tokens for item in workload]
    assert run.outputs == run_scripted(workload).outputs
    assert all(token < 256 for ids in run.outputs.values() for token in ids)


def test_a_preempted_request_has_every_token_once() -> None:
    workload = mixed_lengths(10, seed=3, vocab_size=200, prompt_tokens=(20, 40), output_tokens=(20, 60))
    run = run_scripted(workload, num_blocks=12)
    assert run.counters.preemptions > 0
    assert run.counters.recomputed_tokens > 0
    assert sum(item.preemptions for item in run.requests) == run.counters.preemptions
    assert run.outputs == run_scripted(workload, num_blocks=200).outputs
    for item, wanted in zip(run.requests, workload, strict=True):
        assert len(item.token_times) == wanted.output_tokens
        assert all(gap > 0 for gap in item.itl_s)


def test_a_refused_request_fails_and_the_others_do_not() -> None:
    run = run_scripted([request("a", 10, 3), request("long", 300, 5), request("b", 20, 5)])
    assert [item.is_served for item in run.requests] == [True, False, True]
    (failed,) = run.failed
    assert "needs 301 tokens" in str(failed.error)
    assert [item.token_times for item in run.served] == [
        pytest.approx([0.130, 0.232, 0.334]),
        pytest.approx([0.130, 0.232, 0.334, 0.435, 0.536]),
    ]


def test_an_answer_that_cannot_be_as_long_as_it_should_is_a_failure() -> None:
    run = run_scripted([request("a", 250, 20), request("b", 10, 2)])
    assert "ended after 6 of 20 tokens" in str(run.requests[0].error)
    assert run.requests[1].is_served


def test_a_prompt_with_a_token_that_the_model_does_not_have_is_refused() -> None:
    run = run_scripted([_with_prompt([1, 2, 258])])
    assert "258" in str(run.requests[0].error)


def test_the_next_turn_of_a_conversation_has_the_real_answer_in_its_prompt() -> None:
    first = request("a", 40, 3)
    second = request("b", 40 + 3 + 8, 2, follows="a", new_tokens=8, think_s=0.5)
    run = run_scripted([first, second])
    a, b = run.requests
    assert b.prompt_tokens == 51
    assert b.arrival_s == pytest.approx(a.e2e_s + 0.5)
    assert b.cached_tokens == 32  # the first turn's whole pages
    alone = run_scripted([request("b", 51, 2)])
    prompt = prompt_after(second, first.prompt_token_ids, a.token_ids)
    told = run_scripted([_with_prompt(prompt)])
    assert b.token_ids == told.requests[0].token_ids
    assert b.token_ids != alone.requests[0].token_ids


def _with_prompt(prompt: Sequence[int]) -> WorkloadRequest:
    return dataclasses.replace(request("c", 1, 2), prompt_token_ids=tuple(prompt))


class _Watch:
    def __init__(self, interrupt_after: int | None = None) -> None:
        self.seen: list[str] = []
        self._after = interrupt_after

    def started(self, engine: object, workload: Sequence[object]) -> None:
        self.seen.append(f"started {len(workload)}")

    def answered(self, request: RequestRun) -> None:
        self.seen.append(request.id)
        if len(self.seen) - 1 == self._after:
            raise KeyboardInterrupt

    def ended(self) -> None:
        self.seen.append("ended")


def test_who_watches_is_told_of_every_answer() -> None:
    watch = _Watch()
    run_scripted([request("a", 10, 3), request("b", 20, 5)], watch=watch)
    assert watch.seen == ["started 2", "a", "b", "ended"]


def test_an_interrupted_run_keeps_what_was_answered() -> None:
    watch = _Watch(interrupt_after=1)
    with pytest.raises(Interrupted) as caught:
        run_scripted([request("a", 10, 3), request("b", 20, 200, max_tokens=230)], watch=watch)
    run = caught.value.run
    assert run.is_interrupted
    assert [item.id for item in run.served] == ["a"]
    assert run.failed == ()
    assert run.requests[1].end_s is None
    assert watch.seen[-1] == "ended"


def test_building_block_tables_is_timed_call_by_call(two: Run) -> None:
    """Two admissions, a growth for each, and two releases: between the two readings of each lies one tick."""
    assert two.times.block_tables == 0.0
    run = run_scripted([request("a", 10, 3), request("b", 20, 5)], kv_seconds=1.0)
    assert run.times.block_tables >= 6.0
    assert run.times.block_tables == round(run.times.block_tables)
