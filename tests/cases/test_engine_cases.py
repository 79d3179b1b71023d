"""Cases of cases.md that show at the engine: through the Python API on tiny models, or through the thread on fakes."""

from __future__ import annotations

import queue
import random
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import pytest

from pagedcli.api.llm import LLM
from pagedcli.core.request import FinishReason
from pagedcli.core.sampling import SamplingParams
from pagedcli.core.snapshot import Snapshot
from pagedcli.engine.client import EngineThread
from pagedcli.engine.outputs import Delta, RequestOutput
from pagedcli.engine.prompt import RequestSpec
from pagedcli.errors import RequestError
from tests.conftest import MakeModel
from tests.fakes import FakeExecutor, fake_engine, scripted

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def tiny_llm(make: MakeModel, *, sizes: Mapping[str, int] = MappingProxyType({}), **settings: object) -> LLM:
    defaults = {"device": "cpu", "threads": 1, "num_pages": 64, "max_num_seqs": 8, "seed": 3}
    return LLM(str(make("llama", **sizes)), **{**defaults, **settings})  # type: ignore[arg-type]


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 300), k=length)


def token_ids(outputs: Iterable[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.samples[0].token_ids for output in outputs]


def collect(engine: EngineThread, spec: RequestSpec) -> list[Delta]:
    """All deltas of one request."""
    deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    engine.add(spec, deltas.put)
    result = [deltas.get(timeout=30)]
    while result[-1].output is None:
        result.append(deltas.get(timeout=30))
    return result


def assert_idle_and_whole(snapshot: Snapshot) -> None:
    """P1, naming the owner of each page that leaked."""
    leaked = {block.id: block.owners for block in snapshot.blocks if block.refs}
    assert not leaked
    assert snapshot.counts.free + snapshot.counts.cached == len(snapshot.blocks)
    assert snapshot.counts.reserved == 0


def test_A1_prompts_over_the_pool_are_refused_at_once(tiny_checkpoint: MakeModel) -> None:
    sizes = {"max_position_embeddings": 2048}
    with tiny_llm(tiny_checkpoint, num_pages=50, page_size=16, sizes=sizes) as llm:
        short = [prompt_ids(20, seed) for seed in range(10)]
        long = [prompt_ids(length) for length in (1000, 1000, 1007, 1008, 1009)]
        outputs = llm.generate([*short, *long], GREEDY, errors="return")
        for output in outputs[:10]:
            assert output.error is None
            assert output.finish_reason is FinishReason.LENGTH
        for output, pages in zip(outputs[10:], (63, 63, 63, 63, 64), strict=True):
            assert isinstance(output.error, RequestError)
            assert (output.error.code, output.error.status) == ("prompt_too_long", 400)
            assert f"needs {pages} pages, the pool has 50" in str(output.error)
            assert output.samples == ()
        assert llm.stats().requests_rejected == {"prompt_too_long": 5}
        assert token_ids(llm.generate(short, GREEDY)) == token_ids(outputs[:10])
        assert_idle_and_whole(llm.engine.client.snapshot())


@pytest.mark.parametrize("depth", [1, 2])
def test_A2_preemption_does_not_change_the_output(tiny_checkpoint: MakeModel, depth: int) -> None:
    prompts = [prompt_ids(40, seed) for seed in range(4)]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with tiny_llm(tiny_checkpoint, num_pages=64) as roomy:
        expected = roomy.generate(prompts, params)
    with tiny_llm(tiny_checkpoint, num_pages=11, watermark=0.0, depth=depth) as tight:
        outputs = tight.generate(prompts, params)
        assert tight.stats().num_preemptions > 0
        assert tight.stats().recomputed_tokens > 0
    assert sum(output.num_preemptions for output in outputs) > 0
    for output, other in zip(outputs, expected, strict=True):
        assert output.samples == other.samples
        assert output.usage == other.usage


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_A6_prompt_logprobs_with_a_cached_prefix(tiny_checkpoint: MakeModel, temperature: float) -> None:
    params = SamplingParams(
        max_tokens=4, prompt_logprobs=1, logprobs=1, ignore_eos=True, temperature=temperature, seed=1
    )
    prompt = prompt_ids(33)
    with tiny_llm(tiny_checkpoint, page_size=16) as llm:
        warm = llm.generate(prompt, GREEDY)
        first, second = (llm.generate(prompt, params)[0] for _ in range(2))
        assert warm[0].usage.cached_tokens == 0
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 33
    assert first.prompt_logprobs[0] is None
    entries = first.prompt_logprobs[1:]
    assert [entry.token_id for entry in entries if entry is not None] == prompt[1:]
    assert all(entry is not None and entry.logprob < 0 and len(entry.top) == 1 for entry in entries)
    assert second.prompt_logprobs == first.prompt_logprobs
    assert second.samples == first.samples


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_A7_full_cache_hit(tiny_checkpoint: MakeModel, length: int) -> None:
    prompt = prompt_ids(length)
    with tiny_llm(tiny_checkpoint, page_size=16) as llm:
        outputs = [llm.generate(prompt, GREEDY)[0] for _ in range(5)]
    assert len({output.samples[0].token_ids for output in outputs}) == 1
    assert outputs[0].usage.cached_tokens == 0
    # The last prompt token is always computed, so a prompt of whole pages misses its last one.
    assert {output.usage.cached_tokens for output in outputs[1:]} == {(length - 1) // 16 * 16}


def test_A8_what_does_not_fit_is_the_same_error_with_and_without_prefix_caching(
    tiny_checkpoint: MakeModel,
) -> None:
    messages = []
    for caching in (True, False):
        with tiny_llm(tiny_checkpoint, num_pages=4, prefix_caching=caching) as llm:
            with pytest.raises(RequestError) as caught:
                llm.generate(prompt_ids(100), GREEDY)
            messages.append((str(caught.value), caught.value.code, caught.value.status))
            (output,) = llm.generate(prompt_ids(20), GREEDY)
            assert len(output.samples[0].token_ids) == 12
    assert messages[0] == messages[1]
    assert "needs 7 pages, the pool has 4" in messages[0][0]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("depth", [1, 2])
def test_A9_no_page_is_lost_over_500_requests(page_size: int, depth: int) -> None:
    rng = random.Random(page_size * 10 + depth)
    executor = FakeExecutor(
        num_blocks=320 // page_size, block_size=page_size, max_model_len=200, threaded=depth > 1
    )
    engine = fake_engine(executor, depth=depth, max_num_batched_tokens=64, max_preemptions=2)
    done: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    stems = ["the quick brown fox " * 3, "lorem ipsum dolor sit ", ""]
    ids = []
    for number in range(500):
        prompt = rng.choice(stems) + "x" * rng.randrange(1, 40)
        params = SamplingParams(
            max_tokens=rng.randrange(1, 50),
            temperature=rng.choice([0.0, 1.0]),
            n=rng.choice([1, 1, 1, 2, 3]),
            stop=rng.choice([(), ("e",), ("ta", "oi")]),
        )
        ids.append(
            engine.add(RequestSpec(prompt, params=params, request_id=str(number), stream=False), done.put)
        )
        if rng.random() < 0.15:
            engine.abort(rng.choice(ids))
        if rng.random() < 0.05:
            engine.snapshot()  # lets the engine catch up, so that aborts meet running requests
    outputs = [done.get(timeout=60).output for _ in ids]
    assert engine.drain(timeout_s=10)
    reasons = {sample.finish_reason for output in outputs if output for sample in output.samples}
    assert {output.request_id for output in outputs if output} == set(ids)
    assert all(output is not None and output.error is None for output in outputs)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
    assert engine.stats().num_preemptions > 0
    assert_idle_and_whole(engine.snapshot())
    engine.close()


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_A10_answers_do_not_mix_in_a_batch(
    tiny_checkpoint: MakeModel, prefix_caching: bool, threads: int
) -> None:
    """Layers as wide as SmolLM2's, so that they are shared among threads; alone, they run on one."""
    sizes = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    prompts = [f"The passphrase is cobalt fig {n}. Say it: cobalt fig {n}" for n in range(5)]
    params = GREEDY.replace(
        max_tokens=6, logprobs=1
    )  # they show a mixture that is too slight to change an id
    with tiny_llm(tiny_checkpoint, dtype="bfloat16", prefix_caching=False, threads=1, sizes=sizes) as llm:
        alone = [llm.generate(prompt, params)[0] for prompt in prompts]
    settings = {"dtype": "bfloat16", "prefix_caching": prefix_caching, "threads": threads, "sizes": sizes}
    with tiny_llm(tiny_checkpoint, **settings) as llm:
        assert llm.engine.client.info.threads == threads
        together = llm.generate(prompts, params)
        again = llm.generate(prompts, params)
    expected = [output.samples for output in alone]
    assert [output.samples for output in together] == expected
    assert [output.samples for output in again] == expected
    assert len(set(token_ids(alone))) == 5
    assert all((output.usage.cached_tokens > 0) == prefix_caching for output in again)


def stream_equals_whole(engine: EngineThread, prompt: str, params: SamplingParams) -> RequestOutput:
    """P3, and everything else that a stream must be; returns the output."""
    deltas = collect(engine, RequestSpec(prompt, params=params))
    output = deltas[-1].output
    assert output is not None
    sample = output.samples[0]
    assert "".join(delta.text for delta in deltas) == sample.text
    assert tuple(token for delta in deltas for token in delta.token_ids) == sample.token_ids
    (whole,) = collect(engine, RequestSpec(prompt, params=params, stream=False))
    assert whole.output is not None
    assert whole.output.samples == output.samples
    return output


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_A11_no_character_of_a_stop_text_is_streamed(depth: int) -> None:
    text = "The sky is very blue today, they say."
    engine = fake_engine(FakeExecutor(scripted({"sky?": text})), depth=depth)
    for start in range(len(text) - 7):
        stop = text[start : start + 7]
        deltas = collect(engine, RequestSpec("sky?", params=SamplingParams(stop=(stop,))))
        sent = "".join(delta.text for delta in deltas)
        assert sent == text[: text.index(stop)]
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert deltas[-1].output is not None
        assert deltas[-1].output.samples[0].stop_reason == stop
        assert len(deltas[-1].output.samples[0].token_ids) == text.index(stop) + 7
    # Text waits only while it can still be the beginning of a stop.
    deltas = collect(engine, RequestSpec("sky?", params=SamplingParams(stop=("very red",))))
    emitted = [delta.text for delta in deltas if delta.text]
    assert "very b" in emitted
    assert "".join(emitted) == text
    engine.close()


def test_A12_a_stop_need_not_end_at_a_token() -> None:
    answers = {
        "a": [b" Paris", b" is", b" big"],
        "b": [b"What", b" it", b" amounts", b" to"],
    }
    engine = fake_engine(FakeExecutor(scripted({key: b"".join(words) for key, words in answers.items()})))
    for prompt, stop, expected in [("a", "Pari", " "), ("b", "it am", "What "), ("b", "t", "Wha")]:
        output = stream_equals_whole(engine, prompt, SamplingParams(stop=(stop,)))
        assert output.text == expected
        kept = stream_equals_whole(
            engine, prompt, SamplingParams(stop=(stop,), include_stop_str_in_output=True)
        )
        assert kept.text == expected + stop
    engine.close()


def test_A12_on_tokens_of_many_characters(tiny_checkpoint: MakeModel) -> None:
    """Any piece of what a model says, as a stop, cuts the text right before its first occurrence."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=5)
    with tiny_llm(tiny_checkpoint) as llm:
        (output,) = llm.generate("The other", params)
        text = output.text
        for start in range(0, len(text) - 3, 5):
            stop = text[start : start + 3]
            (cut,) = llm.generate(
                "The other",
                SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=5, stop=(stop,)),
            )
            assert cut.text == text[: text.index(stop)]
            assert cut.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_A13_streamed_characters_are_whole(interval: int) -> None:
    text = "한국어 문장과 😀👩‍👩‍👧 그리고 é, ñ"
    broken = text.encode() + b"\xea\xb9"
    engine = fake_engine(FakeExecutor(scripted({"whole": text, "broken": broken}), max_model_len=1000))
    for prompt, expected in (("whole", text), ("broken", text + "\ufffd")):
        deltas = [d.text for d in collect(engine, RequestSpec(prompt))]
        groups = ["".join(deltas[i : i + interval]) for i in range(0, len(deltas), interval)]
        assert "".join(groups) == expected
        assert all("\ufffd" not in group for group in groups[:-1])
        assert stream_equals_whole(engine, prompt, SamplingParams()).text == expected
    engine.close()


def test_C2_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    executor = FakeExecutor(num_blocks=64, max_model_len=600, threaded=True, step_seconds=0.002)
    engine = fake_engine(executor, max_num_batched_tokens=16)
    order: queue.SimpleQueue[str] = queue.SimpleQueue()
    params = SamplingParams(max_tokens=1)
    for name, length in (("long", 320), ("short", 10)):
        engine.add(
            RequestSpec("x" * length, params=params, request_id=name),
            lambda delta: order.put(delta.request_id),
        )
    assert order.get(timeout=30) == "short"
    assert order.get(timeout=30) == "long"
    engine.close()
    first_of_short = next(
        plan.step for plan in executor.plans if any(e.request_id == 1 for e in plan.entries)
    )
    assert first_of_short <= 5


def test_C4_calls_on_one_object_keep_their_results(tiny_checkpoint: MakeModel) -> None:
    prompts = [prompt_ids(5 + seed, seed) for seed in range(6)]
    with tiny_llm(tiny_checkpoint, max_num_seqs=4) as llm:
        first = llm.generate(prompts, GREEDY)
        second = llm.generate(prompts[::-1], GREEDY)
    assert [list(output.prompt_token_ids) for output in first] == prompts
    assert token_ids(second) == token_ids(first)[::-1]
    assert len(set(token_ids(first))) == 6


def test_P1_P5_everything_ends_and_every_page_comes_back(tiny_checkpoint: MakeModel) -> None:
    rng = random.Random(1)
    prompts = [prompt_ids(rng.randrange(1, 150), seed) for seed in range(20)]
    params = [
        SamplingParams(
            max_tokens=rng.choice([0, 1, 7, 40, None]),
            n=rng.choice([1, 2]),
            temperature=1.0,
            max_pages=rng.choice([None, 10]),
            ignore_eos=True,
        )
        for _ in prompts
    ]
    with tiny_llm(tiny_checkpoint, num_pages=12, max_num_batched_tokens=32, max_num_seqs=6) as llm:
        outputs = llm.generate(prompts, params, errors="return")
        assert_idle_and_whole(llm.engine.client.snapshot())
        assert llm.stats().num_unfinished == 0
    for output, asked in zip(outputs, params, strict=True):
        assert output.error is None
        assert len(output.samples) == asked.n
        assert all(sample.finish_reason in ("length", "page_cap") for sample in output.samples)


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("page_size", [1, 16])
def test_P2_greedy_output_is_the_same_alone_batched_chunked_and_warm(
    tiny_checkpoint: MakeModel, chunk: int, page_size: int
) -> None:
    prompts = [prompt_ids(length, length) for length in (3, 17, 50)]
    with tiny_llm(tiny_checkpoint) as llm:
        alone = token_ids(llm.generate(prompt, GREEDY)[0] for prompt in prompts)
    settings = {"max_num_batched_tokens": chunk, "page_size": page_size, "num_pages": 1024 // page_size}
    with tiny_llm(tiny_checkpoint, **settings) as llm:
        assert token_ids(llm.generate(prompts, GREEDY)) == alone
        warm = llm.generate(prompts, GREEDY)
        assert token_ids(warm) == alone
        assert warm[2].usage.cached_tokens > 0


def test_P3_stream_equals_whole_for_samples_echo_and_stops(tiny_checkpoint: MakeModel) -> None:
    params = SamplingParams(
        max_tokens=30, temperature=1.0, n=3, seed=2, echo=True, stop=("th", "e"), logprobs=1, ignore_eos=True
    )
    with tiny_llm(tiny_checkpoint) as llm:
        (whole,) = llm.generate("The other one", params)
        with llm.stream("The other one", params) as stream:
            deltas = list(stream)
    for sample in whole.samples:
        mine = [delta for delta in deltas if delta.index == sample.index]
        assert "".join(delta.text for delta in mine) == sample.text
        assert sample.text.startswith("The other one")
        assert tuple(i for delta in mine for i in delta.token_ids) == sample.token_ids
        assert tuple(i for delta in mine for i in delta.logprobs or ()) == sample.logprobs
        assert [delta.finish_reason for delta in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == sample.finish_reason


def test_P4_bad_requests_disturb_nobody(tiny_checkpoint: MakeModel) -> None:
    good = [prompt_ids(10, seed) for seed in range(4)]
    bad: list[list[int] | str] = [[], [5, 99999], [-1], "\ud800", prompt_ids(5000), [1, "x"]]  # type: ignore[list-item]
    with tiny_llm(tiny_checkpoint) as llm:
        expected = token_ids(llm.generate(good, GREEDY))
        mixed: list[list[int] | str] = [item for pair in zip(good, bad, strict=False) for item in pair]
        outputs = llm.generate(mixed + bad[4:], GREEDY, errors="return")
        assert token_ids(outputs[0:8:2]) == expected
        for output in (*outputs[1:8:2], *outputs[8:]):
            assert isinstance(output.error, RequestError)
            assert output.error.status == 400
            assert output.samples == ()
        fields = SamplingParams(logit_bias=((299, 1.0),), stop_token_ids=(5000,))
        with pytest.raises(RequestError, match="stop_token_ids has token id 5000"):
            llm.generate(good[0], fields)
        assert token_ids(llm.generate(good, GREEDY)) == expected
