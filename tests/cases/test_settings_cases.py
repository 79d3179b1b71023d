"""Settings and sampling fields act in the real engine: each test sees the effect, not the value that was passed on."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pagedcli.api.llm import LLM
from pagedcli.core.request import FinishReason
from pagedcli.core.sampling import SamplingParams
from tests.conftest import MakeModel

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


def tiny_llm(make: MakeModel, **settings: Any) -> LLM:
    defaults = {"device": "cpu", "threads": 1, "num_pages": 64, "page_size": 16, "max_num_seqs": 8, "seed": 3}
    return LLM(str(make("llama")), **{**defaults, **settings})


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 300), k=length)


def peak_running(make: MakeModel, prompts: list[list[int]], **settings: Any) -> int:
    with tiny_llm(make, **settings) as llm:
        # Long enough that the last has come before the first has ended.
        outputs = llm.generate(prompts, GREEDY.replace(max_tokens=140))
        assert all(output.error is None for output in outputs)
        return llm.stats().scheduler.peak_running


def waits_behind_another(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[float]:
    """Seconds that each waited, of requests that all came while an earlier one was running."""
    with llm.stream(prompt_ids(20, 77), GREEDY.replace(max_tokens=200)) as running:
        next(running)
        outputs = llm.generate(prompts, params)
    return [output.seconds.queued for output in outputs]


def test_watermark_keeps_pages_free_in_the_real_engine(tiny_checkpoint: MakeModel) -> None:
    prompts = [prompt_ids(40, seed) for seed in range(2)]
    assert peak_running(tiny_checkpoint, prompts, num_pages=10, watermark=0.0) == 2
    assert peak_running(tiny_checkpoint, prompts, num_pages=10, watermark=0.5) == 1


def test_A4_decode_interval_bounds_how_many_decode_in_the_real_engine(tiny_checkpoint: MakeModel) -> None:
    prompts = [prompt_ids(1, seed) for seed in range(8)]
    assert peak_running(tiny_checkpoint, prompts, max_num_batched_tokens=2) == 2
    assert peak_running(tiny_checkpoint, prompts, max_num_batched_tokens=2, decode_interval=3) == 6


@pytest.mark.parametrize("max_preemptions", [0, 1])
def test_A3_max_preemptions_bounds_them_in_the_real_engine(
    tiny_checkpoint: MakeModel, max_preemptions: int
) -> None:
    prompts = [prompt_ids(40, seed) for seed in range(4)]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with tiny_llm(tiny_checkpoint, num_pages=11, watermark=0.0, max_preemptions=max_preemptions) as llm:
        outputs = llm.generate(prompts, params)
    assert max(output.num_preemptions for output in outputs) == max_preemptions


def test_C2_a_prompt_takes_as_many_steps_as_the_token_budget_says(tiny_checkpoint: MakeModel) -> None:
    with tiny_llm(tiny_checkpoint, max_num_batched_tokens=16) as llm:
        llm.generate(prompt_ids(160), SamplingParams(max_tokens=1))
        assert llm.stats().num_steps == 10


def test_policies_order_the_real_engine(tiny_checkpoint: MakeModel) -> None:
    prompts = [prompt_ids(length, length) for length in (48, 10, 30)]
    params = [GREEDY.replace(priority=value) for value in (3, 1, -1)]
    found = {}
    for policy in ("fcfs", "priority", "shortest"):
        with tiny_llm(tiny_checkpoint, max_num_seqs=1, policy=policy) as llm:
            waits = waits_behind_another(llm, prompts, params)
        found[policy] = sorted(range(3), key=lambda index: waits[index])
    assert found == {"fcfs": [0, 1, 2], "priority": [2, 1, 0], "shortest": [1, 2, 0]}


def test_longest_prefix_policy_runs_what_is_cached_first_in_the_real_engine(
    tiny_checkpoint: MakeModel,
) -> None:
    cached = prompt_ids(48, 9)
    with tiny_llm(tiny_checkpoint, max_num_seqs=1, policy="longest-prefix") as llm:
        llm.generate(cached, GREEDY)
        waits = waits_behind_another(llm, [prompt_ids(49, 1), [*cached, 5]], [GREEDY] * 2)
        assert llm.stats().cached_tokens == 48
    assert waits[1] < waits[0]


def test_allocation_is_what_the_real_engine_does(tiny_checkpoint: MakeModel) -> None:
    """64 pages hold two sequences of 512 tokens, or many short ones."""
    prompts = [prompt_ids(20, seed) for seed in range(6)]
    assert peak_running(tiny_checkpoint, prompts) == 6
    assert peak_running(tiny_checkpoint, prompts, allocation="contiguous") == 2


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_batching_is_what_the_real_engine_does(tiny_checkpoint: MakeModel, batching: str) -> None:
    """Two at once: the third begins when the first has ended, or when the long second one has, after 60 steps."""
    params = [GREEDY.replace(max_tokens=count) for count in (2, 60, 2)]
    prompts = [prompt_ids(20, seed) for seed in range(3)]
    with tiny_llm(tiny_checkpoint, max_num_seqs=2, batching=batching) as llm:
        llm.generate(prompts, params)
        assert llm.stats().num_steps == (60 if batching == "continuous" else 62)


def test_a_deadline_ends_a_request_of_the_real_engine(tiny_checkpoint: MakeModel) -> None:
    with tiny_llm(tiny_checkpoint) as llm:
        (whole,) = llm.generate(prompt_ids(8), GREEDY.replace(max_tokens=400))
        (cut,) = llm.generate(
            prompt_ids(8), GREEDY.replace(max_tokens=400, deadline_s=whole.seconds.total / 4)
        )
    ids = cut.samples[0].token_ids
    assert cut.finish_reason is FinishReason.DEADLINE
    assert 0 < len(ids) < 400
    assert ids == whole.samples[0].token_ids[: len(ids)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_seeded_request_says_the_same_alone_and_under_load(tiny_checkpoint: MakeModel, dtype: str) -> None:
    prompt = prompt_ids(30)
    params = SamplingParams(
        temperature=2.0, top_p=0.95, seed=11, n=3, max_tokens=30, ignore_eos=True, logprobs=2
    )
    with tiny_llm(tiny_checkpoint, dtype=dtype) as llm:
        (alone,) = llm.generate(prompt, params)
    load = [prompt_ids(10 + 7 * seed, seed) for seed in range(1, 9)]
    noise = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)
    busy = {"num_pages": 24, "max_num_batched_tokens": 32, "watermark": 0.0, "dtype": dtype, "depth": 2}
    with tiny_llm(tiny_checkpoint, **busy) as llm:
        outputs = llm.generate([*load[:4], prompt, *load[4:]], [*[noise] * 4, params, *[noise] * 4])
        assert llm.stats().num_preemptions > 0
    assert outputs[4].samples == alone.samples
    assert len({sample.token_ids for sample in alone.samples}) == 3, "n samples differ"


def test_words_and_ids_that_are_forbidden_or_allowed(tiny_checkpoint: MakeModel) -> None:
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=80, ignore_eos=True)
    with tiny_llm(tiny_checkpoint) as llm:
        (free,) = llm.generate("The other", params)
        words = sorted({character for character in free.text if character.isascii() and character.isalpha()})[
            :5
        ]
        assert len(words) == 5
        (without,) = llm.generate("The other", params.replace(bad_words=words))
        (only,) = llm.generate("The other", params.replace(allowed_words=words))
        (biased,) = llm.generate("The other", params.replace(logit_bias={"77": 100.0}))
        (ids,) = llm.generate("The other", params.replace(bad_token_ids=free.samples[0].token_ids))
    assert not {token for token in without.samples[0].token_ids if llm.decode([token]).strip() in words}
    assert set(only.text.replace(" ", "")) <= set(words)
    assert len(only.samples[0].token_ids) == 80
    assert set(biased.samples[0].token_ids) == {77}
    assert not set(ids.samples[0].token_ids) & set(free.samples[0].token_ids)


def test_C11_penalties_count_what_they_should_in_the_real_engine(tiny_checkpoint: MakeModel) -> None:
    """A prompt full of token 7, and a choice between 7 and 9."""
    both = SamplingParams(max_tokens=1, ignore_eos=True, allowed_token_ids=(7, 9))
    first: dict[str, list[int]] = {"": [], "presence": [], "frequency": [], "repetition": []}
    with tiny_llm(tiny_checkpoint) as llm:
        for seed in range(12):
            prompt = [*prompt_ids(10, seed), *[7] * 12, seed + 20]
            for name, chosen in first.items():
                params = both.replace(**{f"{name}_penalty": 2.0}) if name else both
                chosen.append(llm.generate(prompt, params)[0].samples[0].token_ids[0])
        (long,) = llm.generate(prompt, both.replace(max_tokens=60, frequency_penalty=2.0))
    assert 7 in first[""], "else there is nothing to penalize"
    assert first["presence"] == first["frequency"] == first[""], "these count the output only"
    assert first["repetition"] != first[""], "this one counts the prompt"
    assert set(long.samples[0].token_ids) == {7, 9}


def test_C9_temperature_0_is_always_argmax(tiny_checkpoint: MakeModel) -> None:
    prompt = prompt_ids(12)
    with tiny_llm(tiny_checkpoint) as llm:
        (expected,) = llm.generate(prompt, GREEDY)
        variants = [
            GREEDY.replace(top_p=p, top_k=k, min_p=m, seed=seed)
            for p in (1.0, 0.1)
            for k in (-1, 0, 1)
            for m in (0.0, 0.1)
            for seed in (None, 9)
        ]
        outputs = llm.generate([prompt] * len(variants), variants)
    assert {output.samples[0].token_ids for output in outputs} == {expected.samples[0].token_ids}
