"""Cases of the field that a user of `paged generate` would meet, over the scripted engine."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Paged
from tests.fakes import scripted


@pytest.fixture
def paged(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    return Paged(tmp_path, monkeypatch, capfd)


def ok_row(name, **fields):
    return {"id": name, "prompt": f"prompt {name}", "max_tokens": 3, **fields}


def run(paged, rows, *flags):
    """Output rows by id, the exit code, and that order and count are those of the input."""
    paged.write("in.jsonl", rows)
    result = paged("generate", "in.jsonl", *flags)
    return {row["id"]: row for row in result.rows}, result.code


def test_A1_prompts_that_never_fit_are_refused_at_once_with_numbers(paged):
    short = [ok_row(f"s{i}") for i in range(10)]
    long = [{"id": f"l{i}", "prompt": "x" * 1000} for i in range(5)]
    late = [ok_row(f"z{i}") for i in range(3)]
    rows, code = run(paged, [*short, *long, *late], "--num-pages", 50, "--max-model-len", 2048)
    assert code == 3
    for i in range(5):
        assert rows[f"l{i}"]["error"]["code"] == "prompt_too_long"
        assert rows[f"l{i}"]["error"]["message"].startswith(
            "needs 63 pages, the pool has 50: shorten by 200 tokens"
        )
    assert all(rows[row["id"]]["usage"]["completion_tokens"] == 3 for row in [*short, *late])


@pytest.mark.parametrize("flags", [(), ("--no-prefix-caching",)])
def test_A8_the_same_error_with_and_without_prefix_cache(paged, flags):
    rows, code = run(
        paged, [{"id": "l", "prompt": "x" * 1000}], "--num-pages", 10, "--max-model-len", 2048, *flags
    )
    assert code == 3
    assert rows["l"]["error"]["message"].startswith("needs 63 pages, the pool has 10")


@pytest.mark.parametrize("flags", [(), ("--no-prefix-caching",)])
def test_A7_the_same_prompt_again_and_again(paged, flags):
    rows = [{"id": f"{n}-{i}", "prompt": "x" * n, "max_tokens": 4} for n in (16, 17, 32) for i in range(5)]
    found, code = run(paged, rows, "--max-num-seqs", 1, *flags)
    assert code == 0
    for n in (16, 17, 32):
        assert len({found[f"{n}-{i}"]["text"] for i in range(5)}) == 1
        assert found[f"{n}-4"]["usage"]["cached_tokens"] == (0 if flags else (n - 1) // 16 * 16)


@pytest.mark.parametrize(
    "bias", [{"999999": 5}, {"-1": 1}, {"abc": 1}, {"5": 1e9}, {"5": "x"}, [5], {"5": None}]
)
def test_A14_a_bad_logit_bias_is_an_error_row_that_names_it(paged, bias):
    found, code = run(paged, [ok_row("bad", logit_bias=bias), ok_row("good")])
    assert code == 3
    assert "logit_bias" in found["bad"]["error"]["message"]
    assert "error" not in found["good"]


def test_A15_max_tokens_null_zero_and_nonsense(paged):
    rows = [ok_row("none"), ok_row("zero", echo=True), ok_row("below"), ok_row("text")]
    for row, value in zip(rows, (None, 0, -1, "5"), strict=True):
        row["max_tokens"] = value
    found, _ = run(paged, rows, "--max-model-len", 64)
    assert found["none"]["usage"]["completion_tokens"] == 64 - len("prompt none")
    assert found["none"]["finish_reason"] == "length"
    assert found["zero"]["text"] == "prompt zero"
    assert found["zero"]["usage"]["completion_tokens"] == 0
    for name in ("below", "text"):
        assert "max_tokens" in found[name]["error"]["message"]


def test_A16_the_templates_own_message(paged):
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    found, _ = run(paged, [{"id": "m", "messages": messages}, ok_row("good")])
    assert "roles must alternate" in found["m"]["error"]["message"]
    assert "error" not in found["good"]


def test_A11_A12_stop_texts_across_tokens_are_cut_exactly(paged):
    paged.use_engine(next_token=scripted({"p": "The capital is Paris, it am.", "q": "Paris"}))
    rows = [
        {"id": "whole", "prompt": "p", "stop": " is Par"},
        {"id": "inside", "prompt": "p", "stop": ["am", "Pari"]},
        {"id": "kept", "prompt": "p", "stop": "Pari", "include_stop_str_in_output": True},
        {"id": "none", "prompt": "q", "stop": "Parisian"},
    ]
    found, _ = run(paged, rows)
    assert found["whole"]["text"] == "The capital"
    assert found["inside"]["text"] == "The capital is "
    assert found["kept"]["text"] == "The capital is Pari"
    assert found["none"]["text"] == "Paris"
    assert {row["finish_reason"] for row in found.values()} == {"stop"}


def test_A13_the_streamed_answer_is_the_whole_text(paged):
    text = "한국어 👍🏽 ñ"
    paged.use_engine(next_token=scripted({"p": text}))
    assert paged("generate", "-p", "p").out == text + "\n"


def test_C1_an_empty_stop_text_is_refused(paged):
    found, _ = run(paged, [ok_row("bad", stop=["", "x"]), ok_row("good")])
    assert "stop" in found["bad"]["error"]["message"]
    assert "error" not in found["good"]


def test_C23_mark_line_ends_blank_lines_and_line_numbers(paged):
    lines = [
        '\ufeff{"prompt": "a", "max_tokens": 1}',
        "",
        '{"prompt": ""}',
        "   ",
        '{"prompt": "b", "max_tokens": 1}',
    ]
    paged.write("in.jsonl", "\r\n".join(lines).encode())
    rows = paged("generate", "in.jsonl").rows
    assert [row["id"] for row in rows] == ["1", "3", "5"]
    assert rows[1]["error"]["line"] == 3


def test_C25_one_row_that_is_too_long_among_a_thousand(paged):
    rows = [{"id": i, "prompt": f"p{i}", "max_tokens": 1} for i in range(1000)]
    rows[2]["prompt"] = "x" * 3000
    paged.write("in.jsonl", rows)
    result = paged("generate", "in.jsonl", "-o", "out.jsonl", "-q")
    out = paged.read()
    assert result.code == 3
    assert [row["id"] for row in out] == list(range(1000))
    assert [row["id"] for row in out if "error" in row] == [2]


def test_P4_bad_rows_do_not_disturb_their_neighbours(paged):
    good = [ok_row(f"g{i}", temperature=0.7) for i in range(12)]
    alone, _ = run(paged, good, "--seed", 5)
    bad = ["{", '{"prompt": 1}', json.dumps({"prompt": "x" * 5000}), '{"prompt": "x", "stop": [""]}', "\x00"]
    # After the good ones, so that their lines (and with them their seeds) stay.
    mixed, code = run(paged, [*good, *bad * 5], "--seed", 5)
    assert code == 3
    assert len(mixed) == 12 + 25
    assert {name: mixed[name]["text"] for name in alone} == {name: row["text"] for name, row in alone.items()}


def test_P5_everything_is_answered_or_refused_in_a_small_pool(paged):
    rows = [{"id": i, "prompt": "x" * (10 + 13 * i % 90), "max_tokens": 5 + i % 40} for i in range(60)]
    found, code = run(paged, rows, "--num-pages", 8, "--max-model-len", 4096)
    assert len(found) == 60
    assert code == 0


@pytest.mark.parametrize("order", [(), ("--unordered",)])
@pytest.mark.parametrize("num_rows", [1, 4, 7])
def test_openai_batch_rows_are_written_exactly_once_over_a_kill(paged, num_rows, order):
    """The same promise as for plain rows: cut anywhere, in the middle of a row, and run again."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    rows = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": {**body, "seed": i}}
        for i in range(8)
    ]
    rows[2]["url"], rows[5]["custom_id"] = "/v1/embeddings", "c4"
    paged.write("in.jsonl", rows)
    command = ("generate", "in.jsonl", "-o", "out.jsonl", *order)
    assert paged(*command).code == 3
    whole = paged.read()
    path = paged.folder / "out.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:num_rows]) + lines[num_rows][:20])
    assert paged(*command).code == 3
    assert sorted(map(answer_of, paged.read())) == sorted(map(answer_of, whole))
    assert len(whole) == 8
    if not order:
        assert [row["custom_id"] for row in paged.read()] == [row["custom_id"] for row in rows]


def answer_of(row):
    """All of a batch row but the time of the run, and what was in the prefix cache."""
    for name in ("created", "usage"):
        row["response"]["body"].pop(name, None)
    return json.dumps(row, sort_keys=True)
