"""The native worker on the tests of the torch worker, with the same stand-in for a model; and what is its own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from paged_kernels.native import KVPool, Runtime, Slots

from pagedcli.config import SchedulerConfig
from pagedcli.core.kv_manager import PagedKV
from pagedcli.core.plan import PlanEntry, StepPlan
from pagedcli.core.request import Request
from pagedcli.core.scheduler import Scheduler
from pagedcli.engine.core import EngineCore
from pagedcli.errors import ConfigError
from pagedcli.ops.batch import ForwardBatch
from pagedcli.runtime.executors import InlineExecutor, ThreadExecutor
from pagedcli.runtime.native_worker import NativeWorker, _make_pool
from tests.cpu import test_runtime_worker as shared
from tests.cpu.chain_model import VOCAB_SIZE, ChainModel, chain_spec, oracle, params_for
from tests.cpu.test_runtime_worker import (  # noqa: F401 - run here with the native worker
    PROMPT,
    admission,
    entry,
    expected,
    test_a_poisoned_request_fails_alone_and_may_run_on_until_it_is_ended,
    test_a_shared_prefix_is_read_and_a_copied_block_diverges,
    test_logprobs_and_prompt_logprobs,
    test_nan_prompt_logprobs_are_an_error_not_a_number,
    test_plans_are_launched_ahead_of_every_result,
    test_plans_that_break_an_invariant_are_caught,
    test_preempted_and_readmitted_elsewhere,
    test_prefill_in_chunks_then_decode,
    test_the_largest_step_fills_the_budget_and_runs,
    test_the_longest_sequence_fits_with_its_last_token,
)


class ChainProgram:
    """Runs the stand-in as if it were a recorded program, over the cells of a `KVPool`."""

    def __init__(self, model: ChainModel, kv: KVPool, runtime: Runtime) -> None:
        self._model, self._kv, self._runtime = model, kv, runtime
        self.num_blocks, self.block_size = kv.num_blocks, kv.block_size
        cells = torch.frombuffer(memoryview(kv.buffer), dtype=torch.float32)
        self._cells = cells.view(kv.num_layers, 2, kv.num_blocks, 1, kv.block_size, 2)

    def key(self, layer: int) -> torch.Tensor:
        return self._cells[layer, 0]

    def value(self, layer: int) -> torch.Tensor:
        return self._cells[layer, 1]

    def step(self, slots: Slots, entries: tuple[PlanEntry, ...]) -> tuple[tuple[int, ...], int]:
        arrays = slots.lay_out(entries)
        for array, kind in zip(arrays, (np.int64,) * 3 + (np.int32,) * 3 + (np.int64,), strict=True):
            assert array.dtype == kind
            assert array.flags.c_contiguous
        lens, seq_lens = np.diff(arrays[3]).tolist(), arrays[4].tolist()
        batch = ForwardBatch(*map(torch.from_numpy, arrays), query_lens=lens, host_seq_lens=seq_lens)
        logits = self._model.forward(batch, self).numpy()
        return slots.read(self._runtime, np.ascontiguousarray(logits, np.float32))


def make_worker(model: ChainModel | None = None, *, threads: int = 1, **settings: int) -> NativeWorker:
    sizes = {"num_blocks": 16, "block_size": 4, "max_num_seqs": 3, "max_model_len": 40, **settings}
    kv = KVPool(2, sizes.pop("num_blocks"), 1, sizes.pop("block_size"), 2, "float32")
    runtime = Runtime(threads)
    program = ChainProgram(model or ChainModel(), kv, runtime)
    return NativeWorker(program, kv, runtime, chain_spec(), dtype="float32", **sizes)


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "make_worker", make_worker)


def test_info_tells_what_the_worker_has() -> None:
    info = make_worker(threads=2).info
    assert (info.device, info.dtype, info.threads) == ("cpu", "float32", 2)
    assert (info.num_blocks, info.block_size, info.max_num_seqs, info.max_model_len) == (16, 4, 3, 40)
    assert info.vocab_size == VOCAB_SIZE
    assert info.kv_bytes == 2 * 2 * 16 * 4 * 2 * 4


def test_copies_read_all_sources_before_they_write() -> None:
    kv, runtime = KVPool(2, 5, 1, 4, 2, "float32"), Runtime(2)
    cells = np.frombuffer(memoryview(kv.buffer), np.float32).reshape(4, 5, 8)
    cells[:] = np.random.default_rng(0).standard_normal(cells.shape)
    before = cells.copy()
    kv.copy_blocks(runtime, ((0, 1), (1, 2), (2, 0), (0, 4)))
    np.testing.assert_array_equal(cells, before[:, [2, 0, 1, 3, 0]])


def test_a_pool_that_cannot_be_had_is_refused_with_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"pages take .* GiB for KV.*--num-pages"):
        _make_pool(chain_spec(), 2**50, 4, "float32")


def test_ids_beyond_the_vocabulary_never_reach_the_kernels() -> None:
    for bad in (VOCAB_SIZE, -1):
        plan = StepPlan(1, (entry(0, 0, 2, admitted=admission([3, bad], (1,))),))
        with pytest.raises(AssertionError, match="beyond the vocabulary"):
            make_worker().run(plan)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_workloads_of_every_kind_equal_the_oracle(seed: int, depth: int) -> None:
    """The real scheduler over a pool that forces preemptions, requests of every kind of sampling, forks included."""
    draw = random.Random(seed)
    requests: list[Request] = []
    for index in range(14):
        prompt = [3, 1, 4, 1] * draw.randrange(3) + [
            draw.randrange(VOCAB_SIZE) for _ in range(draw.randrange(1, 9))
        ]
        params = params_for(index).replace(max_tokens=draw.randrange(4, 12), ignore_eos=True)
        requests.append(Request(len(requests), prompt, len(prompt), params, seed=7 + index))
        if index % 5 == 1:
            index_of_parent = requests[-1].id
            child = {"sample_index": 1, "fork_of": index_of_parent}
            requests.append(
                Request(len(requests), list(prompt), len(prompt), params, seed=7 + index, **child)
            )
    wanted = {r.id: oracle(r, r.params.max_tokens or 0) for r in requests}
    config = SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=draw.choice((5, 9, 40)))
    scheduler = Scheduler(config, PagedKV(14, 4), max_model_len=40, watermark=0.0)
    worker = make_worker(num_blocks=14, max_num_seqs=5, threads=1 + seed % 2)
    executor = InlineExecutor(worker) if depth == 1 else ThreadExecutor(worker)
    engine = EngineCore(scheduler, executor, depth)
    for request in requests:
        scheduler.add(request, 0.0)
    seen: dict[int, list[int]] = {request.id: [] for request in requests}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            if event.token is not None:
                seen[event.request_id].append(event.token)
    executor.close()
    assert seen == wanted


def test_slots_that_decode_together_and_apart_give_what_each_gives_alone() -> None:
    """Two slots decode over several blocks and pause apart."""
    worker = make_worker(num_blocks=40)
    first = (
        entry(0, 0, 10, admitted=admission(PROMPT, (1, 2, 3))),
        entry(2, 0, 2, admitted=admission([8, 8], (4,))),
    )
    given = dict(zip((0, 2), ([token] for token in worker.run(StepPlan(1, first)).tokens), strict=True))
    ends, blocks, next_block = {0: 10, 2: 2}, {0: 3, 2: 1}, 5
    for step in range(2, 30):
        slots = (0, 2) if step % 9 else (2,)
        entries = []
        for slot in slots:
            crosses = ends[slot] == 4 * blocks[slot]
            entries.append(entry(slot, ends[slot], 1, new_blocks=(next_block,) if crosses else ()))
            next_block += crosses
            blocks[slot] += crosses
            ends[slot] += 1
        for slot, token in zip(slots, worker.run(StepPlan(step, tuple(entries))).tokens, strict=True):
            given[slot].append(token)
    assert given[0] == expected(PROMPT, len(given[0]))
    assert given[2] == expected([8, 8], len(given[2]))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (entry(0, 12, 1), "a position without a token"),
        (entry(0, 14, 1), "beyond its table"),
        (entry(0, -1, 1), "an empty entry"),
        (entry(0, 10, 1), "samples too early"),
        (entry(7, 0, 1), "slot 7 of 3"),
        (entry(1, 0, 1), "beyond its table"),
    ],
)
def test_a_step_that_does_not_go_on_where_its_slot_is_is_caught(bad: PlanEntry, message: str) -> None:
    worker = make_worker(max_model_len=14)
    worker.run(StepPlan(1, (entry(0, 0, 10, admitted=admission(PROMPT, (1, 2, 3, 4))),)))
    worker.run(StepPlan(2, (entry(0, 10, 1),)))
    with pytest.raises(AssertionError, match=message):
        worker.run(StepPlan(3, (bad,)))
