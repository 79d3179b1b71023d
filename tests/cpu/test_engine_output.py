"""The output stage alone: stop texts, min_tokens, stop tokens, echo, log-probabilities, times."""

from __future__ import annotations

import itertools

import pytest

from pagedcli.core.plan import TokenEvent, TokenLogprob
from pagedcli.core.request import FinishReason
from pagedcli.core.sampling import SamplingParams
from pagedcli.engine.output import RequestStage
from pagedcli.engine.outputs import Delta, RequestOutput
from pagedcli.engine.prompt import RequestSpec, mixed_seed, prepare
from pagedcli.errors import RequestError
from tests.fakes import EOS, VOCAB_SIZE, ByteTokenizer

TOKENIZER = ByteTokenizer()


def stage_of(params: SamplingParams, prompt: str | list[int] = "ab", *, stream: bool = True) -> RequestStage:
    spec = RequestSpec(prompt, params=params)
    prepared = prepare(spec, TOKENIZER, vocab_size=VOCAB_SIZE)
    return RequestStage("r", prepared, TOKENIZER, arrival=10.0, stream=stream)


def run(
    params: SamplingParams,
    answer: bytes | list[int],
    end: FinishReason = FinishReason.LENGTH,
    prompt: str | list[int] = "ab",
) -> tuple[list[Delta], RequestOutput]:
    """Feed an answer to sample 0, the last token ending it, and return deltas and output."""
    stage = stage_of(params, prompt)
    deltas: list[Delta] = []
    for index, token in enumerate(answer):
        finish = end if index == len(answer) - 1 else None
        delta = stage.take(0, TokenEvent(0, token, index, finish=finish), now=11.0)
        assert delta is not None
        deltas.append(delta)
        if delta.output is not None:
            break
    output = deltas[-1].output
    assert output is not None
    return deltas, output


def test_text_behind_a_stop_is_cut_and_all_tokens_are_kept() -> None:
    _, output = run(SamplingParams(stop=("lo w",)), b"hello world")
    sample = output.samples[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("hel", "stop", "lo w")
    assert bytes(sample.token_ids) == b"hello w"
    assert output.usage.completion_tokens == 7


def test_a_stop_completed_by_the_last_token_counts_as_stop_not_length() -> None:
    _, output = run(SamplingParams(stop=("ld",)), b"world")
    assert (output.text, output.finish_reason) == ("wor", FinishReason.STOP)


def test_text_held_back_for_a_stop_is_released_at_the_end() -> None:
    deltas, output = run(SamplingParams(stop=("world!",)), b"a wor")
    assert [delta.text for delta in deltas] == ["a", " ", "", "", "wor"]
    assert output.text == "a wor"
    assert output.samples[0].stop_reason is None


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 4, 9])
def test_min_tokens_lets_no_stop_be_complete_before(min_tokens: int) -> None:
    """The stop "ab" is complete at tokens 2, 4 and 7: the first of these after min_tokens ends the text."""
    _, output = run(SamplingParams(stop=("ab",), min_tokens=min_tokens), b"ababcab")
    ends = [n for n in (2, 4, 7) if n > min_tokens]
    assert output.text == ("ababcab"[: ends[0] - 2] if ends else "ababcab")
    assert len(output.samples[0].token_ids) == (ends[0] if ends else 7)


def test_a_stop_may_begin_before_min_tokens_and_end_after() -> None:
    deltas, output = run(SamplingParams(stop=("cde",), min_tokens=4), b"abcdefg")
    assert output.text == "ab"
    assert "".join(delta.text for delta in deltas) == "ab"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_kept_in_the_ids_and_its_text_only_if_asked_for(include: bool) -> None:
    params = SamplingParams(stop_token_ids=(ord("!"),), include_stop_str_in_output=include)
    _, output = run(params, b"hi!", FinishReason.STOP)
    sample = output.samples[0]
    assert sample.text == ("hi!" if include else "hi")
    assert bytes(sample.token_ids) == b"hi!"
    assert sample.stop_reason == ord("!")


def test_the_models_own_end_has_no_stop_reason_and_no_text() -> None:
    for skip in (True, False):
        params = SamplingParams(skip_special_tokens=skip)
        _, output = run(params, [*b"hi", EOS], FinishReason.STOP)
        sample = output.samples[0]
        assert (sample.text, sample.stop_reason, sample.token_ids[-1]) == ("hi", None, EOS)
    _, output = run(SamplingParams(skip_special_tokens=False, ignore_eos=True), [*b"hi", EOS])
    assert output.text == "hi</s>"


def test_an_output_keeps_its_first_space_because_it_continues_the_prompt() -> None:
    assert TOKENIZER.decode(b" Paris") == "Paris"
    _, output = run(SamplingParams(), b" Paris")
    assert output.text == " Paris"


def test_an_unfinished_character_shows_at_the_end_only() -> None:
    deltas, output = run(SamplingParams(), "aé".encode()[:-1])
    assert [delta.text for delta in deltas] == ["a", "\ufffd"]
    assert output.text == "a\ufffd"


def test_echo_puts_the_prompt_before_the_first_delta_and_no_stop_is_seen_in_it() -> None:
    deltas, output = run(SamplingParams(echo=True, stop=("ab", "bc")), b"cxy", prompt="ab")
    assert deltas[0].text == "abc"
    assert output.text == "abcxy"
    assert bytes(output.samples[0].token_ids) == b"cxy"
    _, output = run(SamplingParams(echo=True), b"cxy", prompt=list(b"zz"))
    assert output.text == "zzcxy"
    assert output.prompt is None


def test_echo_without_output_is_the_prompt() -> None:
    stage = stage_of(SamplingParams(echo=True, max_tokens=0), "prompt")
    delta = stage.take(0, TokenEvent(0, None, 0, finish=FinishReason.LENGTH), now=12.0)
    assert delta is not None
    assert delta.output is not None
    assert (delta.text, delta.output.text, delta.output.usage.completion_tokens) == ("prompt", "prompt", 0)
    assert delta.output.seconds.first_token is None


def test_logprobs_have_texts_and_offsets() -> None:
    params = SamplingParams(echo=True, logprobs=1, prompt_logprobs=0)
    stage = stage_of(params, "abc")
    prompt = tuple(TokenLogprob(token, -2.0, 3, ()) for token in b"bc")
    for index, token in enumerate("xé".encode()):
        logprob = TokenLogprob(token, -0.5, 1, ((token, -0.5),))
        event = TokenEvent(
            0,
            token,
            index,
            logprob,
            prompt if index == 0 else None,
            FinishReason.LENGTH if index == 2 else None,
        )
        delta = stage.take(0, event, now=11.0)
    assert delta is not None
    assert delta.output is not None
    output = delta.output
    assert output.prompt_logprobs is not None
    assert [(e.text, e.offset) for e in output.prompt_logprobs if e] == [("b", 1), ("c", 2)]
    logprobs = output.samples[0].logprobs
    assert logprobs is not None
    assert [(e.offset, e.logprob, e.rank) for e in logprobs] == [(3, -0.5, 1), (4, -0.5, 1), (4, -0.5, 1)]
    assert [e.top[0].text for e in logprobs] == ["x", "\ufffd", "\ufffd"]


def test_tokens_that_come_by_know_are_in_the_output_of_an_abort() -> None:
    stage = stage_of(SamplingParams(n=2), stream=False)
    assert stage.is_silent
    answer = "aé€b".encode()
    assert stage.take(0, TokenEvent(0, answer[0], 0), now=11.0) is None
    stage.samples[0].know(answer[:3])
    stage.samples[0].know(answer[:5])  # all so far, each time; the last character is not complete
    deltas = stage.end_all(FinishReason.ABORT, now=12.0)
    output = deltas[-1].output
    assert output is not None
    assert [sample.finish_reason for sample in output.samples] == [FinishReason.ABORT] * 2
    assert bytes(output.samples[0].token_ids) == answer[:5]
    assert output.samples[0].text == "aé\ufffd"
    assert (output.samples[1].token_ids, output.samples[1].text) == ((), "")
    assert output.usage.completion_tokens == 5


@pytest.mark.parametrize("num_known", [1, 2, 4])
def test_tokens_by_know_and_by_push_give_one_text(num_known: int) -> None:
    stage = stage_of(SamplingParams(), stream=False)
    answer = "aé€b".encode()
    stage.take(0, TokenEvent(0, answer[0], 0), now=11.0)
    stage.samples[0].know(answer[:num_known])
    for index in range(num_known, len(answer)):
        finish = FinishReason.LENGTH if index == len(answer) - 1 else None
        delta = stage.take(0, TokenEvent(0, answer[index], index, finish=finish), now=12.0)
    assert delta is not None
    assert delta.output is not None
    assert (delta.output.text, bytes(delta.output.samples[0].token_ids)) == ("aé€b", answer)


def test_samples_are_told_apart_and_the_last_one_brings_the_output() -> None:
    stage = stage_of(SamplingParams(n=2))
    order = [(0, ord("a"), None), (1, ord("b"), FinishReason.LENGTH), (0, ord("c"), FinishReason.STOP)]
    deltas = [stage.take(i, TokenEvent(i, token, 0, finish=end), 11.0) for i, token, end in order]
    assert [delta.index for delta in deltas if delta] == [0, 1, 0]
    assert [delta.output is None for delta in deltas if delta] == [True, True, False]
    assert deltas[-1] is not None
    assert deltas[-1].output is not None
    assert [sample.text for sample in deltas[-1].output.samples] == ["b" if i else "ac" for i in (0, 1)]
    assert deltas[-1].output.usage.completion_tokens == 3


def test_seconds_count_from_arrival() -> None:
    stage = stage_of(SamplingParams())
    stage.take(0, TokenEvent(0, 65, 0, first_scheduled=10.25), now=10.5)
    delta = stage.take(0, TokenEvent(0, 65, 1, finish=FinishReason.LENGTH, first_scheduled=10.25), now=12.0)
    assert delta is not None
    assert delta.output is not None
    assert (delta.output.seconds.queued, delta.output.seconds.first_token, delta.output.seconds.total) == (
        0.25,
        0.5,
        2.0,
    )


def test_a_request_that_fails_keeps_what_it_reached() -> None:
    stage = stage_of(SamplingParams(n=2))
    stage.take(0, TokenEvent(0, ord("a"), 0), now=11.0)
    output = stage.fail(RequestError("no"), now=12.0).output
    assert output is not None
    assert str(output.error) == "no"
    assert [(sample.text, sample.finish_reason) for sample in output.samples] == [("a", None), ("", None)]


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        (RequestSpec(), "invalid_request"),
        (RequestSpec("a", messages=[]), "invalid_request"),
        (RequestSpec([]), "empty_prompt"),
        (RequestSpec(""), "empty_prompt"),
        (RequestSpec([1, VOCAB_SIZE]), "invalid_value"),
        (RequestSpec([-1]), "invalid_value"),
        (RequestSpec([1.5]), "invalid_value"),  # type: ignore[list-item]
        (RequestSpec(5), "invalid_value"),  # type: ignore[arg-type]
        (RequestSpec(b"ab"), "invalid_value"),
        (RequestSpec("\udc00"), "invalid_value"),
        (RequestSpec("a", params=SamplingParams(stop_token_ids=(VOCAB_SIZE,))), "invalid_value"),
        (RequestSpec(messages=[{"role": "user", "content": "a"}] * 2), "chat_template"),
    ],
)
def test_what_is_wrong_with_a_request_alone_is_refused_before_the_engine(
    spec: RequestSpec, code: str
) -> None:
    with pytest.raises(RequestError) as caught:
        prepare(spec, TOKENIZER, vocab_size=VOCAB_SIZE)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_stop_ids_are_the_models_unless_ignored_and_the_requests() -> None:
    def stop_ids(params: SamplingParams) -> frozenset[int]:
        return prepare(RequestSpec("a", params=params), TOKENIZER, vocab_size=VOCAB_SIZE).stop_ids

    assert stop_ids(SamplingParams()) == {EOS}
    assert stop_ids(SamplingParams(stop_token_ids=(7,))) == {EOS, 7}
    assert stop_ids(SamplingParams(ignore_eos=True, stop_token_ids=(7,))) == {7}


def test_a_conversation_gets_no_second_start_token() -> None:
    tokenizer = ByteTokenizer(add_bos=True)
    messages = [{"role": "user", "content": "hi"}]
    chat = prepare(RequestSpec(messages=messages), tokenizer, vocab_size=VOCAB_SIZE)
    assert bytes(chat.tokens) == b"[user]hi\n[assistant]"
    assert prepare(RequestSpec("hi"), tokenizer, vocab_size=VOCAB_SIZE).tokens[0] == 256


def test_seeds_of_neighbours_share_nothing() -> None:
    seeds = [mixed_seed(engine, counter) for engine in range(3) for counter in range(100)]
    assert len(set(seeds)) == 300
    assert mixed_seed(0, 1) == 0xE220A8397B1DCDAF  # first output of splitmix64 seeded with 0
    bits = [(a ^ b).bit_count() for a, b in itertools.pairwise(seeds)]
    assert 26 < sum(bits) / len(bits) < 38
