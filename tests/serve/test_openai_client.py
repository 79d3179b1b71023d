"""OpenAI's own Python client over every endpoint and parameter that it knows, on a loaded model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pagedcli.api.build import Engine
from tests.serve.support import Served, served

KEY = b"a-key-of-the-tests"
CHAT: list[Any] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
]


@pytest.fixture(scope="module")
def tiny(tiny_engine: Engine) -> Iterator[Served]:
    with served(tiny_engine, keys=(KEY,), served_model_name=("tiny",)) as server:
        yield server
        server.assert_no_block_lost()


@pytest.fixture(scope="module")
def client(tiny: Served) -> Iterator[openai.OpenAI]:
    # The client keeps a connection of its own: closed here, because a warning about it is an error.
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key=KEY.decode(), max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "paged"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")


def test_completions_with_every_parameter(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt=["One", "Two"],
        best_of=2,
        echo=True,
        frequency_penalty=0.5,
        logit_bias={"17": -100},
        logprobs=3,
        max_tokens=6,
        n=2,
        presence_penalty=0.5,
        seed=7,
        stop=["\n\n", "###"],
        temperature=0.8,
        top_p=0.9,
        user="somebody",
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text.startswith("One")
    assert answer.choices[2].text.startswith("Two")
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens).startswith("One")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 24


def test_completions_stream_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": "Once upon",
        "max_tokens": 12,
        "seed": 3,
        "n": 2,
        "temperature": 1.0,
    }
    whole = client.completions.create(**asked)
    texts = {0: "", 1: ""}
    usage = None
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usage = chunk.usage or usage
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_chat_with_every_parameter(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=CHAT,
        frequency_penalty=0.1,
        logit_bias={"17": 5},
        logprobs=True,
        max_completion_tokens=7,
        metadata={"a": "b"},
        n=2,
        parallel_tool_calls=False,
        presence_penalty=0.1,
        reasoning_effort="low",
        response_format={"type": "text"},
        seed=5,
        service_tier="auto",
        stop="###",
        store=False,
        temperature=0.5,
        tool_choice="none",
        tools=[],
        top_logprobs=2,
        top_p=0.95,
        user="somebody",
        extra_body={
            "top_k": 40,
            "min_p": 0.01,
            "repetition_penalty": 1.05,
            "stop_token_ids": [3],
            "ignore_eos": True,
            "min_tokens": 2,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "prompt_logprobs": 1,
            "priority": 3,
            "cache_salt": "pepper",
            "deadline_ms": 60000,
            "truncate_prompt_tokens": 200,
            "return_token_ids": True,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "add_special_tokens": False,
            "chat_template_kwargs": {"anything": [1, {"deep": True}]},
            "max_pages": 50,
            "bad_words": ["never"],
            "request_id": "a.request-of_mine",
        },
    )
    assert answer.id == "chatcmpl-a.request-of_mine"
    assert len(answer.choices) == 2
    content = answer.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    assert len(content.content[0].top_logprobs) == 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    extra = answer.model_extra
    assert extra is not None
    assert len(extra["prompt_token_ids"]) == answer.usage.prompt_tokens == len(extra["prompt_logprobs"])


def test_chat_streams_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 10, "seed": 2}
    asked["extra_body"] = {"ignore_eos": True}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


def test_the_stream_helper_puts_an_answer_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=CHAT, max_tokens=8, seed=2) as stream:
        final = stream.get_final_completion()
    whole = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=8, seed=2)
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_errors_are_the_clients_own_classes(tiny: Served, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="tiny", prompt="a", temperature=9000)
    assert (wrong.value.param, wrong.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="tiny",
            messages=CHAT,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(model="tiny", messages=CHAT, response_format={"type": "json_object"})
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="a")
    with (
        openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="a")


def test_leaving_a_stream_ends_its_request(tiny: Served, client: openai.OpenAI) -> None:
    before = tiny.engine.client.stats().requests_aborted
    stream = client.completions.create(
        model="tiny", prompt="a", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    tiny.wait_until(lambda: tiny.engine.client.num_unfinished == 0)
    # The tiny model may have said all of it before the server heard of it.
    assert tiny.engine.client.stats().requests_aborted - before in (0, 1)


def test_the_asynchronous_client_many_at_once(tiny: Served) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key=KEY.decode(), max_retries=0) as made:
            answers = await asyncio.gather(
                *(
                    made.completions.create(model="tiny", prompt=f"p{i % 4}", max_tokens=8, temperature=0)
                    for i in range(24)
                )
            )
        return [answer.choices[0].text for answer in answers]

    texts = asyncio.run(ask())
    assert texts[:4] * 6 == texts


def test_the_raw_response_carries_the_request_id(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="tiny", prompt="a", max_tokens=1)
    assert raw.headers["x-request-id"] == raw.parse().id
