"""Decode steps recorded and played on the emulator: they read nothing but fixed buffers, and give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from emulated_library import emulated_library

from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.config import SchedulerConfig
from pagedcli.core.kv_manager import PagedKV
from pagedcli.core.plan import Admission, PlanEntry, StepPlan
from pagedcli.core.request import Request
from pagedcli.core.sampling import SamplingParams
from pagedcli.core.scheduler import Scheduler
from pagedcli.engine.core import EngineCore
from pagedcli.models.load import Model, load_model
from pagedcli.ops.cuda_ops import KERNELS, CudaOps
from pagedcli.ops.torch_ops import TorchOps
from pagedcli.runtime.cuda_sampler import CudaSampler
from pagedcli.runtime.executors import InlineExecutor, ThreadExecutor
from pagedcli.runtime.samplers import Sampler, sampler_for
from pagedcli.runtime.worker import Worker
from tests.graph_support import LateCopies, TapedLibrary, Tapes
from tests.quant_support import write_quantized_model

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
MAX_LEN, BLOCK_SIZE, SEQS = 64, 5, 6
PROMPTS = [[5, 9, 200, 31, 7], list(range(60, 73)), [17], [3, 2] * 9, [250, 8, 8]]
KINDS = (
    {},
    {"temperature": 2.0, "top_k": 20},
    {"logprobs": 2},
    {"repetition_penalty": 1.3},
    {},
)


def load(checkpoint: Path, dtype: str = "bfloat16") -> tuple[Model, TapedLibrary]:
    library = TapedLibrary(emulated_library())
    ops = CudaOps("cpu", dtype, library)  # type: ignore[arg-type]
    return load_model(open_checkpoint(checkpoint), ops, MAX_LEN), library


def requests() -> list[Request]:
    """That end one after the other."""
    return [
        Request(i, list(prompt), len(prompt), SamplingParams(max_tokens=4 + i).replace(**kind), seed=i + 40)
        for i, (prompt, kind) in enumerate(zip(PROMPTS, KINDS, strict=True))
    ]


def make_worker(
    model: Model, sizes: tuple[int, ...] = (), num_blocks: int = 40, sampler: Sampler | None = None
) -> Worker:
    return Worker(
        model, model.spec, dtype=model.ops.dtype, num_blocks=num_blocks, block_size=BLOCK_SIZE,
        max_num_seqs=SEQS, max_model_len=MAX_LEN, threads=1, graph_sizes=sizes, copies=LateCopies(),
        sampler=sampler,
    )  # fmt: skip


def answers(worker: Worker, depth: int = 1, everyone: list[Request] | None = None) -> dict[int, list[object]]:
    """(token, logprob) of every request, from the real scheduler."""
    everyone = everyone or requests()
    config = SchedulerConfig(max_num_seqs=SEQS, max_num_batched_tokens=40, depth=depth)
    scheduler = Scheduler(config, PagedKV(worker.info.num_blocks, BLOCK_SIZE), max_model_len=MAX_LEN)
    executor = InlineExecutor(worker) if depth == 1 else ThreadExecutor(worker)
    core = EngineCore(scheduler, executor, depth, clock=lambda: 0.0)
    for request in everyone:
        scheduler.add(request, 0.0)
    found: dict[int, list[object]] = {request.id: [] for request in everyone}
    while core.has_work:
        for event in core.step():
            assert event.error is None, event.error
            if event.token is not None:
                found[event.request_id].append((event.token, event.logprob))
    executor.close()
    return found


@pytest.fixture(scope="module")
def llama(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("llama", **SHAPE, initializer_range=0.3)


@pytest.fixture(scope="module")
def expected(llama: Path) -> dict[int, list[object]]:
    """Op by op."""
    return answers(make_worker(load(llama)[0]))


@pytest.mark.parametrize("sizes", [(1, 2, 4, 6), (6,), (3,)])
@pytest.mark.parametrize("depth", [1, 2])
def test_answers_are_the_same_in_graphs_of_any_size(
    llama: Path, expected: dict[int, list[object]], sizes: tuple[int, ...], depth: int
) -> None:
    """Tokens, and log-probabilities to the last bit; sampled and penalized rows beside greedy ones."""
    model, library = load(llama)
    worker = make_worker(model, sizes)
    tapes = Tapes(library)
    worker.capture(tapes)
    assert len(tapes.tapes) == len(sizes)
    assert answers(worker, depth) == expected
    assert worker.num_replays >= 2


def test_the_recorded_steps_give_the_tokens_of_torch(llama: Path, expected: dict[int, list[object]]) -> None:
    """The same requests on torch's own ops, whose attention and norms are not ours."""
    model = load_model(open_checkpoint(llama), TorchOps("cpu", "bfloat16"), MAX_LEN)
    reference = answers(make_worker(model))
    for index in (0, 4):
        assert [item[0] for item in reference[index]] == [item[0] for item in expected[index]]  # type: ignore[index]


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_quantized_models_have_the_same_bits(tmp_path: Path, kind: str) -> None:
    """Filling up keeps a step within the class of rows that the 4-bit kernel was chosen for."""
    folder = write_quantized_model(tmp_path, kind, group=64, act_order=kind == "gptq", **SHAPE).folder
    model, library = load(folder, "float16")
    recorded = make_worker(model, (2, 6))
    recorded.capture(Tapes(library))
    assert answers(recorded) == answers(make_worker(model))


MIXED: tuple[dict[str, object], ...] = (
    {},
    {"temperature": 1.0, "logprobs": 1},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.01, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"logprobs": 3, "presence_penalty": 0.5},
    {"temperature": 1.0, "top_p": 0.8, "logit_bias": {5: 2.0}, "bad_token_ids": [9]},
    {"logprobs": 0},
)


def mixed_requests() -> list[Request]:
    """Longer than a small pool holds at once."""
    return [
        Request(i, [(5 * i + at * at) % 250 for at in range(2 + i)], 2 + i,
                SamplingParams(max_tokens=12).replace(**kind), seed=2**63 + i)
        for i, kind in enumerate(MIXED)
    ]  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2])
def test_graphs_and_the_sampling_kernels_together(llama: Path, depth: int) -> None:
    """Every kind of request side by side, preempted and taken up again: as op by op, and torch's tokens."""
    model, library = load(llama)
    sampler = sampler_for(model.ops, model.spec.vocab_size)
    assert isinstance(sampler, CudaSampler)
    everyone = mixed_requests()
    wanted = answers(make_worker(model, sampler=sampler), 1, mixed_requests())
    torchs = answers(make_worker(model), 1, mixed_requests())
    worker = make_worker(model, (1, 2, 5), 14, sampler_for(model.ops, model.spec.vocab_size))
    worker.capture(Tapes(library))
    assert answers(worker, depth, everyone) == wanted
    assert sum(request.num_preemptions for request in everyone) > 0
    assert worker.num_replays > 10
    for request in everyone:
        tokens = [[token for token, _ in found[request.id]] for found in (wanted, torchs)]  # type: ignore[misc, attr-defined]
        assert tokens[0] == tokens[1]


def test_torchs_ops_can_be_recorded_in_the_place_of_any_kernel_but_attention(llama: Path) -> None:
    """A kernel that is not right on a GPU does not take the graphs with it."""
    library = TapedLibrary(emulated_library())
    ops = CudaOps("cpu", "bfloat16", library)  # type: ignore[arg-type]
    for name in KERNELS:
        if name != "attention":
            ops.replace(name, "a test")
    assert ops.why_eager() is None
    model = load_model(open_checkpoint(llama), ops, MAX_LEN)
    recorded = make_worker(model, (6,))
    recorded.capture(Tapes(library))
    assert answers(recorded) == answers(make_worker(model))


def test_rows_that_fill_up_touch_only_the_scratch_block(llama: Path) -> None:
    """A step of one sequence in a graph for six: the KV of all other blocks keeps its bits."""
    model, library = load(llama)
    worker = make_worker(model, (6,))
    worker.capture(Tapes(library))
    pool = worker._kv._pool
    pool.copy_(torch.arange(pool.numel()).view_as(pool) % 7)
    before = pool.clone()
    admission = Admission((9, 4), (11,), 2, 0, 1, SamplingParams(), ())
    worker.run(StepPlan(1, (PlanEntry(0, 3, 0, 1, 1, True, (0,), (), admission),)))
    assert worker.num_replays == 1
    changed = (pool != before).flatten(3).any(-1).any(0).any(0)
    assert changed.nonzero().flatten().tolist() == [11, 40]


def test_attention_that_the_host_lays_out_is_no_part_of_a_graph(llama: Path) -> None:
    """Torch's: the ops say so themselves."""
    model, _ = load(llama)
    assert isinstance(model.ops, CudaOps)
    assert model.ops.why_eager() is None
    model.ops.replace("attention", "a test")
    assert "attention" in str(model.ops.why_eager())
    assert "attention" in str(TorchOps("cpu", "bfloat16").why_eager())


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.tolist(),
        lambda x: x[0].item(),
        lambda x: x.copy_(torch.from_numpy(np.ones(2, np.float32))),
        lambda x: x + torch.tensor([1.0, 2.0]),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: x[[1, 0]],
    ],
)
def test_a_tape_refuses_what_reads_back_or_sends_from_the_host(op: Callable[[torch.Tensor], object]) -> None:
    x = torch.zeros(2)
    with pytest.raises(AssertionError, match="cannot be part of a CUDA graph"):
        Tapes(TapedLibrary(None)).capture([lambda: op(x)])  # type: ignore[list-item]
