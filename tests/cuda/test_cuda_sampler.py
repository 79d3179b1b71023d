"""The CUDA sampler on the emulator: request by request against torch's, and whole tiny models with sampled requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_library import emulated_library
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.core.plan import Admission, TokenLogprob
from pagedcli.core.request import Request
from pagedcli.core.sampling import SamplingParams
from pagedcli.models.load import Model, load_model
from pagedcli.ops.cuda_ops import CudaOps
from pagedcli.ops.torch_ops import TorchOps
from pagedcli.runtime.cuda_sampler import CudaSampler
from pagedcli.runtime.sampler import Fault, LogprobRequest, SampleRequest, logprobs, sample
from pagedcli.runtime.samplers import TorchSampler, sampler_for, sampling_notes
from pagedcli.runtime.sampling_rows import make_sampling_row
from tests.cpu.engine_support import Setup, run_requests
from tests.cpu.sampler_helpers import CPU, MINUS_INFINITY, brute_adjusted, brute_choice
from tests.cpu.test_sampler import sampling_cases

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
MAX_LEN = 96
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.02, "logit_bias": {"3": 4, "70000": 1}},
    {"temperature": 5.0, "top_k": 700, "top_p": 0.95, "repetition_penalty": 1.3},
    {"presence_penalty": 1.0, "frequency_penalty": -0.5, "bad_word_ids": [[1, 2], [5]]},
    {"temperature": 2.0, "min_tokens": 100, "allowed_token_ids": list(range(0, 4000, 3)), "max_tokens": None},
    {"temperature": 1.0, "top_p": 0.8, "repetition_penalty": 0.8, "bad_token_ids": [9]},
)


def cuda_sampler(vocab_size: int) -> CudaSampler:
    sampler = sampler_for(CudaOps("cpu", "bfloat16", emulated_library()), vocab_size)
    assert isinstance(sampler, CudaSampler)
    return sampler


def requests(rows: list[int], vocab_size: int) -> list[SampleRequest]:
    """One of each kind in turn; the slot and the numbers of a row do not depend on the others."""
    found = []
    for at, row in enumerate(rows):
        params = SamplingParams(**KINDS[row % len(KINDS)])
        admission = Admission((), (), 20, row % 3, 2**63 + row, params, (0, 7))
        found.append(SampleRequest(at, row, 70 + row, make_sampling_row(admission, vocab_size, CPU)))
    return found


def assert_alike(one: TokenLogprob | None, other: TokenLogprob | None) -> None:
    """The same tokens in the same order, log-probabilities within rounding."""
    if one is None or other is None:
        assert one is other
        return
    assert (one.token, one.rank) == (other.token, other.rank)
    assert [token for token, _ in one.top] == [token for token, _ in other.top]
    assert [one.logprob, *(value for _, value in one.top)] == pytest.approx(
        [other.logprob, *(value for _, value in other.top)], abs=1e-6
    )


def test_tokens_are_torchs_and_do_not_depend_on_the_batch() -> None:
    vocab_size, count = 5003, 2 * len(KINDS)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(count, vocab_size, generator=generator) * 4
    store = torch.randint(0, vocab_size, (count, 100), generator=generator, dtype=torch.int32)
    everyone = requests(list(range(count)), vocab_size)
    ours = cuda_sampler(vocab_size)
    want, _ = sample(logits, everyone, store)
    tokens, faults = ours.sample(logits, everyone, store)
    assert tokens.tolist() == want.tolist()
    assert not faults.any()
    backwards = list(range(count))[::-2]
    again, _ = ours.sample(logits[backwards], requests(backwards, vocab_size), store)
    assert again.tolist() == [tokens[row] for row in backwards]


@given(st.lists(sampling_cases(), min_size=1, max_size=3), st.integers(-(2**63), 2**64 - 1))
@settings(max_examples=40, deadline=None)
def test_a_choice_is_what_brute_force_chooses(cases: list[Any], seed: int) -> None:
    for logits, params, tokens, num_prompt, stop_ids in cases:
        adjusted = brute_adjusted(logits, params, tokens, num_prompt, stop_ids)
        admission = Admission((), (), num_prompt, 3, seed, params, stop_ids)
        row = make_sampling_row(admission, len(logits), CPU)
        store = torch.tensor([[*tokens, 0]], dtype=torch.int32)
        request = SampleRequest(0, 0, len(tokens), row)
        chosen, faults = cuda_sampler(len(logits)).sample(torch.tensor([logits]), [request], store)
        if max(adjusted) == MINUS_INFINITY:
            assert faults.tolist() == [Fault.NOTHING_LEFT]
        else:
            signed = (seed + 2**63) % 2**64 - 2**63
            assert (chosen.tolist(), faults.tolist()) == (
                [brute_choice(adjusted, params, signed, len(tokens), 3)],
                [Fault.NONE],
            )


def test_a_slot_that_is_taken_again_is_packed_again() -> None:
    """With other penalties, and room for them."""
    logits, store = torch.zeros(1, 50), torch.tensor([[4, 4, 0, 0]], dtype=torch.int32)
    ours, answers = cuda_sampler(50), []
    for params in (SamplingParams(), SamplingParams(logit_bias={9: 5}), SamplingParams(bad_token_ids=[0])):
        row = make_sampling_row(Admission((), (), 1, 0, 0, params, ()), 50, CPU)
        answers.append(ours.sample(logits, [SampleRequest(0, 0, 2, row)], store)[0].item())
    assert answers == [0, 9, 1]


def test_logprobs_are_torchs() -> None:
    logits = torch.randn(25, 3001, generator=torch.Generator().manual_seed(6)) * 5
    tokens = torch.randint(0, 3001, (25,), generator=torch.Generator().manual_seed(7))
    wanted = [LogprobRequest(24 - i, i % 21) for i in range(25)]
    ours = cuda_sampler(3001).logprobs(logits, wanted, tokens).read()
    theirs = logprobs(logits, wanted, tokens).read()
    for mine, other in zip(ours, theirs, strict=True):
        assert_alike(mine, other)


def test_more_alternatives_than_tokens() -> None:
    [found] = cuda_sampler(3).logprobs(torch.zeros(1, 3), [LogprobRequest(0, 20)], torch.tensor([1])).read()
    assert [token for token, _ in found.top] == [0, 1, 2]


MODEL_KINDS: tuple[dict[str, Any], ...] = (
    {"logprobs": 3},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "logprobs": 1},
    {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"prompt_logprobs": 2, "logprobs": 2},
    {"temperature": 0.8, "min_p": 0.02, "min_tokens": 6, "logit_bias": {"5": 2.0}},
    {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 0.5},
)


def model_requests() -> list[Request]:
    return [
        Request(i, [(7 * i + j * j) % 300 for j in range(3 + 5 * i)], 3 + 5 * i,
                SamplingParams(max_tokens=8).replace(**kind), frozenset({1, 2}), 2**63 + i)
        for i, kind in enumerate(MODEL_KINDS)
    ]  # fmt: skip


def load(checkpoint: Path, ops: TorchOps) -> Model:
    return load_model(open_checkpoint(checkpoint), ops, MAX_LEN)


def test_whole_models_with_sampled_requests(tiny_checkpoint: Callable[..., Path]) -> None:
    """Our kernels from the embedding to the token: the reference's tokens; of the same logits, and of its own."""
    checkpoint = tiny_checkpoint("llama", **SHAPE, initializer_range=0.3)
    ours = load(checkpoint, CudaOps("cpu", "bfloat16", emulated_library()))
    reference = load(checkpoint, TorchOps("cpu", "bfloat16"))
    everyone = model_requests()
    answers = run_requests(ours, everyone, Setup(), MAX_LEN).answers
    same_logits = run_requests(ours, everyone, Setup(), MAX_LEN, TorchSampler()).answers
    own_logits = run_requests(reference, everyone, Setup(), MAX_LEN).answers
    for request in everyone:
        mine, theirs = answers[request.id], same_logits[request.id]
        assert mine.tokens == theirs.tokens == own_logits[request.id].tokens
        said, told = ([*answer.logprobs, *answer.prompt_logprobs] for answer in (mine, theirs))
        for one, other in zip(said, told, strict=True):
            assert_alike(one, other)


def test_the_same_answers_under_any_schedule(tiny_checkpoint: Callable[..., Path]) -> None:
    """Not of dense products that cuBLAS would compute; here torch computes them in tiles, to the same bits."""
    model = load(tiny_checkpoint("llama", **SHAPE), CudaOps("cpu", "bfloat16", emulated_library()))
    everyone = model_requests()
    expected = run_requests(model, everyone, Setup(), MAX_LEN).answers
    for setup in (Setup(budget=16, max_num_seqs=2), Setup(block_size=4, num_blocks=30, budget=40, depth=3)):
        assert run_requests(model, everyone, setup, MAX_LEN).answers == expected


def test_torch_samples_where_kernels_cannot() -> None:
    ours = CudaOps("cpu", "bfloat16", emulated_library())
    too_many = ours.sampling.max_vocabulary + 1
    assert isinstance(sampler_for(ours, too_many), TorchSampler)
    assert sampling_notes(ours, 1000) == ()
    [note] = sampling_notes(ours, too_many)
    assert "300,000" in note
    assert isinstance(sampler_for(TorchOps("cpu", "float32"), 10), TorchSampler)
    ours.replace("sampling", "a reason")
    assert isinstance(sampler_for(ours, 10), TorchSampler)
    assert ours.report()["sampling"].implementation == "torch"
