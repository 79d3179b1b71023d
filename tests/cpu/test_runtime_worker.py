"""Plans made by hand through a worker, against a model that notices every wrong cell."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from pagedcli.core.plan import NO_TOKEN, Admission, PlanEntry, StepPlan
from pagedcli.core.request import Request
from pagedcli.core.sampling import SamplingParams
from pagedcli.errors import ConfigError
from pagedcli.ops.batch import ForwardBatch, KVCache
from pagedcli.runtime.executors import ThreadExecutor
from pagedcli.runtime.kv_cache import PagedKVCache
from pagedcli.runtime.profile import largest_step
from pagedcli.runtime.worker import Worker
from tests.cpu.chain_model import VOCAB_SIZE, ChainModel, chain_spec, oracle, oracle_logprob

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
SAMPLED = SamplingParams(temperature=1.0, logprobs=3)


def make_worker(model: ChainModel | None = None, **settings: int) -> Worker:
    sizes = {"num_blocks": 16, "block_size": 4, "max_num_seqs": 3, "max_model_len": 40, **settings}
    return Worker(model or ChainModel(), chain_spec(), dtype="float32", **sizes)


def admission(
    tokens: list[int],
    table: tuple[int, ...],
    params: SamplingParams = SAMPLED,
    *,
    num_prompt: int = 0,
    index: int = 0,
) -> Admission:
    return Admission(tuple(tokens), table, num_prompt or len(tokens), index, 11, params, ())


def entry(
    slot: int, start: int, n: int, *, samples: bool = True, new_blocks: tuple[int, ...] = (),
    admitted: Admission | None = None, logit_rows: tuple[int, ...] | None = None,
) -> PlanEntry:  # fmt: skip
    if logit_rows is None:
        logit_rows = (n - 1,) if samples else ()
    return PlanEntry(100 + slot, slot, 0, start, n, samples, logit_rows, new_blocks, admitted)


def expected(tokens: list[int], count: int, params: SamplingParams = SAMPLED, index: int = 0) -> list[int]:
    return oracle(Request(0, list(tokens), len(tokens), params, seed=11, sample_index=index), count)


def test_prefill_in_chunks_then_decode() -> None:
    worker = make_worker()
    first = entry(1, 0, 3, samples=False, admitted=admission(PROMPT, (7,)))
    result = worker.run(StepPlan(1, (first,)))
    assert (result.step, result.tokens, result.logprobs, result.prompt_logprobs) == (
        1,
        (NO_TOKEN,),
        (None,),
        ((),),
    )
    assert result.errors == ()
    tokens = list(worker.run(StepPlan(2, (entry(1, 3, 7, new_blocks=(2, 9)),))).tokens)
    for step in range(6):
        blocks = {12: (0,)}.get(10 + step, ())
        tokens += worker.run(StepPlan(3 + step, (entry(1, 10 + step, 1, new_blocks=blocks),))).tokens
    assert tokens == expected(PROMPT, 7)


def test_logprobs_and_prompt_logprobs() -> None:
    worker = make_worker()
    params = SAMPLED.replace(prompt_logprobs=2)
    chunk = entry(
        0, 0, 6, samples=False, logit_rows=tuple(range(6)), admitted=admission(PROMPT, (1, 2, 3), params)
    )
    rest = entry(0, 6, 4, logit_rows=(0, 1, 2, 3))
    results = [worker.run(StepPlan(1, (chunk,))), worker.run(StepPlan(2, (rest,)))]
    prompt = [item for result in results for item in result.prompt_logprobs[0]]
    assert len(prompt) == len(PROMPT) - 1
    wanted = [oracle_logprob(PROMPT[:p], PROMPT[p], 2) for p in range(1, len(PROMPT))]
    token = results[1].tokens[0]
    chosen = results[1].logprobs[0]
    assert chosen is not None
    for got, want in zip([*prompt, chosen], [*wanted, oracle_logprob(PROMPT, token, 3)], strict=True):
        assert (got.token, got.rank) == (want.token, want.rank)
        assert [t for t, _ in got.top] == [t for t, _ in want.top]
        assert [got.logprob, *(v for _, v in got.top)] == pytest.approx(
            [want.logprob, *(v for _, v in want.top)]
        )


def test_a_shared_prefix_is_read_and_a_copied_block_diverges() -> None:
    """Slot 1 shares slot 0's full blocks 4 and 5; slot 2 takes a copy of its partial block 6 as block 8."""
    worker = make_worker()
    worker.run(StepPlan(1, (entry(0, 0, 10, admitted=admission(PROMPT, (4, 5, 6))),)))
    other = [*PROMPT[:8], 30, 31, 32]
    shared = entry(1, 8, 3, admitted=admission(other, (4, 5, 7)))
    child = entry(2, 9, 1, admitted=admission(PROMPT, (4, 5, 8), index=1))
    result = worker.run(StepPlan(2, (entry(0, 10, 1), shared, child), copies=((6, 8),)))
    assert list(result.tokens) == [
        expected(PROMPT, 2)[1],
        expected(other, 1)[0],
        expected(PROMPT, 1, index=1)[0],
    ]
    result = worker.run(StepPlan(3, (entry(2, 10, 1), entry(0, 11, 1))))
    assert list(result.tokens) == [expected(PROMPT, 2, index=1)[1], expected(PROMPT, 3)[2]]


def test_copies_read_all_sources_before_they_write() -> None:
    kv = PagedKVCache(2, 5, 1, 4, 2, torch.float32, torch.device("cpu"))
    for layer in range(2):
        kv.key(layer).copy_(torch.randn(5, 1, 4, 2))
        kv.value(layer).copy_(torch.randn(5, 1, 4, 2))
    before = [(kv.key(layer).clone(), kv.value(layer).clone()) for layer in range(2)]
    kv.copy_blocks(((0, 1), (1, 2), (2, 0), (0, 4)))
    for layer, pair in enumerate(before):
        for old, new in zip(pair, (kv.key(layer), kv.value(layer)), strict=True):
            assert torch.equal(new, old[[2, 0, 1, 3, 0]])
    assert kv.num_bytes == 2 * 2 * 5 * 4 * 2 * 4
    assert kv.key(1).is_contiguous()


def test_preempted_and_readmitted_elsewhere() -> None:
    worker = make_worker()
    want = expected(PROMPT, 5)
    worker.run(StepPlan(1, (entry(0, 0, 10, admitted=admission(PROMPT, (1, 2, 3))),)))
    worker.run(StepPlan(2, (entry(0, 10, 1),)))
    # Slot 0 and its blocks go to another request at once; the first comes back with two tokens more.
    other = entry(0, 0, 2, admitted=admission([8, 8], (2,)))
    assert list(worker.run(StepPlan(3, (other,), freed_slots=(0,))).tokens) == expected([8, 8], 1)
    back = entry(2, 0, 12, admitted=admission([*PROMPT, *want[:2]], (3, 1, 5), num_prompt=10))
    result = worker.run(StepPlan(4, (entry(0, 2, 1), back)))
    assert list(result.tokens) == [expected([8, 8], 2)[1], want[2]]
    worker.run(StepPlan(5, (entry(2, 12, 1, new_blocks=(9,)),)))
    assert list(worker.run(StepPlan(6, (entry(2, 13, 1),), freed_slots=(0,))).tokens) == [want[4]]


def test_plans_are_launched_ahead_of_every_result() -> None:
    """Nothing is read until all is submitted: the sampled ids go from step to step inside the worker."""
    executor = ThreadExecutor(make_worker())
    handles = [executor.submit(StepPlan(1, (entry(0, 0, 10, admitted=admission(PROMPT, (1, 2, 3))),)))]
    for step in range(6):
        blocks = (5,) if step == 2 else ()
        handles.append(executor.submit(StepPlan(2 + step, (entry(0, 10 + step, 1, new_blocks=blocks),))))
    assert [handle.result().tokens[0] for handle in handles] == expected(PROMPT, 7)
    executor.close()


def test_a_poisoned_request_fails_alone_and_may_run_on_until_it_is_ended() -> None:
    worker = make_worker(ChainModel(poison=(9, 9)))
    sick = entry(0, 0, 2, admitted=admission([9, 9], (1, 2)))
    well = entry(1, 0, 10, admitted=admission(PROMPT, (3, 4, 5)))
    result = worker.run(StepPlan(1, (sick, well)))
    assert result.tokens == (NO_TOKEN, expected(PROMPT, 1)[0])
    assert result.logprobs[0] is None
    assert result.logprobs[1] is not None
    assert result.errors[1] is None
    assert "NaN" in str(result.errors[0])
    again = worker.run(StepPlan(2, (entry(0, 2, 1), entry(1, 10, 1))))
    assert again.tokens[1] == expected(PROMPT, 2)[1]
    assert again.errors[0] is not None


def test_nan_prompt_logprobs_are_an_error_not_a_number() -> None:
    worker = make_worker(ChainModel(poison=(9, 9)))
    params = SamplingParams(prompt_logprobs=1, max_tokens=0)
    sick = entry(0, 0, 4, samples=False, logit_rows=(0, 1, 2), admitted=admission([9, 9, 1, 2], (1,), params))
    result = worker.run(StepPlan(1, (sick,)))
    assert result.errors[0] is not None
    assert result.prompt_logprobs == ((),)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (entry(0, 0, 5, admitted=admission(PROMPT, (1,)), samples=False), "beyond its table"),
        (entry(0, 0, 11, admitted=admission(PROMPT, (1, 2, 3))), "without a token"),
        (entry(0, 0, 9, admitted=admission(PROMPT, (1, 2, 3))), "samples too early"),
    ],
)
def test_plans_that_break_an_invariant_are_caught(bad: PlanEntry, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        make_worker().run(StepPlan(1, (bad,)))


def test_the_longest_sequence_fits_with_its_last_token() -> None:
    worker = make_worker(max_model_len=11)
    assert worker.run(StepPlan(1, (entry(0, 0, 10, admitted=admission(PROMPT, (1, 2, 3))),))).tokens != (
        NO_TOKEN,
    )
    last = worker.run(StepPlan(2, (entry(0, 10, 1),)))
    assert list(last.tokens) == expected(PROMPT, 2)[1:]


def test_info_tells_what_the_worker_has() -> None:
    info = make_worker(threads=1).info
    assert (info.device, info.dtype, info.threads) == ("cpu", "float32", 1)
    assert (info.num_blocks, info.block_size, info.max_num_seqs, info.max_model_len) == (16, 4, 3, 40)
    assert info.vocab_size == VOCAB_SIZE
    assert info.kv_bytes == 2 * 2 * 16 * 4 * 2 * 4


def test_the_thread_count_is_set_on_the_thread_that_computes() -> None:
    seen: dict[str, int] = {}

    class Looks(ChainModel):
        def forward(self, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
            seen[threading.current_thread().name] = torch.get_num_threads()
            assert torch.is_inference_mode_enabled()
            return super().forward(batch, kv)

    before = torch.get_num_threads()
    executor = ThreadExecutor(make_worker(Looks(), threads=3))
    executor.submit(StepPlan(1, (entry(0, 0, 10, admitted=admission(PROMPT, (1, 2, 3))),))).result()
    executor.close()
    torch.set_num_threads(before)
    assert seen == {"paged-executor": 3}


def test_a_pool_that_cannot_be_had_is_refused_with_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"pages take .* GiB for KV.*--num-pages"):
        make_worker(num_blocks=2**50)


def test_a_device_out_of_memory_is_told_with_the_flags() -> None:
    class Greedy(ChainModel):
        def forward(self, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    with pytest.raises(ConfigError, match=r"10 tokens .*2 GiB.*--max-num-batched-tokens"):
        make_worker(Greedy()).run(StepPlan(1, (entry(0, 0, 10, admitted=admission(PROMPT, (1, 2, 3))),)))


def test_the_largest_step_fills_the_budget_and_runs() -> None:
    plan = largest_step(block_size=4, max_num_seqs=3, max_num_batched_tokens=25, max_model_len=40)
    assert plan.num_tokens == 24
    blocks = sum(len(e.admission.table) for e in plan.entries if e.admission)
    result = make_worker(num_blocks=blocks).run(plan)
    assert all(len(items) == 7 for items in result.prompt_logprobs)
    assert all(item is not None and not math.isnan(item.logprob) for item in result.logprobs)
    assert largest_step(4, 8, 3, 40).num_tokens == 3
    assert largest_step(4, 1, 100, 40).num_tokens == 40
