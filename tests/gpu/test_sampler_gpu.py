"""The sampler and the worker on a GPU, against the same on the CPU: the random numbers are the same on every device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_kernels.sampling import log_normalizer, philox, running_sum, tree_sum, vocabulary_noise

from pagedcli.core.plan import Admission, PlanEntry, StepPlan
from pagedcli.core.sampling import SamplingParams
from pagedcli.runtime.executors import ThreadExecutor
from pagedcli.runtime.sampler import Fault, LogprobRequest, SampleRequest, logprobs, sample
from pagedcli.runtime.samplers import Sampler
from pagedcli.runtime.sampling_rows import make_sampling_row
from pagedcli.runtime.transfer import host_copies
from pagedcli.runtime.worker import Worker
from tests.cpu.chain_model import ChainModel, chain_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
DEVICE = "cuda"
VOCAB_SIZE = 5003
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.02, "logit_bias": {"3": 4}},
    {"temperature": 5.0, "top_k": 700, "top_p": 0.95, "repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": -0.5, "bad_word_ids": [[1, 2], [5]]},
    {"temperature": 2.0, "min_tokens": 100, "allowed_token_ids": list(range(0, 4000, 3))},
)


def draw(
    device: str, rows: list[int], bad: int = -1, sampler: Sampler | None = None
) -> tuple[list[int], list[int]]:
    """Tokens and faults of some of 64 rows of every kind; the logits of row `bad` are NaN."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(64, VOCAB_SIZE, generator=generator) * 4
    store = torch.randint(0, VOCAB_SIZE, (64, 100), generator=generator, dtype=torch.int32)
    if bad >= 0:
        logits[bad, 17] = float("nan")
    requests = []
    for at, row in enumerate(rows):
        params = SamplingParams(**KINDS[row % len(KINDS)])
        admission = Admission((), (), 20, row % 3, 2**63 + row, params, (0, 7))
        sampling = make_sampling_row(admission, VOCAB_SIZE, torch.device(device))
        requests.append(SampleRequest(at, row, 90, sampling))
    choose = sample if sampler is None else sampler.sample
    tokens, faults = choose(logits[rows].to(device), requests, store.to(device))
    return tokens.tolist(), faults.tolist()


def test_random_bits_are_the_same() -> None:
    words = torch.randint(0, 2**32, (6, 1000), generator=torch.Generator().manual_seed(2))
    here = philox((words[0], words[1], words[2], words[3]), (words[4], words[5]))
    words = words.to(DEVICE)
    there = philox((words[0], words[1], words[2], words[3]), (words[4], words[5]))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True))


def test_ids_are_those_of_the_cpu() -> None:
    assert draw(DEVICE, list(range(64))) == draw("cpu", list(range(64)))


def test_a_row_samples_the_same_in_any_batch() -> None:
    together, _ = draw(DEVICE, list(range(64)))
    assert draw(DEVICE, list(range(64))[::-1])[0] == together[::-1]
    for row in range(0, 64, 7):
        assert draw(DEVICE, [row])[0] == [together[row]]


def test_sums_and_noise_of_a_row_do_not_depend_on_the_others() -> None:
    rows = torch.randn(9, VOCAB_SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(
        DEVICE
    )
    keys = torch.arange(9, device=DEVICE)
    for function in (tree_sum, running_sum, log_normalizer):
        assert torch.equal(function(rows), torch.cat([function(row[None]) for row in rows]))
    noise = vocabulary_noise(VOCAB_SIZE, keys, keys, keys)
    assert torch.equal(noise[4:5], vocabulary_noise(VOCAB_SIZE, *[keys[4:5]] * 3))


def test_a_nan_fails_its_row_alone() -> None:
    expected, _ = draw(DEVICE, list(range(64)))
    tokens, faults = draw(DEVICE, list(range(64)), bad=8)
    assert [row for row, fault in enumerate(faults) if fault != Fault.NONE] == [8]
    assert [t for row, t in enumerate(tokens) if row != 8] == [
        t for row, t in enumerate(expected) if row != 8
    ]


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.randint(0, 3, (50, 50257), generator=torch.Generator().manual_seed(4)).float()
    row = make_sampling_row(Admission((), (), 0, 0, 0, SamplingParams(), ()), 50257, torch.device(DEVICE))
    requests = [SampleRequest(i, 0, 0, row) for i in range(50)]
    tokens, _ = sample(logits.to(DEVICE), requests, torch.zeros(1, 4, dtype=torch.int32, device=DEVICE))
    assert tokens.tolist() == [int((values == 2).nonzero()[0]) for values in logits]


def test_logprobs_are_those_of_the_cpu() -> None:
    logits = torch.randn(40, VOCAB_SIZE, generator=torch.Generator().manual_seed(6)) * 5
    tokens = torch.randint(0, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(7))
    requests = [LogprobRequest(i, i % 21) for i in range(40)]
    here = logprobs(logits, requests, tokens).read()
    copies = host_copies(torch.device(DEVICE))
    pending = logprobs(logits.to(DEVICE), requests, tokens.to(DEVICE)).to_host(copies.begin)
    copies.mark().wait()
    for mine, cpu in zip(pending.read(), here, strict=True):
        assert (mine.token, mine.rank, [t for t, _ in mine.top]) == (
            cpu.token,
            cpu.rank,
            [t for t, _ in cpu.top],
        )
        assert mine.logprob == pytest.approx(cpu.logprob, abs=1e-9)


def test_plans_launched_ahead_give_the_ids_of_the_cpu() -> None:
    """Depth as deep as the request: no id is read before all plans are submitted."""
    answers = {}
    for device in ("cpu", DEVICE):
        model = ChainModel(device=device)
        worker = Worker(
            model, chain_spec(), dtype="float32", device=device, num_blocks=16, block_size=4, max_num_seqs=3,
            max_model_len=40,
        )  # fmt: skip
        executor = ThreadExecutor(worker)
        params = SamplingParams(temperature=1.0, logprobs=2)
        admission = Admission((3, 1, 4, 1, 5), (7, 2, 9, 4), 5, 0, 11, params, ())
        plans = [StepPlan(1, (PlanEntry(0, 1, 0, 0, 5, True, (4,), (), admission),))]
        plans += [StepPlan(2 + i, (PlanEntry(0, 1, 0, 5 + i, 1, True, (0,)),), ((9, 0),)) for i in range(8)]
        handles = [executor.submit(plan) for plan in plans]
        results = [handle.result() for handle in handles]
        executor.close()
        assert all(result.seconds >= 0.0 for result in results)
        answers[device] = [result.tokens for result in results]
    assert answers[DEVICE] == answers["cpu"]
