"""Workload files: the same file gives the same requests; a malformed one is refused with its name, line and field."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from pagedcli.workloads.fields import WorkloadError
from pagedcli.workloads.files import save_workload
from pagedcli.workloads.parse import parse_workload
from pagedcli.workloads.requests import WorkloadRequest, at, most_turns, prompt_after

SHARED = Path(__file__).parents[3] / "shared" / "data"


def encode(prompt: object) -> list[int]:
    """A token for each word."""
    text = prompt if isinstance(prompt, str) else " ".join(f"{role} {content}" for role, content in prompt)  # type: ignore[attr-defined]
    return [1 + len(word) for word in text.split()]


def read(path: Path, **options: Any) -> list[WorkloadRequest]:
    return parse_workload(str(path), **({"vocab_size": 1000, "seed": 5, "encode": encode} | options))


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51,4,1
"""


def test_an_azure_trace_has_its_lengths_and_moments(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE)
    requests = read(file)
    assert [(len(r.prompt_token_ids), r.output_tokens) for r in requests] == [(374, 44), (396, 109), (4, 1)]
    assert [r.arrival_s for r in requests] == pytest.approx([0.0, 4.314579, 4.31941], abs=1e-6)
    assert requests == read(file) != read(file, seed=6)
    assert all(0 <= token < 1000 for r in requests for token in r.prompt_token_ids)
    half = read(file, time_scale=0.5, length_scale=0.1)
    assert [r.arrival_s for r in half] == [r.arrival_s / 2 for r in requests]
    assert [(len(r.prompt_token_ids), r.output_tokens) for r in half] == [(37, 4), (40, 11), (1, 1)]
    assert len(read(file, num_requests=2)) == 2


def mooncake(moment: int, length: int, output: int, *ids: int) -> dict[str, Any]:
    return {"timestamp": moment, "input_length": length, "output_length": output, "hash_ids": list(ids)}


def test_equal_hash_ids_of_a_mooncake_trace_become_equal_blocks(tmp_path: Path) -> None:
    file = write(
        tmp_path / "m.jsonl",
        mooncake(0, 1100, 5, 7, 8, 9),
        mooncake(1500, 1100, 6, 7, 8, 11),
        mooncake(3000, 600, 7, 7, 12),
    )
    one, two, three = read(file)
    assert [len(r.prompt_token_ids) for r in (one, two, three)] == [1100, 1100, 600]
    assert [r.arrival_s for r in (one, two, three)] == [0.0, 1.5, 3.0]
    assert one.prompt_token_ids[:1024] == two.prompt_token_ids[:1024]
    assert one.prompt_token_ids[1024:] != two.prompt_token_ids[1024:]
    assert one.prompt_token_ids[:512] == three.prompt_token_ids[:512]
    assert one.prompt_token_ids[512:600] != three.prompt_token_ids[512:]
    small = read(file, length_scale=1 / 32)
    assert [len(r.prompt_token_ids) for r in small] == [34, 34, 19]
    assert small[0].prompt_token_ids[:32] == small[1].prompt_token_ids[:32]
    assert small[0].prompt_token_ids[:16] == small[2].prompt_token_ids[:16]


def test_sharegpt_conversations_become_turns_with_the_answers_before_them(tmp_path: Path) -> None:
    spoken = [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "a bb ccc"},
        {"from": "gpt", "value": "dddd eeeee"},
        {"from": "human", "value": "f"},
        {"from": "gpt", "value": "one two three"},
    ]
    file = tmp_path / "s.json"
    file.write_text(json.dumps([{"id": "x", "conversations": spoken}, {"conversations": []}]))
    first, second = read(file)
    assert (first.id, first.prompt_token_ids, first.output_tokens) == ("chat-1-0", (2, 3, 4), 2)
    assert (second.prompt_token_ids, second.output_tokens) == ((2, 3, 4, 5, 6, 2), 3)
    assert (second.follows, second.new_tokens, second.text) == ("chat-1-0", 1, "f")
    assert prompt_after(second, first.prompt_token_ids, (9, 9, 9)) == (2, 3, 4, 9, 9, 9, 2)
    assert len(read(file, max_turns=1)) == 1
    texts = read(file, encode=None, text_only=True)
    assert [(r.prompt_token_ids, r.text, r.output_tokens) for r in texts] == [
        ((), "a bb ccc", 3),
        ((), "f", 4),
    ]


def test_batch_files_and_rows_of_ours(tmp_path: Path) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "a bb"}], "max_tokens": 9}
    rows = [
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "p", "url": "/v1/completions", "body": {"prompt": "a bb", "max_completion_tokens": 3}},
        {"custom_id": "i", "url": "/v1/completions", "body": {"prompt": [5, 6]}},
        {"id": 7, "prompt": "x yy", "answer": "one two", "category": "any"},
        {"prompt_token_ids": [1, 2], "max_tokens": 4, "output_tokens": 2, "arrival_s": 1.5},
        {"question_id": 81, "turns": ["hello", "and then"]},
    ]
    requests = {r.id: r for r in read(write(tmp_path / "r.jsonl", *rows), default_output=6)}
    assert list(requests) == ["c", "p", "i", "7", "81-0", "81-1", "5"]
    assert requests["c"].messages == (("user", "a bb"),)
    assert (requests["c"].prompt_token_ids, requests["c"].output_tokens) == ((5, 2, 3), 9)
    assert (requests["p"].text, requests["p"].max_tokens) == ("a bb", 3)
    assert (requests["i"].prompt_token_ids, requests["i"].output_tokens) == ((5, 6), 6)
    assert requests["7"].output_tokens == 2
    assert (requests["5"].output_tokens, requests["5"].max_tokens, requests["5"].arrival_s) == (2, 4, 1.5)
    assert requests["81-1"].follows == "81-0"
    assert len(requests["81-1"].prompt_token_ids) == 1 + 6 + 2


@pytest.mark.parametrize(
    "kind", ["mixed", "fixed:9:3", "random:1-9:2-5", "shared-prefix:20:3:4", "chats:3:2-4:2-4"]
)
def test_a_written_workload_gives_the_same_requests(kind: str, tmp_path: Path) -> None:
    requests = parse_workload(kind, vocab_size=1000, seed=3, num_requests=10)
    assert requests == parse_workload(kind, vocab_size=1000, seed=3, num_requests=10)
    assert len(requests) == 10
    if "chats" not in kind:
        requests = at(requests, [index / 3 for index in range(10)])
    save_workload(tmp_path / "w.jsonl", requests)
    assert parse_workload(str(tmp_path / "w.jsonl"), vocab_size=1000, seed=99) == requests


def test_written_texts_come_back_as_they_were(tmp_path: Path) -> None:
    rows = write(
        tmp_path / "r.jsonl",
        {"id": "a", "turns": ["hé\u2028llo\x85 w", "q"]},
        {"messages": [{"role": "user", "content": "x"}]},
    )
    requests = read(rows)
    save_workload(tmp_path / "w.jsonl", requests)
    assert read(tmp_path / "w.jsonl", encode=None) == requests


def test_kinds_have_their_lengths() -> None:
    fixed = parse_workload("fixed:512:128", vocab_size=100)
    assert {(len(r.prompt_token_ids), r.output_tokens) for r in fixed} == {(512, 128)}
    assert len(fixed) == 32
    talk = parse_workload("chats:2:5:7", vocab_size=100, num_requests=4)
    assert [len(r.prompt_token_ids) for r in talk] == [5, 17, 5, 17]
    assert most_turns(talk) == 2
    assert most_turns(fixed) == most_turns([]) == 1
    assert talk[1].prompt_token_ids[:5] == talk[0].prompt_token_ids
    drawn = parse_workload("mixed", vocab_size=100, first_token=90)
    assert min(token for r in drawn for token in r.prompt_token_ids) == 90


@pytest.mark.parametrize(
    "text",
    [
        "fixed",
        "fixed:1",
        "fixed:0:1",
        "fixed:5-3:1",
        "fixed:a:1",
        "fixed:1:2:3",
        "random",
        "chats:2-3",
        "mixed:-1",
        "x",
        "",
        ".",
    ],
)
def test_what_is_no_workload_is_refused(text: str) -> None:
    with pytest.raises(WorkloadError) as error:
        parse_workload(text, vocab_size=100)
    assert "\n" not in str(error.value)


MALFORMED = [
    (
        "m.jsonl",
        [mooncake(0, 600, 5, 1, 2), mooncake(0, 600, 5, 1)],
        "m.jsonl, line 2: hash_ids has 1 blocks",
    ),
    ("m.jsonl", [mooncake(0, 600, 0, 1, 2)], "m.jsonl, line 1: output_length is 0"),
    ("m.jsonl", [mooncake(-1, 600, 1, 1, 2)], "m.jsonl, line 1: timestamp is -1"),
    ("m.jsonl", [mooncake(0, 10**9, 1, 1, 2)], "m.jsonl, line 1: input_length is 1000000000"),
    ("r.jsonl", [{"prompt": "a"}, "", "{oops"], "r.jsonl, line 3: not JSON"),
    ("r.jsonl", [{"prompt": "a"}, "[1]"], "r.jsonl, line 2: .* give an object"),
    ("r.jsonl", [{"prompt": 5}], "r.jsonl, line 1: prompt is 5: give text"),
    ("r.jsonl", [{"id": "a"}], "r.jsonl, line 1: prompt is missing"),
    ("r.jsonl", [{"prompt_token_ids": [1, 1000]}], "line 1: prompt_token_ids holds 1000: .* 0 to 999"),
    ("r.jsonl", [{"prompt": "a", "max_tokens": True}], "line 1: max_tokens is true"),
    ("r.jsonl", [{"prompt": "a", "max_tokens": 2, "output_tokens": 3}], "line 1: max_tokens is 2"),
    ("r.jsonl", [{"prompt": "a", "arrival_s": "now"}], 'line 1: arrival_s is "now"'),
    ("r.jsonl", ['{"prompt": "a", "arrival_s": NaN}'], "line 1: arrival_s is NaN"),
    ("r.jsonl", [{"prompt": "\ud800"}], "line 1: prompt holds half a surrogate"),
    ("r.jsonl", [{"id": "a", "prompt": "b"}, {"id": "a", "prompt": "c"}], "id 'a' occurs twice"),
    ("r.jsonl", [{"id": "a", "prompt": "b", "follows": "z"}], "follows 'z', which is not above it"),
    ("r.jsonl", [{"prompt": "a", "follows": "z", "new_tokens": 9}], "line 1: new_tokens is 9"),
    ("r.jsonl", [{"messages": [{"role": "user", "content": [1]}]}], "line 1: messages\\[0\\].content"),
    ("r.jsonl", [{"turns": ["a", ""]}], "line 1: turns\\[1\\] is empty"),
    ("b.jsonl", [{"custom_id": "x", "body": {"max_tokens": 3}}], "line 1: body: prompt is missing"),
    ("b.jsonl", [{"custom_id": "x"}], "b.jsonl, line 1: body is missing"),
    ("s.json", ['[{"conversations": [{"from": "human"'], "s.json, line 2: not JSON"),
    ("s.json", ['[{"conversations": 5}]'], "s.json, entry 1: conversations is 5"),
    ("s.json", ["[5]"], "s.json, entry 1: 5: give an object"),
    ("s.json", ["[]"], "holds no request"),
    ("a.csv", ["TIMESTAMP,ContextTokens", "x,1"], "a.csv, line 1: GeneratedTokens is missing"),
    ("a.csv", [AZURE + "2023-11-16 18:15:51,4"], "a.csv, line 5: 2 fields"),
    ("a.csv", [AZURE + "yesterday,4,1"], 'a.csv, line 5: TIMESTAMP is "yesterday"'),
    ("a.csv", [AZURE + "2023-11-16 18:15:51,-4,1"], 'a.csv, line 5: ContextTokens is "-4"'),
    ("a.csv", [AZURE + "2023-11-16 18:15:51,4,0"], "a.csv, line 5: GeneratedTokens is 0"),
    ("x.txt", ["hello"], "x.txt, line 1: neither JSON nor a CSV header"),
    ("x.txt", [""], "neither JSON nor|holds no request"),
]


@pytest.mark.parametrize(("name", "rows", "message"), MALFORMED)
def test_a_malformed_file_is_refused_with_its_line_and_field(
    name: str, rows: list[object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(WorkloadError, match=message) as error:
        read(write(tmp_path / name, *rows))
    assert "\n" not in str(error.value)


def test_texts_without_a_tokenizer_are_refused_unless_they_are_wanted(tmp_path: Path) -> None:
    file = write(tmp_path / "r.jsonl", {"prompt": "a"})
    with pytest.raises(WorkloadError, match="a tokenizer is needed"):
        read(file, encode=None)
    assert read(file, encode=None, text_only=True)[0].text == "a"


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{")
    for path in (tmp_path, tmp_path / "bytes", tmp_path / "none", Path("a\0b")):
        with pytest.raises(WorkloadError):
            read(path)


def test_no_file_raises_anything_else(tmp_path: Path) -> None:
    """Mutated files: refused by name, or read."""
    rng = random.Random(11)
    good = [
        AZURE,
        json.dumps([{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]),
        "\n".join(json.dumps(mooncake(index, 600, 5, 1, index)) for index in range(3)),
        json.dumps(
            {"custom_id": "x", "body": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}}
        ),
        json.dumps({"id": 1, "turns": ["a", "b"]})
        + "\n"
        + json.dumps({"prompt_token_ids": [1, 2], "arrival_s": 1}),
    ]
    values = [
        "null",
        "-1",
        "1e999",
        "9" * 5000,
        '""',
        "[]",
        "{}",
        "true",
        '"\\ud800"',
        "0.5",
        "[[[[",
        "NaN",
        "\x00",
        "\r",
        ",",
    ]
    file = tmp_path / "fuzzed"
    outcomes, messages = set(), []
    for _ in range(800):
        text = rng.choice(good)
        for _ in range(rng.randint(1, 4)):
            start = rng.randrange(len(text) + 1)
            end = min(len(text), start + rng.choice((0, 1, 1, 5, 40)))
            text = text[:start] + rng.choice([*values, "", chr(rng.randrange(32, 256))]) + text[end:]
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            requests = read(file)
        except WorkloadError as error:
            outcomes.add("refused")
            messages.append(str(error))
        else:
            outcomes.add("read")
            assert all(r.prompt_token_ids and 1 <= r.output_tokens <= r.max_tokens for r in requests)
            assert all(0 <= r.arrival_s < float("inf") for r in requests)
    assert outcomes == {"read", "refused"}
    assert all("\n" not in message and len(message) < 400 for message in messages)


REAL = {
    "azure-llm-conv-2023.csv": 200,
    "mooncake-conversation-a.jsonl": 200,
    "gsm8k-a.jsonl": 400,
    "mt_bench.jsonl": 160,
}


@pytest.mark.parametrize("name", REAL)
def test_real_files_are_read(name: str) -> None:
    if not (SHARED / name).exists():
        pytest.skip(f"{name} is not beside the project")
    scaled = {"length_scale": 0.1} if name.startswith(("azure", "mooncake")) else {}  # a text has its length
    requests = read(SHARED / name, num_requests=REAL[name], **scaled)
    assert len(requests) == REAL[name]
    if name.startswith("mooncake"):
        assert requests[0].prompt_token_ids[:51] == requests[1].prompt_token_ids[:51]
        assert requests[0].prompt_token_ids[51:102] != requests[1].prompt_token_ids[51:102]
