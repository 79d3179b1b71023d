"""Decode steps as CUDA graphs on the hardware: the same tokens as op by op, and memory that stays as it is."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.core.plan import Admission, PlanEntry, StepPlan
from pagedcli.core.sampling import SamplingParams
from pagedcli.models.load import Model, load_model
from pagedcli.ops.cuda_ops import CudaOps
from pagedcli.runtime.executors import ThreadExecutor
from pagedcli.runtime.graphs import CudaCaptures
from pagedcli.runtime.profile import largest_step, measure
from pagedcli.runtime.worker import Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
HEADS = {"head_dim": 64, "initializer_range": 0.3}
MAX_LEN, BLOCK_SIZE, SEQS, BLOCKS = 256, 16, 8, 128
LENGTHS = (5, 40, 17, 1, 100)
STEPS = 24


@pytest.fixture(scope="module")
def model(library: ctypes.CDLL, tiny_checkpoint: Callable[..., Path]) -> Model:
    ops = CudaOps("cuda", "bfloat16", library)
    return load_model(open_checkpoint(tiny_checkpoint("llama", **SHAPE, **HEADS)), ops, MAX_LEN)


def make_worker(model: Model, num_blocks: int = BLOCKS, sizes: tuple[int, ...] = ()) -> Worker:
    return Worker(
        model, model.spec, dtype="bfloat16", device="cuda", num_blocks=num_blocks, block_size=BLOCK_SIZE,
        max_num_seqs=SEQS, max_model_len=MAX_LEN, graph_sizes=sizes,
    )  # fmt: skip


def plans(kinds: tuple[dict[str, object], ...]) -> list[StepPlan]:
    """A prefill of every sequence, then decode steps of fewer and fewer of them."""
    width = -(-MAX_LEN // BLOCK_SIZE)
    entries = []
    for slot, length in enumerate(LENGTHS):
        tokens = tuple((7 * slot + 3 * at) % 300 for at in range(length))
        params = SamplingParams(**kinds[slot % len(kinds)])  # type: ignore[arg-type]
        admission = Admission(
            tokens, tuple(range(slot * width, (slot + 1) * width)), length, 0, slot, params, ()
        )
        entries.append(PlanEntry(slot, slot, 0, 0, length, True, (length - 1,), (), admission))
    made = [StepPlan(1, tuple(entries))]
    for step in range(STEPS):
        running = range(step * len(LENGTHS) // STEPS, len(LENGTHS))
        decodes = (PlanEntry(slot, slot, 0, LENGTHS[slot] + step, 1, True, (0,)) for slot in running)
        made.append(StepPlan(2 + step, tuple(decodes)))
    return made


def tokens(worker: Worker, kinds: tuple[dict[str, object], ...]) -> list[tuple[int, ...]]:
    """All plans submitted before any result is read."""
    executor = ThreadExecutor(worker)
    handles = [executor.submit(plan) for plan in plans(kinds)]
    results = [handle.result().tokens for handle in handles]
    executor.close()
    return results


GREEDY: tuple[dict[str, object], ...] = ({},)
MIXED: tuple[dict[str, object], ...] = ({}, {"temperature": 1.0, "top_k": 40}, {"repetition_penalty": 1.2})


@pytest.mark.parametrize("kinds", [GREEDY, MIXED])
def test_tokens_are_those_of_steps_op_by_op(model: Model, kinds: tuple[dict[str, object], ...]) -> None:
    """Sizes that fit every step, so that cuBLAS sees the same number of rows both ways."""
    recorded = make_worker(model, sizes=(1, 2, 3, 4, 5))
    recorded.capture(CudaCaptures(torch.device("cuda")))
    assert tokens(recorded, kinds) == tokens(make_worker(model), kinds)
    assert recorded.num_replays == STEPS


def test_a_row_is_not_touched_by_rows_that_fill_up(model: Model) -> None:
    """One graph for all steps: from the size 5 on, cuBLAS sees 8 rows whoever runs."""
    answers = []
    for _ in range(2):
        worker = make_worker(model, sizes=(8,))
        worker.capture(CudaCaptures(torch.device("cuda")))
        answers.append(tokens(worker, GREEDY))
    assert answers[0] == answers[1]
    alone = make_worker(model, sizes=(8,))
    alone.capture(CudaCaptures(torch.device("cuda")))
    last = len(LENGTHS) - 1
    mine = [StepPlan(p.step, tuple(e for e in p.entries if e.slot == last)) for p in plans(GREEDY)[1:]]
    first = plans(GREEDY)[0]
    found = [alone.run(first).tokens[last], *(alone.run(plan).tokens[0] for plan in mine)]
    assert found == [step[-1] for step in answers[0]]


def test_memory_stays_as_it_is_over_replays(model: Model) -> None:
    worker = make_worker(model, sizes=(1, 2, 4, 8))
    worker.capture(CudaCaptures(torch.device("cuda")))
    everything = plans(GREEDY)

    def run_all() -> tuple[int, int, int]:
        for plan in everything:
            worker.run(plan)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]

    run_all()
    before = run_all()
    for _ in range(10):
        assert run_all() == before


def test_what_was_measured_holds_a_worker_of_that_size(model: Model) -> None:
    """The parts add up: a pool that takes what is left leaves room for the largest step and all graphs."""
    captures = CudaCaptures(torch.device("cuda"))
    plan = largest_step(BLOCK_SIZE, SEQS, 512, MAX_LEN)
    use = measure("cuda", lambda blocks: make_worker(model, blocks, (1, 2, 4, 8)), plan, captures=captures)
    assert use.weights > 0
    assert use.step > 0
    assert use.graphs >= 0
    page = make_worker(model, 1).info.kv_bytes
    blocks = min(use.kv_budget(0.9, page) // page, 100_000)
    worker = make_worker(model, blocks, (1, 2, 4, 8))
    worker.capture(captures)
    worker.run(plan)
    torch.cuda.synchronize()
