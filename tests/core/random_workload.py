"""Random workloads for the scheduler, run against the shadow executor and checked after every step.

What a request must give is computed here from its own tokens alone (`expected`), independently of the core. So every
run proves P2 and I5: batching, chunking, prefix hits, forks, preemption and depth can not change an output.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import get_args

from pagedcli.config import AllocationName, BatchingName, CacheConfig, PolicyName, SchedulerConfig
from pagedcli.core.allocation import make_kv
from pagedcli.core.plan import StepPlan, TokenEvent
from pagedcli.core.request import FinishReason, Request
from pagedcli.core.sampling import SamplingParams
from pagedcli.core.scheduler import Scheduler
from pagedcli.core.stats import Counters
from pagedcli.engine.core import EngineCore
from pagedcli.errors import RequestError
from tests.core.shadow import Handle, ShadowExecutor, chain, sample

VOCAB = 50
STOP_ID = 7
TEXT_STOP = 11  # plays a stop string: the output stage ends the request when it sees this token
MAX_STEPS = 5000


@dataclass
class Arrival:
    """A request to come: when, what, and when somebody loses interest in it (None: never)."""

    step: int
    id: int
    prompt: list[int]
    params: SamplingParams
    fork_of: int | None
    sample_index: int
    abort_step: int | None
    uses_text_stop: bool


@dataclass
class Workload:
    seed: int
    num_blocks: int
    max_model_len: int
    cache: CacheConfig
    scheduler: SchedulerConfig
    arrivals: list[Arrival]

    def capacity(self) -> int:
        return self.num_blocks * self.cache.page_size


@dataclass
class Outcome:
    """What came out of a run: output tokens and end of each request that was accepted."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, FinishReason] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    plans: list[StepPlan] = field(default_factory=list)
    steps: int = 0


def make_workload(seed: int) -> Workload:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 4, 8])
    num_blocks = -(-rng.choice([24, 40, 56, 72, 150]) // block_size)
    max_model_len = rng.choice([20, 40, 80, 1000])
    max_num_seqs = rng.choice([1, 3, 8, 16, 16])
    budget = rng.choice([1, 4, 16, 16, 32, 200])
    paged = rng.random() < 0.8
    cache = CacheConfig(
        page_size=block_size,
        prefix_caching=rng.random() < 0.85,
        watermark=rng.choice([0.0, 0.01, 0.2]),
        allocation="paged" if paged else rng.choice(get_args(AllocationName)),
    )
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        policy=rng.choice(get_args(PolicyName)),
        batching="continuous" if rng.random() < 0.8 else rng.choice(get_args(BatchingName)),
        decode_interval=max(rng.choice([1, 2, 5]), -(-max_num_seqs // budget)),
        max_preemptions=rng.choice([0, 1, 2, 3, 10]),
    )
    return Workload(seed, num_blocks, max_model_len, cache, scheduler, list(_arrivals(rng)))


def _arrivals(rng: random.Random) -> Iterator[Arrival]:
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 24))] for _ in range(3)]
    span = rng.choice([1, 20, 60])
    request_id = 0
    for _ in range(rng.randrange(2, 11)):
        prompt = rng.choice(prefixes) + [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 8))]
        samples = rng.choice([1, 1, 1, 1, 3])
        params = _params(rng)
        step = rng.randrange(span)
        first = request_id
        for index in range(samples):
            yield Arrival(
                step=step,
                id=request_id,
                prompt=prompt,
                params=params,
                fork_of=first if index else None,
                sample_index=index,
                abort_step=step + rng.randrange(40) if rng.random() < 0.15 else None,
                uses_text_stop=rng.random() < 0.3,
            )
            request_id += 1


def _params(rng: random.Random) -> SamplingParams:
    def sometimes(chance: float, value: int) -> int | None:
        return value if rng.random() < chance else None

    return SamplingParams(
        max_tokens=rng.choice([0, 1, 4, 12, 20, 20, 30, 30, None]),
        min_tokens=0,
        prompt_logprobs=sometimes(0.15, 1),
        priority=rng.randrange(-2, 3),
        deadline_s=sometimes(0.1, rng.randrange(1, 40)),
        max_pages=sometimes(0.1, rng.randrange(1, 12)),
        cache_salt=rng.choice(["", "", "", "a"]),
    )


def expected(workload: Workload, arrival: Arrival) -> tuple[list[int], FinishReason] | None:
    """What the request gives when nothing cuts it short, or None if it has to be refused."""
    params, num_prompt, size = arrival.params, len(arrival.prompt), workload.cache.page_size
    room = 0 if params.max_tokens == 0 else 1
    if num_prompt > workload.capacity() or num_prompt + room > workload.max_model_len:
        return None
    if params.max_pages is not None and num_prompt > params.max_pages * size:
        return None
    longest = min(workload.max_model_len, workload.capacity() + 1)
    if params.max_tokens is not None:
        longest = min(longest, num_prompt + params.max_tokens)
    reason = FinishReason.LENGTH
    if params.max_pages is not None and params.max_pages * size + 1 < longest:
        longest, reason = params.max_pages * size + 1, FinishReason.PAGE_CAP
    tokens = list(arrival.prompt)
    while len(tokens) < longest:
        tokens.append(sample(tokens, arrival.id % 3, arrival.sample_index, VOCAB))
        text_stops = arrival.uses_text_stop and tokens[-1] == TEXT_STOP and len(tokens) < longest
        if tokens[-1] == STOP_ID or text_stops:
            return tokens[num_prompt:], FinishReason.STOP
    return tokens[num_prompt:], reason


class Run:
    """One workload at one depth."""

    def __init__(self, workload: Workload, depth: int) -> None:
        self.workload = workload
        self.now = 0.0
        kv = make_kv(workload.cache, workload.num_blocks, workload.max_model_len)
        self.scheduler = Scheduler(
            workload.scheduler, kv, max_model_len=workload.max_model_len, watermark=workload.cache.watermark
        )
        self.executor = ShadowExecutor(
            workload.num_blocks, workload.cache.page_size, workload.scheduler.max_num_seqs, VOCAB
        )
        self.core = EngineCore(self.scheduler, _Recorder(self), depth, lambda: self.now)
        self.outcome = Outcome()
        self.by_id = {arrival.id: arrival for arrival in workload.arrivals}

    def drain(self) -> Outcome:
        upcoming = sorted(self.workload.arrivals, key=lambda arrival: (arrival.step, arrival.id))
        while upcoming or self.core.has_work:
            while upcoming and upcoming[0].step <= self.now:
                self._add(upcoming.pop(0))
            for arrival in self.workload.arrivals:
                if arrival.abort_step == self.now:
                    self.scheduler.abort(arrival.id)
            self._step()
        self._check_idle()
        self.outcome.counters = self.scheduler.stats.counters
        return self.outcome

    def _add(self, arrival: Arrival) -> None:
        request = Request(
            id=arrival.id,
            tokens=list(arrival.prompt),
            num_prompt=len(arrival.prompt),
            params=arrival.params,
            stop_ids=frozenset([STOP_ID]),
            seed=arrival.id % 3,
            sample_index=arrival.sample_index,
            fork_of=arrival.fork_of,
        )
        try:
            self.scheduler.add(request, self.now)
        except RequestError:
            assert expected(self.workload, arrival) is None, f"I12: {arrival} was refused"
        else:
            assert expected(self.workload, arrival) is not None, f"I12: {arrival} was accepted"
            self.outcome.tokens[arrival.id] = []

    def _step(self) -> None:
        idle_before = not self.core.flight
        plans_before = len(self.outcome.plans)
        expired = self.scheduler.expire(self.now)
        could_run = self.scheduler.has_work
        for event in expired + self.core.step():
            self._take(event)
        self.scheduler.check()
        if self.outcome.steps % 8 == 0:
            self._check_kv_use()
        if idle_before and could_run:
            assert len(self.outcome.plans) > plans_before, (
                "P5: unfinished requests, nothing in flight, no plan"
            )
        self.now += 1
        self.outcome.steps += 1
        assert self.outcome.steps < MAX_STEPS, "P5: no end in sight"

    def _take(self, event: TokenEvent) -> None:
        outcome, arrival = self.outcome, self.by_id[event.request_id]
        assert event.request_id not in outcome.finish, "an event after the end"
        tokens = outcome.tokens[event.request_id]
        if event.token is not None:
            assert event.index == len(tokens), "events out of order"
            tokens.append(event.token)
        if event.index == 0 and arrival.params.prompt_logprobs is not None and arrival.fork_of is None:
            if event.finish is not FinishReason.DEADLINE:
                self._check_prompt_logprobs(arrival, event)
        else:
            assert event.prompt_logprobs is None, "prompt log-probabilities are delivered once, to sample 0"
        if event.finish is not None:
            outcome.finish[event.request_id] = event.finish
        elif arrival.uses_text_stop and event.token == TEXT_STOP:
            self.scheduler.finish(event.request_id, FinishReason.STOP)
            outcome.finish[event.request_id] = FinishReason.STOP

    def _check_prompt_logprobs(self, arrival: Arrival, event: TokenEvent) -> None:
        assert event.prompt_logprobs is not None, "prompt log-probabilities are missing"
        value, chains = 0, []
        for token in arrival.prompt:
            value = chain(value, token)
            chains.append(value)
        rows = [(row.token, row.logprob, row.top[0][0]) for row in event.prompt_logprobs]
        assert rows == [(arrival.prompt[p], -float(p), chains[p]) for p in range(1, len(arrival.prompt))]

    def _check_kv_use(self) -> None:
        """Count stored tokens cell by cell, from the snapshot alone."""
        snapshot, stats = self.scheduler.snapshot(), self.scheduler.stats
        used = [block for block in snapshot.blocks if block.refs]
        assert stats.allocated_tokens == len(used) * snapshot.block_size
        assert all(block.refs == len(block.owners) for block in used)
        duplicates = sum(block.refs - 1 for block in used) * snapshot.block_size
        if not snapshot.held:
            assert stats.stored_tokens == sum(view.num_computed for view in snapshot.running) - duplicates
        assert 0 <= stats.stored_tokens <= stats.allocated_tokens
        assert [view.id for view in snapshot.waiting if view.blocked is None] == []
        bound = self.workload.scheduler.max_preemptions
        assert all(view.num_preemptions <= bound for view in snapshot.running + snapshot.waiting), "A3"

    def _check_idle(self) -> None:
        """P1: nothing is held by anybody."""
        counts = self.scheduler.snapshot().counts
        assert counts.free + counts.cached == self.workload.num_blocks
        assert counts.used == counts.shared == counts.reserved == 0
        assert all(block.refs == 0 for block in self.scheduler.snapshot().blocks)
        self._check_outputs()

    def _check_outputs(self) -> None:
        for request_id, tokens in self.outcome.tokens.items():
            arrival = self.by_id[request_id]
            wanted = expected(self.workload, arrival)
            assert wanted is not None
            ended = self.outcome.finish.get(request_id)
            if ended is None or ended is FinishReason.DEADLINE:
                cut_short = arrival.abort_step if ended is None else arrival.params.deadline_s
                assert cut_short is not None, f"request {request_id} never ended"
                assert tokens == wanted[0][: len(tokens)], f"P2: request {request_id}"
            else:
                assert (tokens, ended) == wanted, f"P2: request {request_id}"


class _Recorder:
    """Keeps the plans that pass to the executor and holds them against the configuration."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.info = run.executor.info

    def submit(self, plan: StepPlan) -> Handle:
        config = self.run.workload.scheduler
        assert plan.entries, "an empty plan"
        assert plan.num_tokens <= config.max_num_batched_tokens, "over budget"
        assert len(plan.entries) <= config.max_num_seqs, "too many sequences"
        self.run.outcome.plans.append(plan)
        return self.run.executor.submit(plan)

    def close(self) -> None:
        self.run.executor.close()
