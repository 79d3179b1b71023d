"""The default model over HTTP: answers that mean something, in every form the same."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagedcli.api.build import build_engine
from pagedcli.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from tests.serve.support import Served, served, texts_of

pytestmark = pytest.mark.model
CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
QUESTIONS = [
    "Name a colour.",
    "Was ist zwei plus zwei?",
    "写一首关于雨的诗。",
    "Reply with an emoji 👩‍👩‍👧",
    "Count to ten.",
]


@pytest.fixture(scope="module")
def smol(smollm2_gguf: Path) -> Iterator[Served]:
    config = EngineConfig(
        ModelConfig(str(smollm2_gguf)), CacheConfig(num_pages=400), device=DeviceConfig("cpu"), seed=0
    )
    with served(build_engine(config), served_model_name=("smol",)) as server:
        yield server
        server.assert_no_block_lost()


def test_it_knows_the_capital_of_france(smol: Served) -> None:
    choice = smol.chat(messages=CAPITAL, temperature=0, max_tokens=40)["choices"][0]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    text = smol.complete(prompt="The capital of France is", temperature=0, max_tokens=4)["choices"][0]["text"]
    assert text.startswith(" Paris")


def test_A12_a_stop_within_a_word(smol: Served) -> None:
    asked = {"messages": CAPITAL, "temperature": 0, "max_tokens": 40}
    whole = smol.chat(**asked)["choices"][0]["message"]["content"]
    cut = smol.chat(**asked, stop="Pari")["choices"][0]
    assert cut["message"]["content"] == whole[: whole.index("Pari")]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", "Pari")
    assert texts_of(smol.events("/v1/chat/completions", {**asked, "stop": "Pari"})) == {
        0: cut["message"]["content"]
    }


def test_P2_P3_alone_together_and_streamed_answers_are_the_same(smol: Served) -> None:
    asked = [
        {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24}
        for text in QUESTIONS
    ]
    alone = [smol.chat(**body)["choices"][0]["message"]["content"] for body in asked]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda body: smol.chat(**body), asked))
        streamed = list(pool.map(lambda body: smol.events("/v1/chat/completions", body), asked))
    assert [answer["choices"][0]["message"]["content"] for answer in together] == alone
    assert [texts_of(events)[0] for events in streamed] == alone


def test_A7_the_same_prompt_again_comes_from_the_cache(smol: Served) -> None:
    asked = {"messages": CAPITAL, "temperature": 0, "max_tokens": 8}
    answers = [smol.chat(**asked) for _ in range(3)]
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
    assert answers[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


def test_log_probabilities_are_of_this_text(smol: Served) -> None:
    choice = smol.complete(
        prompt="The capital of France is", temperature=0, max_tokens=3, logprobs=3, echo=True
    )["choices"][0]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    offsets = [
        choice["text"].index(token, at) for token, at in zip(told["tokens"], told["text_offset"], strict=True)
    ]
    assert offsets == told["text_offset"]
    paris = told["tokens"].index(" Paris")
    assert told["token_logprobs"][paris] == max(told["top_logprobs"][paris].values())


def test_tokens_there_and_back(smol: Served) -> None:
    for text in QUESTIONS:
        tokens = smol.post("/tokenize", {"prompt": text}).json()["tokens"]
        assert smol.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}
    told = smol.post("/tokenize", {"messages": CAPITAL}).json()
    rendered = smol.post("/apply-template", {"messages": CAPITAL}).json()["prompt"]
    assert smol.post("/detokenize", {"tokens": told["tokens"]}).json()["prompt"] == rendered
    answer = smol.chat(messages=CAPITAL, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == told["count"]
