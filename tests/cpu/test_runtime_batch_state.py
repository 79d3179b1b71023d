"""BatchState under random plans, against lists; and whole workloads under the real scheduler, against the oracle."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcli.config import SchedulerConfig
from pagedcli.core.kv_manager import PagedKV
from pagedcli.core.plan import Admission, PlanEntry, StepPlan, TokenLogprob
from pagedcli.core.request import Request
from pagedcli.core.sampling import SamplingParams
from pagedcli.core.scheduler import Scheduler
from pagedcli.engine.core import EngineCore
from pagedcli.engine.executor import Executor
from pagedcli.runtime.batch_state import BatchState
from pagedcli.runtime.executors import InlineExecutor, ThreadExecutor
from pagedcli.runtime.worker import Worker
from tests.cpu.chain_model import ChainModel, chain_spec, oracle, oracle_logprob, params_for
from tests.graph_support import DoneAgain, LateCopies

MAX_SEQS, MAX_LEN, NUM_BLOCKS = 5, 33, 60


@dataclass
class ListSlot:
    tokens: list[int]
    table: list[int]
    num_prompt: int
    params: SamplingParams
    computed: int = 0


@dataclass
class ListState:
    """Makes random plans that are valid, and keeps what they mean in lists."""

    rng: random.Random
    block_size: int
    slots: dict[int, ListSlot] = field(default_factory=dict)
    freed: list[int] = field(default_factory=list)

    def plan(self, step: int) -> StepPlan:
        for slot in list(self.slots):
            if self.rng.random() < 0.1 or len(self.slots[slot].tokens) > MAX_LEN:
                del self.slots[slot]
                self.freed.append(slot)
        entries: list[PlanEntry] = []
        order = list(range(MAX_SEQS))
        self.rng.shuffle(order)
        for slot in order[: self.rng.randint(1, MAX_SEQS)]:
            entries.append(self._extend(slot) if slot in self.slots else self._admit(slot))
        freed, self.freed = self.freed, []
        return StepPlan(step, tuple(entries), (), tuple(freed))

    def _blocks(self, have: int, tokens: int) -> list[int]:
        return [self.rng.randrange(NUM_BLOCKS) for _ in range(-(-tokens // self.block_size) - have)]

    def _admit(self, slot: int) -> PlanEntry:
        length = self.rng.randint(1, MAX_LEN)
        tokens = [self.rng.randrange(1000) for _ in range(length)]
        num_prompt = self.rng.randint(1, length)
        params = SamplingParams(
            logprobs=self.rng.choice([None, 0, 3]),
            prompt_logprobs=self.rng.choice([None, 1]),
            temperature=1.0,
        )
        start = self.rng.randint(0, length - 1)
        n = self.rng.randint(1, length - start)
        state = ListSlot(tokens, self._blocks(0, start + n), num_prompt, params, start)
        self.slots[slot] = state
        admission = Admission(tuple(tokens), tuple(state.table), num_prompt, slot, slot * 7, params, ())
        return self._entry(slot, n, (), admission)

    def _extend(self, slot: int) -> PlanEntry:
        state = self.slots[slot]
        n = self.rng.randint(1, len(state.tokens) - state.computed)
        blocks = self._blocks(len(state.table), state.computed + n)
        state.table += blocks
        return self._entry(slot, n, tuple(blocks), None)

    def _entry(self, slot: int, n: int, blocks: tuple[int, ...], admission: Admission | None) -> PlanEntry:
        state = self.slots[slot]
        start = state.computed
        samples = start + n == len(state.tokens)
        rows = range(n) if state.params.prompt_logprobs is not None else ()
        prompt_rows = tuple(r for r in rows if start + r + 1 < state.num_prompt)
        state.computed = start + n
        last = (n - 1,) if samples else ()
        return PlanEntry(slot, slot, 0, start, n, samples, prompt_rows + last, blocks, admission)


@given(st.randoms(use_true_random=False), st.sampled_from([1, 3, 4, 16, 40]))
@settings(max_examples=60, deadline=None)
def test_random_plans_are_laid_out_as_lists_say(rng: random.Random, block_size: int) -> None:
    model = ListState(rng, block_size)
    state = BatchState(
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LEN,
        block_size=block_size,
        vocab_size=1000,
        device=torch.device("cpu"),
    )
    for step in range(1, 13):
        plan = model.plan(step)
        batch, sampling = state.apply(plan)
        tokens, positions, cells, logit_rows, starts = [], [], [], [], [0]
        samples: list[tuple[int, int, int]] = []
        logprobs: list[tuple[int, int]] = []
        prompt: list[tuple[int, int, int]] = []
        for entry in plan.entries:
            slot = model.slots[entry.slot]
            for offset in range(entry.n):
                position = entry.start + offset
                if offset in entry.logit_rows:
                    if position + 1 < slot.num_prompt:
                        prompt.append(
                            (len(logit_rows), slot.params.prompt_logprobs or 0, slot.tokens[position + 1])
                        )
                    else:
                        samples.append((len(logit_rows), entry.slot, position + 1))
                        if slot.params.logprobs is not None:
                            logprobs.append((len(logit_rows), slot.params.logprobs))
                    logit_rows.append(len(tokens))
                tokens.append(slot.tokens[position])
                positions.append(position)
                cells.append(slot.table[position // block_size] * block_size + position % block_size)
            starts.append(len(tokens))
        assert batch.token_ids.tolist() == tokens
        assert batch.positions.tolist() == positions
        assert batch.slot_mapping.tolist() == cells
        assert batch.logit_rows.tolist() == logit_rows
        assert batch.query_start.tolist() == starts
        assert list(batch.query_lens) == [entry.n for entry in plan.entries]
        lens = [entry.start + entry.n for entry in plan.entries]
        assert batch.seq_lens.tolist() == list(batch.host_seq_lens) == lens
        for row, entry, length in zip(batch.block_table.tolist(), plan.entries, lens, strict=True):
            used = -(-length // block_size)
            assert row[:used] == model.slots[entry.slot].table[:used]
            assert all(0 <= block < NUM_BLOCKS for block in row)
        assert {
            x.dtype for x in (batch.token_ids, batch.positions, batch.slot_mapping, batch.logit_rows)
        } == {torch.int64}
        assert {x.dtype for x in (batch.query_start, batch.seq_lens, batch.block_table)} == {torch.int32}
        assert [(s.logit_row, s.slot, s.position) for s in sampling.samples] == samples
        assert [(r.logit_row, r.num_top) for r in sampling.logprobs] == logprobs
        asked = [] if sampling.prompt_tokens is None else sampling.prompt_tokens.tolist()
        assert [(r.logit_row, r.num_top, t) for r, t in zip(sampling.prompt, asked, strict=True)] == prompt
        if sampling.samples:
            chosen = [rng.randrange(1000) for _ in samples]
            state.write_tokens(sampling.samples, torch.tensor(chosen))
            for (_, slot_id, _), token in zip(samples, chosen, strict=True):
                model.slots[slot_id].tokens.append(token)


# ---- whole workloads


@dataclass
class Workload:
    """Requests through scheduler, executor and worker, to the end.

    Attributes:
        outputs: Token ids by request id.
        logprobs: Of the sampled tokens, by request id.
        prompt_logprobs: By request id.
    """

    requests: list[Request]
    block_size: int
    num_blocks: int
    budget: int
    depth: int
    graph_sizes: tuple[int, ...] = ()
    outputs: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob | None]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    num_preemptions: int = 0
    num_replays: int = 0

    def run(self, *, threaded: bool) -> None:
        config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=self.budget, depth=self.depth)
        kv = PagedKV(self.num_blocks, self.block_size)
        scheduler = Scheduler(config, kv, max_model_len=48)
        worker = Worker(
            ChainModel(),
            chain_spec(),
            dtype="float32",
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=4,
            max_model_len=48,
            graph_sizes=self.graph_sizes,
            copies=LateCopies(),
        )
        if self.graph_sizes:
            worker.capture(DoneAgain())
        executor: Executor = ThreadExecutor(worker) if threaded else InlineExecutor(worker)
        core = EngineCore(scheduler, executor, self.depth, clock=lambda: 0.0)
        for request in self.requests:
            scheduler.add(request, 0.0)
            self.outputs[request.id], self.logprobs[request.id] = [], []
        while core.has_work:
            for event in core.step():
                assert event.error is None
                if event.token is not None:
                    self.outputs[event.request_id].append(event.token)
                    self.logprobs[event.request_id].append(event.logprob)
                if event.prompt_logprobs is not None:
                    self.prompt_logprobs[event.request_id] = event.prompt_logprobs
        executor.close()
        scheduler.check()
        self.num_preemptions = sum(request.num_preemptions for request in self.requests)
        self.num_replays = worker.num_replays


def make_requests(rng: random.Random, count: int) -> list[Request]:
    """Prompts with common beginnings, several samples of some, every kind of sampling."""
    trunk = [rng.randrange(37) for _ in range(20)]
    requests: list[Request] = []
    while len(requests) < count:
        prompt = trunk[: rng.randint(0, 20)] + [rng.randrange(37) for _ in range(rng.randint(1, 8))]
        params = params_for(rng.randrange(6)).replace(
            max_tokens=rng.randint(4, 14), prompt_logprobs=rng.choice([None, None, 1])
        )
        stop_ids = frozenset(rng.sample(range(37), 2)) if rng.random() < 0.3 else frozenset()
        first, seed = len(requests), rng.randrange(2**64)
        for index in range(rng.choice([1, 1, 3])):
            parent = first if index else None
            requests.append(
                Request(
                    len(requests), list(prompt), len(prompt), params, stop_ids, seed, index, fork_of=parent
                )
            )
    return requests


@given(
    st.randoms(use_true_random=False),
    st.sampled_from([(1, 48), (4, 12), (4, 13), (16, 4), (5, 24)]),
    st.sampled_from([4, 7, 16, 64]),
    st.sampled_from([1, 2, 3]),
    st.booleans(),
    st.sampled_from([(), (1, 2, 4), (3,), (2, 3)]),
)
@settings(max_examples=25, deadline=None)
def test_workloads_give_what_each_request_gives_alone(
    rng: random.Random,
    pool: tuple[int, int],
    budget: int,
    depth: int,
    threaded: bool,
    graph_sizes: tuple[int, ...],
) -> None:
    """P2, I5: pools so small that requests are preempted, forks, prefix hits, chunks, depths 1 to 3, decode graphs."""
    requests = make_requests(rng, 5)
    prompts = [request.tokens[: request.num_prompt] for request in requests]
    work = Workload(requests, *pool, budget, depth, graph_sizes)
    work.run(threaded=threaded)
    for request, prompt in zip(requests, prompts, strict=True):
        assert work.outputs[request.id] == oracle(request, request.params.max_tokens or 0)
        for step, item in enumerate(work.logprobs[request.id]):
            tokens = prompt + work.outputs[request.id]
            num_top = request.params.logprobs
            want = (
                None
                if num_top is None
                else oracle_logprob(tokens[: len(prompt) + step], tokens[len(prompt) + step], num_top)
            )
            assert_logprob(item, want)
        if request.params.prompt_logprobs is not None and request.sample_index == 0 and len(prompt) > 1:
            wanted = [oracle_logprob(prompt[:p], prompt[p], 1) for p in range(1, len(prompt))]
            for item, want in zip(work.prompt_logprobs[request.id], wanted, strict=True):
                assert_logprob(item, want)


def assert_logprob(item: TokenLogprob | None, want: TokenLogprob | None) -> None:
    if item is None or want is None:
        assert item is want
        return
    assert (item.token, item.rank, [t for t, _ in item.top]) == (
        want.token,
        want.rank,
        [t for t, _ in want.top],
    )
    assert [item.logprob, *(v for _, v in item.top)] == pytest.approx(
        [want.logprob, *(v for _, v in want.top)]
    )


def test_the_workloads_do_meet_preemptions_and_graphs() -> None:
    rng = random.Random(3)
    work = Workload(make_requests(rng, 8), 4, 12, 16, 2, (1, 3))
    work.run(threaded=True)
    assert work.num_preemptions > 0
    assert work.num_replays > 10
