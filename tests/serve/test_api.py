"""What the endpoints answer: shapes, parameters, and that streams say the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import BOS, EOS, FakeExecutor, scripted
from tests.serve.support import MODEL, Served, scripted_engine, served, texts_of

CHAT = [{"role": "user", "content": "hi"}]


def test_completion_has_openais_shape(server: Served) -> None:
    body = server.complete(prompt="The", max_tokens=5, temperature=0)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == MODEL
    (choice,) = body["choices"]
    assert (choice["index"], len(choice["text"]), choice["finish_reason"]) == (0, 5, "length")
    assert choice["logprobs"] is None
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_chat_has_openais_shape(server: Served) -> None:
    body = server.chat(messages=CHAT, max_tokens=3)
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) == 3
    assert choice["finish_reason"] == "length"


def test_the_answers_id_is_in_the_header_too(server: Served) -> None:
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert answer.headers["x-request-id"] == answer.json()["id"]
    named = server.complete(prompt="a", max_tokens=1, request_id="my.own-1")
    assert named["id"] == "cmpl-my.own-1"


@pytest.mark.parametrize(
    "prompt", ["ab", ["ab"], [97, 98], [[97, 98]]], ids=["text", "texts", "ids", "lists of ids"]
)
def test_a_prompt_may_be_text_or_ids(server: Served, prompt: Any) -> None:
    expected = server.complete(prompt="ab", temperature=0)["choices"][0]["text"]
    assert server.complete(prompt=prompt, temperature=0)["choices"][0]["text"] == expected


def test_several_prompts_and_choices_are_numbered_by_prompt(server: Served) -> None:
    body = server.complete(prompt=["ab", "cd", [101]], n=2, max_tokens=4, temperature=1, seed=3)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 24
    alone = server.complete(prompt="cd", n=2, max_tokens=4, temperature=1, seed=3)
    assert [choice["text"] for choice in alone["choices"]] == [
        choice["text"] for choice in body["choices"][2:4]
    ]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3, "temperature": 1, "seed": 5},
        {"stop": ["e", "t "]},
        {"stop": "e", "include_stop_str_in_output": True},
        {"logprobs": True},
        {"return_token_ids": True},
    ],
    ids=str,
)
def test_P3_a_stream_says_what_the_whole_answer_says(
    server: Served, path: str, fields: dict[str, Any]
) -> None:
    asked = {"max_tokens": 24, "temperature": 0, **fields}
    if "logprobs" in fields and path == "/v1/completions":
        asked["logprobs"] = 2
    asked |= {"prompt": "Once"} if path == "/v1/completions" else {"messages": CHAT}
    whole = server.post(path, asked).json()["choices"]
    events = server.events(path, asked)
    said = {choice["index"]: choice.get("text", choice.get("message", {}).get("content")) for choice in whole}
    assert texts_of(events) == said
    ends = {c["index"]: c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]}
    assert ends == {choice["index"]: choice["finish_reason"] for choice in whole}
    if "return_token_ids" in fields:
        ids = [token for event in events for c in event["choices"] for token in c.get("token_ids", ())]
        assert ids == whole[0]["token_ids"]


def test_P3_several_prompts_stream_as_they_answer(server: Served) -> None:
    asked = {"prompt": ["ab", "cd", "efghij"], "n": 2, "max_tokens": 9, "seed": 1}
    whole = server.post("/v1/completions", asked).json()["choices"]
    events = server.events("/v1/completions", asked)
    assert texts_of(events) == {choice["index"]: choice["text"] for choice in whole}


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_reason(server: Served) -> None:
    events = server.events("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1]["choices"][0]["delta"] == {}
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


def test_completion_logprobs_have_openais_shape(server: Served) -> None:
    logprobs = server.complete(prompt="ab", max_tokens=3, temperature=0, logprobs=2)["choices"][0]["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert len(logprobs["tokens"]) == 3
    assert logprobs["token_logprobs"] == [-1.0] * 3
    assert logprobs["text_offset"] == [0, 1, 2]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])


def test_chat_logprobs_have_openais_shape(server: Served) -> None:
    choice = server.chat(messages=CHAT, max_tokens=3, logprobs=True, top_logprobs=2)["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(item["token"] for item in content) == choice["message"]["content"]
    assert all(set(item) == {"token", "logprob", "bytes", "top_logprobs"} for item in content)
    assert all(len(item["top_logprobs"]) == 2 for item in content)
    plain = server.chat(messages=CHAT, max_tokens=3, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [item["top_logprobs"] for item in plain] == [[], [], []]


def test_chat_logprobs_give_the_bytes_of_half_a_character() -> None:
    engine = scripted_engine(FakeExecutor(next_token=scripted({}, default="é")))
    with served(engine) as server:
        content = server.chat(messages=CHAT, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [item["bytes"] for item in content[:2]] == [[0xC3], [0xA9]]


def test_echo_puts_the_prompt_and_its_logprobs_first(server: Served) -> None:
    asked = {"prompt": "abc", "max_tokens": 2, "echo": True, "logprobs": 1, "temperature": 0}
    choice = server.complete(**asked)["choices"][0]
    assert choice["text"].startswith("abc")
    assert choice["logprobs"]["tokens"][:3] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    events = server.events("/v1/completions", asked)
    assert texts_of(events) == {0: choice["text"]}
    streamed = {name: [] for name in choice["logprobs"]}
    for event in events:
        for name, values in event["choices"][0]["logprobs"].items():
            streamed[name] += values
    assert streamed == choice["logprobs"]


def test_prompt_logprobs_come_by_token_id(server: Served) -> None:
    choice = server.complete(prompt="abc", max_tokens=1, prompt_logprobs=2)["choices"][0]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second[str(ord("b"))]["decoded_token"] == "b"
    assert len(third) == 2
    body = server.chat(messages=CHAT, max_tokens=1, prompt_logprobs=0)
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    events = server.events("/v1/completions", {"prompt": "abc", "max_tokens": 3, "prompt_logprobs": 2})
    told = [c["prompt_logprobs"] for event in events for c in event["choices"] if "prompt_logprobs" in c]
    assert told == [choice["prompt_logprobs"]]


def test_token_ids_are_returned_on_request(server: Served) -> None:
    choice = server.complete(prompt="abc", max_tokens=3, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == [97, 98, 99]
    assert bytes(choice["token_ids"]).decode() == choice["text"]
    body = server.chat(messages=CHAT, max_tokens=3, return_token_ids=True)
    assert bytes(body["prompt_token_ids"]).decode() == "[user]hi\n[assistant]"
    events = server.events(
        "/v1/chat/completions", {"messages": CHAT, "max_tokens": 3, "return_token_ids": True}
    )
    assert [e["prompt_token_ids"] for e in events if "prompt_token_ids" in e] == [body["prompt_token_ids"]]


def test_a_stop_names_itself(server: Served) -> None:
    text = server.complete(prompt="Once", max_tokens=24, temperature=0)["choices"][0]["text"]
    choice = server.complete(prompt="Once", max_tokens=24, temperature=0, stop=[text[3:6]])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:3], "stop", text[3:6])
    by_id = server.complete(prompt="Once", max_tokens=24, temperature=0, stop_token_ids=[ord(text[2])])
    assert by_id["choices"][0]["stop_reason"] == ord(text[2])


def test_a_prompt_is_cut_only_where_that_was_asked_for(server: Served) -> None:
    error = server.refusal("/v1/completions", {"prompt": "x" * 2000})
    assert error["code"] == "prompt_too_long"
    assert "1024" in error["message"]
    body = server.complete(prompt="x" * 2000 + "abc", truncate_prompt_tokens=3, max_tokens=2, temperature=0)
    assert body["usage"]["prompt_tokens"] == 3
    expected = server.complete(prompt="abc", max_tokens=2, temperature=0)["choices"][0]["text"]
    assert body["choices"][0]["text"] == expected
    most = server.complete(prompt="x" * 2000, truncate_prompt_tokens=-1, max_tokens=5)
    assert most["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 1023,
        "completion_tokens": 1,
        "total_tokens": 1024,
        "prompt_tokens_details": None,
    }


def test_max_completion_tokens_is_max_tokens(server: Served) -> None:
    assert server.chat(messages=CHAT, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    assert (
        server.chat(messages=CHAT, max_completion_tokens=3, max_tokens=3)["usage"]["completion_tokens"] == 3
    )
    error = server.refusal(
        "/v1/chat/completions", {"messages": CHAT, "max_completion_tokens": 3, "max_tokens": 4}
    )
    assert error["param"] == "max_completion_tokens"


def test_a_deadline_ends_a_request_with_what_it_has() -> None:
    engine = scripted_engine(FakeExecutor(step_seconds=0.02, threaded=True, max_model_len=900))
    with served(engine) as server:
        body = server.complete(prompt="a", max_tokens=800, deadline_ms=1000)
        assert 0 < body["usage"]["completion_tokens"] < 100
        assert body["choices"][0]["finish_reason"] == "length"
        assert server.refusal("/v1/completions", {"prompt": "a", "deadline_ms": 0})["param"] == "deadline_ms"
        assert server.refusal("/v1/completions", {"prompt": "a", "deadline_ms": -1})["param"] == "deadline_ms"


def test_content_may_be_parts_of_text(server: Served) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    body = server.chat(messages=[{"role": "user", "content": parts}], max_tokens=2)
    assert body["usage"]["completion_tokens"] == 2


def test_add_generation_prompt_and_kwargs_reach_the_template(server: Served) -> None:
    told = server.post("/apply-template", {"messages": CHAT}).json()
    assert told == {"prompt": "[user]hi\n[assistant]"}
    told = server.post("/apply-template", {"messages": CHAT, "add_generation_prompt": False}).json()
    assert told == {"prompt": "[user]hi\n"}


def test_tokens_there_and_back(server: Served) -> None:
    told = server.post("/tokenize", {"prompt": "héy", "return_token_strs": True}).json()
    assert told["tokens"] == list("héy".encode())
    assert (told["count"], told["max_model_len"]) == (4, 1024)
    assert len(told["token_strs"]) == 4
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "héy"}
    chat = server.post("/tokenize", {"messages": CHAT}).json()
    assert bytes(chat["tokens"]).decode() == "[user]hi\n[assistant]"
    assert server.refusal("/tokenize", {})["param"] == "prompt"
    assert server.refusal("/tokenize", {"prompt": "a", "messages": CHAT})["param"] == "prompt"
    assert server.refusal("/detokenize", {"tokens": [999999]})["param"] == "tokens"
    assert server.refusal("/detokenize", {"tokens": [-1]})["param"] == "tokens"


def test_special_tokens_are_added_as_asked() -> None:
    with served(scripted_engine(add_bos=True)) as server:
        assert server.post("/tokenize", {"prompt": "a"}).json()["tokens"] == [BOS, 97]
        plain = server.post("/tokenize", {"prompt": "a", "add_special_tokens": False}).json()
        assert plain["tokens"] == [97]
        assert server.complete(prompt="a", max_tokens=1)["usage"]["prompt_tokens"] == 2
        body = server.complete(prompt="a", max_tokens=1, add_special_tokens=False)
        assert body["usage"]["prompt_tokens"] == 1


def test_models_are_listed_under_every_name() -> None:
    with served(served_model_name=("one", "two/b")) as server:
        listed = server.http.get(server.url + "/v1/models").json()
        assert [card["id"] for card in listed["data"]] == ["one", "two/b"]
        assert listed["data"][0]["max_model_len"] == 1024
        assert server.http.get(server.url + "/v1/models/two/b").json()["id"] == "two/b"
        assert server.complete(prompt="a", model="two/b", max_tokens=1)["model"] == "two/b"
        assert server.complete(prompt="a", max_tokens=1)["model"] == "one"
        error = server.refusal("/v1/completions", {"prompt": "a", "model": MODEL}, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert server.http.get(server.url + "/v1/models/three").status_code == 404


def test_version_and_health(server: Served) -> None:
    assert server.http.get(server.url + "/version").json()["version"]
    assert server.http.get(server.url + "/health").status_code == 200
    assert server.http.get(server.url + "/ready").json() == {"status": "ready"}


def test_which_value_counts() -> None:
    sampled = scripted_engine(generation_config={"temperature": 0.7, "max_new_tokens": 7, "do_sample": True})
    with served(sampled, sampling={"max_tokens": 5}) as server:
        # the server's over the model's, the request's over both
        assert server.complete(prompt="a")["usage"]["completion_tokens"] == 5
        assert server.complete(prompt="a", max_tokens=3)["usage"]["completion_tokens"] == 3
    with served(scripted_engine(generation_config={"max_new_tokens": 7})) as server:
        assert server.complete(prompt="a")["usage"]["completion_tokens"] == 7
    with served() as server:
        # OpenAI's own: 16 tokens for completions, as many as fit for chats
        assert server.complete(prompt="a")["usage"]["completion_tokens"] == 16
        assert server.complete(prompt="a", min_tokens=20)["usage"]["completion_tokens"] == 20
        body = server.chat(messages=CHAT, stop_token_ids=[EOS])
        assert body["usage"]["total_tokens"] == 1024


def test_temperature_is_one_unless_something_says_otherwise() -> None:
    with served() as server:
        texts = {server.complete(prompt="a", seed=seed)["choices"][0]["text"] for seed in range(4)}
        assert len(texts) == 4
    with served(scripted_engine(generation_config={"do_sample": False})) as server:
        texts = {server.complete(prompt="a", seed=seed)["choices"][0]["text"] for seed in range(4)}
        assert len(texts) == 1


def test_an_answer_ends_at_the_models_end_unless_told_otherwise() -> None:
    engine = scripted_engine(FakeExecutor(next_token=scripted({"hi": "yes"})))
    with served(engine) as server:
        choice = server.complete(prompt="hi")["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("yes", "stop", None)
        body = server.complete(prompt="hi", ignore_eos=True, max_tokens=6)
        assert body["usage"]["completion_tokens"] == 6


def test_fields_without_effect_are_taken(server: Served) -> None:
    harmless = {
        "user": "u",
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "stream": None,
        "stream_options": None,
        "stop": None,
        "logit_bias": None,
        "seed": None,
        "n": None,
        "temperature": None,
    }
    assert server.chat(messages=CHAT, max_tokens=1, **harmless)
    assert server.complete(prompt="a", max_tokens=1, best_of=1, suffix="", **harmless)
