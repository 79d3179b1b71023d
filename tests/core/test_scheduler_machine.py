"""Hypothesis drives the scheduler by hand: any order of add, abort, finish, expire, schedule and apply.

Unlike the step loop, the machine may leave any number of plans in flight. The model of a request is its own token
sequence (`tests.core.shadow.sample`), computed without batching, paging or preemption.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedcli.core.plan import StepPlan, TokenEvent
from pagedcli.core.request import FinishReason, Request
from pagedcli.core.wire import plan_from_bytes, plan_to_bytes
from tests.core.bed import VOCAB, Bed
from tests.core.shadow import Handle, sample

PREFIXES = ([1, 2, 3, 4, 5], [1, 2, 3, 9], [6])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_tokens=st.sampled_from([16, 24, 48]),
        budget=st.sampled_from([1, 4, 64]),
        settings=st.fixed_dictionaries(
            {
                "policy": st.sampled_from(["fcfs", "priority", "shortest", "longest-prefix"]),
                "batching": st.sampled_from(["continuous", "continuous", "static"]),
                "allocation": st.sampled_from(["paged", "paged", "contiguous", "first-fit"]),
                "prefix_caching": st.booleans(),
                "watermark": st.sampled_from([0.0, 0.2]),
                "max_preemptions": st.sampled_from([0, 1, 3]),
                "decode_interval": st.sampled_from([4, 8]),
            }
        ),
    )
    def build(self, page_size: int, num_tokens: int, budget: int, settings: dict[str, Any]) -> None:
        self.bed = Bed(
            page_size=page_size,
            num_pages=num_tokens // page_size,
            max_num_batched_tokens=budget,
            max_num_seqs=4,
            max_model_len=20,
            **settings,
        )
        self.flight: deque[tuple[StepPlan, Handle]] = deque()
        self.known: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.now = 0.0

    @rule(
        prefix=st.sampled_from(PREFIXES),
        rest=st.lists(st.integers(0, 3), max_size=4),
        max_tokens=st.sampled_from([0, 1, 6, None]),
        samples=st.sampled_from([1, 1, 2]),
        params=st.fixed_dictionaries(
            {
                "priority": st.integers(0, 1),
                "deadline_s": st.sampled_from([None, None, 3.0]),
                "prompt_logprobs": st.sampled_from([None, None, 0]),
                "max_pages": st.sampled_from([None, None, 15]),
            }
        ),
    )
    def add(
        self, prefix: list[int], rest: list[int], max_tokens: int | None, samples: int, params: dict[str, Any]
    ) -> None:
        self.bed.now = int(self.now)
        first = len(self.bed.requests)
        for index in range(samples):
            request_id = self.bed.add(
                prefix + rest,
                max_tokens=max_tokens,
                fork_of=first if index else None,
                sample_index=index,
                **params,
            )
            self.known[request_id] = list(prefix + rest)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def end_from_outside(self, data: st.DataObject, reason: FinishReason) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.known)))
        self.bed.scheduler.finish(request_id, reason)
        self.ended.add(request_id)

    @precondition(lambda self: len(self.flight) < 4)
    @rule()
    def plan(self) -> None:
        could_run = self.bed.scheduler.has_work and not self.flight
        plan = self.bed.scheduler.schedule()
        assert plan is not None or not could_run, "P5: nothing in flight and nothing planned"
        if plan is not None:
            assert plan_from_bytes(plan_to_bytes(plan)) == plan
            self.flight.append((plan, self.bed.shadow.submit(plan)))

    @precondition(lambda self: self.flight)
    @rule()
    def apply(self) -> None:
        plan, handle = self.flight.popleft()
        for event in self.bed.scheduler.apply(plan, handle.result(), self.now):
            self.take(event)

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        for event in self.bed.scheduler.expire(self.now):
            assert event.finish is FinishReason.DEADLINE
            self.take(event)

    def take(self, event: TokenEvent) -> None:
        assert event.request_id not in self.ended, "an event after the end"
        request = self.bed.requests[event.request_id]
        tokens = self.known[event.request_id]
        if event.token is not None:
            assert event.token == sample(tokens, 0, request.sample_index, VOCAB), "P2"
            tokens.append(event.token)
        if event.finish is not None:
            self.ended.add(event.request_id)
        if event.finish is FinishReason.LENGTH:
            wanted = request.params.max_tokens
            longest = min(20, self.bed.kv.capacity_tokens + 1)
            assert len(tokens) == min(longest, request.num_prompt + (longest if wanted is None else wanted))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "bed"):
            self.bed.scheduler.check()
            living: list[Request] = [r for i, r in self.bed.requests.items() if i not in self.ended]
            assert self.bed.scheduler.has_work == bool(living)
            assert [each for each in living if each.finish is not None] == []

    def teardown(self) -> None:
        if not hasattr(self, "bed"):
            return
        for _ in range(2000):
            if self.flight:
                self.apply()
            elif self.bed.scheduler.has_work:
                self.plan()
            else:
                break
        assert not self.bed.scheduler.has_work, "P5"
        self.bed.assert_idle()


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
