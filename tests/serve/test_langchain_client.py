"""LangChain's OpenAI classes against the server: whole answers, streams, batches, log-probabilities, errors.

Optional: runs where `langchain-openai` is installed (the `clients` extra).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from pagedcli.api.build import Engine
from tests.serve.support import Served, served

pytestmark = pytest.mark.filterwarnings("ignore")  # what a foreign package warns about is not ours to mend
# Nothing of a test goes to anybody's tracing service.
os.environ["LANGSMITH_TRACING"] = "false"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    langchain = pytest.importorskip("langchain_openai")


@pytest.fixture(scope="module")
def tiny(tiny_engine: Engine) -> Iterator[Served]:
    with served(tiny_engine, served_model_name=("tiny",)) as server:
        yield server
        server.assert_no_block_lost()


def chat(tiny: Served, **fields: Any) -> Any:
    return langchain.ChatOpenAI(
        model="tiny", base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, seed=3, **fields
    )


def test_an_answer_and_its_usage(tiny: Served) -> None:
    answer = chat(tiny, max_tokens=8, temperature=0).invoke([("system", "Be brief."), ("human", "Hello")])
    assert answer.content
    assert answer.usage_metadata["output_tokens"] <= 8
    assert answer.response_metadata["finish_reason"] in ("stop", "length")


def test_a_stream_adds_up_to_the_answer(tiny: Served) -> None:
    model = chat(tiny, max_tokens=12, temperature=0, stream_usage=True)
    whole = model.invoke("Tell me").content
    chunks = list(model.stream("Tell me"))
    assert "".join(chunk.content for chunk in chunks) == whole
    assert any(chunk.usage_metadata for chunk in chunks)


def test_a_batch_is_answered_in_order(tiny: Served) -> None:
    model = chat(tiny, max_tokens=6, temperature=0)
    texts = ["one", "two", "three", "four"]
    alone = [model.invoke(text).content for text in texts]
    assert [answer.content for answer in model.batch(texts)] == alone


def test_log_probabilities_and_stops(tiny: Served) -> None:
    model = chat(tiny, max_tokens=6, logprobs=True, top_logprobs=2)
    answer = model.invoke("Hello", stop=["###"])
    assert len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


def test_completions(tiny: Served) -> None:
    model = langchain.OpenAI(
        model="tiny", base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, max_tokens=5, temperature=0
    )
    assert model.invoke("Once") == "".join(model.stream("Once"))
    assert len(model.generate(["a", "b", "c"]).generations) == 3


def test_what_is_refused_is_raised(tiny: Served) -> None:
    with pytest.raises(Exception, match="temperature"):
        chat(tiny, temperature=500).invoke("Hello")
    with pytest.raises(Exception, match="tools"):
        chat(tiny).bind_tools([{"name": "f", "description": "d", "parameters": {}}]).invoke("Hello")
