"""`paged generate` over the scripted engine: shapes of rows, order, stdin, -p, exit codes, refusals."""

from __future__ import annotations

import json
import threading

import pytest

from tests.fakes import scripted

ROW_KEYS = ["id", "text", "finish_reason", "usage", "seconds"]


def prompts(*texts: str, **fields):
    return [{"id": f"r{index}", "prompt": text, **fields} for index, text in enumerate(texts)]


def test_rows_have_the_documented_shape(paged):
    paged.use_engine(next_token=scripted({"Paris is": " in France."}))
    paged.write("in.jsonl", prompts("Paris is"))
    result = paged("generate", "in.jsonl")
    (row,) = result.rows
    assert result.code == 0
    assert list(row) == ROW_KEYS
    assert row["text"] == " in France."
    assert row["finish_reason"] == "stop"
    # The end-of-sequence token was sampled too.
    assert row["usage"] == {"prompt_tokens": 8, "completion_tokens": 12, "cached_tokens": 0}
    assert list(row["seconds"]) == ["queued", "first_token", "total"]
    assert 0 <= row["seconds"]["queued"] <= row["seconds"]["first_token"] <= row["seconds"]["total"]


def test_C25_a_row_that_can_never_fit_is_an_error_row_and_the_others_are_answered(paged):
    rows = prompts(*(["x" * 20] * 30), max_tokens=3)
    rows[3]["prompt"] = "y" * 2000
    paged.write("in.jsonl", rows)
    result = paged("generate", "in.jsonl", "-o", "out.jsonl")
    assert result.code == 3
    out = paged.read()
    assert [row["id"] for row in out] == [row["id"] for row in rows]
    assert [row["id"] for row in out if "error" in row] == ["r3"]
    assert out[3]["error"]["code"] == "prompt_too_long"
    assert out[3]["error"]["line"] == 4
    assert "29 answered, 1 failed" in result.err


def test_n_logprobs_and_token_ids(paged):
    paged.write("in.jsonl", [{"prompt": "ab", "n": 2, "max_tokens": 2, "temperature": 1, "logprobs": 1}])
    (row,) = paged("generate", "in.jsonl", "--return-token-ids").rows
    assert "text" not in row
    assert [choice["index"] for choice in row["choices"]] == [0, 1]
    assert row["choices"][0]["text"] != row["choices"][1]["text"]
    for choice in row["choices"]:
        assert bytes(choice["token_ids"]).decode() == choice["text"]
        assert choice["logprobs"]["tokens"] == list(choice["text"])
        assert choice["logprobs"]["text_offset"] == [0, 1]
        assert choice["logprobs"]["token_logprobs"] == [-1.0, -1.0]
        assert [list(top.values()) for top in choice["logprobs"]["top_logprobs"]] == [[-1.0], [-1.0]]


def test_echo_with_logprobs_covers_the_prompt(paged):
    paged.write("in.jsonl", [{"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0}])
    (row,) = paged("generate", "in.jsonl").rows
    assert row["text"] == "abc"
    assert row["logprobs"]["tokens"] == ["a", "b", "c"]
    assert row["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert row["logprobs"]["text_offset"] == [0, 1, 2]


def test_prompt_logprobs_stand_apart(paged):
    paged.write("in.jsonl", [{"prompt": "abc", "max_tokens": 1, "prompt_logprobs": 0}])
    (row,) = paged("generate", "in.jsonl").rows
    assert row["prompt_logprobs"]["tokens"] == ["a", "b", "c"]
    assert "logprobs" not in row


def test_openai_batch_lines_give_openai_batch_output(paged):
    user = [{"role": "user", "content": "hi"}]
    lines = [
        {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": user, "max_tokens": 2, "logprobs": True, "top_logprobs": 1},
        },
        {
            "custom_id": "b",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "x", "max_tokens": 2},
        },
        {"custom_id": "c", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}},
        "{bad",
    ]
    paged.write("in.jsonl", lines)
    result = paged("generate", "in.jsonl")
    assert result.code == 3
    chat, completion, refused, bad = result.rows
    assert [row["custom_id"] for row in result.rows] == ["a", "b", "c", "4"]
    assert chat["response"]["status_code"] == 200
    assert chat["error"] is None
    body = chat["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert len(body["choices"][0]["logprobs"]["content"]) == 2
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 2
    assert completion["response"]["body"]["object"] == "text_completion"
    assert refused["response"]["status_code"] == 400
    assert refused["error"]["code"] == "unsupported_url"
    assert bad["error"]["code"] == "invalid_json"


def test_output_is_in_input_order_although_rows_finish_otherwise(paged):
    lengths = [40, 1, 30, 2, 20, 3]
    paged.write("in.jsonl", [{"id": i, "prompt": "x", "max_tokens": n} for i, n in enumerate(lengths)])
    ordered = paged("generate", "in.jsonl").rows
    assert [row["id"] for row in ordered] == list(range(6))
    unordered = paged("generate", "in.jsonl", "--unordered").rows
    assert [row["id"] for row in unordered] == [1, 3, 5, 4, 2, 0]
    texts = {row["id"]: row["text"] for row in unordered}
    assert texts == {row["id"]: row["text"] for row in ordered}


def test_more_rows_than_fit_in_the_window(paged):
    paged.write("in.jsonl", [{"id": i, "prompt": f"p{i}", "max_tokens": 1 + i % 5} for i in range(300)])
    result = paged("generate", "in.jsonl", "--max-num-seqs", 2)
    assert [row["id"] for row in result.rows] == list(range(300))


@pytest.mark.parametrize("arguments", [(), ("-o", "out.jsonl")])
def test_stdin(paged, arguments):
    result = paged("generate", "-", *arguments, stdin=b'{"prompt": "a", "max_tokens": 1}\n{"prompt": "b"}')
    rows = result.rows if not arguments else paged.read()
    assert [row["id"] for row in rows] == ["1", "2"]
    assert result.code == 0


def test_stdin_with_output_is_done_once(paged):
    rows = b'{"prompt": "a", "max_tokens": 1}\n'
    paged("generate", "-", "-o", "out.jsonl", stdin=rows)
    assert "complete, 1 rows" in paged("generate", "-", "-o", "out.jsonl", stdin=rows).err
    refused = paged("generate", "-", "-o", "out.jsonl", stdin=rows + rows)
    assert refused.code == 2
    assert "input.sha256 was" in refused.err


def test_text_file(paged):
    paged.write("in.txt", b"first\n\nsecond\n")
    rows = paged("generate", "in.txt", "--max-tokens", 2).rows
    assert [(row["id"], row["usage"]["prompt_tokens"]) for row in rows] == [("1", 5), ("3", 6)]


def test_empty_input_is_done_at_once(paged):
    paged.write("in.jsonl", b"\n\n")
    result = paged("generate", "in.jsonl", "-o", "out.jsonl")
    assert result.code == 0
    assert paged.read() == []


def test_flags_are_defaults_for_rows_and_files_are_below_flags(paged):
    paged.write("paged.toml", b"[sampling]\nmax_tokens = 3\nmin_tokens = 3\n")
    paged.write("in.jsonl", [{"prompt": "a"}, {"prompt": "a", "max_tokens": 5}])
    rows = paged("generate", "in.jsonl").rows
    assert [row["usage"]["completion_tokens"] for row in rows] == [3, 5]
    rows = paged("generate", "in.jsonl", "--max-tokens", 4).rows
    assert [row["usage"]["completion_tokens"] for row in rows] == [4, 5]


def test_stop_flag_may_be_repeated(paged):
    paged.use_engine(next_token=scripted({"p": "abcdef", "q": "fedcba"}))
    paged.write("in.jsonl", prompts("p", "q"))
    rows = paged("generate", "in.jsonl", "--stop", "cd", "--stop", "dc").rows
    assert [row["text"] for row in rows] == ["ab", "fe"]


def test_drawn_seed_is_said_and_repeats_the_run(paged):
    paged.write("in.jsonl", prompts("p", "q", temperature=1.0, max_tokens=8))
    first = paged("generate", "in.jsonl")
    seed = first.err.split("--seed ")[1].split()[0]
    again = paged("generate", "in.jsonl", "--seed", seed)
    assert [row["text"] for row in again.rows] == [row["text"] for row in first.rows]
    other = paged("generate", "in.jsonl", "--seed", int(seed) ^ 1)
    assert [row["text"] for row in other.rows] != [row["text"] for row in first.rows]


def test_quiet_says_nothing(paged):
    paged.write("in.jsonl", prompts("p", max_tokens=1))
    assert paged("generate", "in.jsonl", "-q").err == ""


def test_summary_names_both_contiguous_reservations(paged):
    paged.write("in.jsonl", prompts("p" * 30, "q" * 40, max_tokens=50))
    err = paged("generate", "in.jsonl", "-o", "out.jsonl").err
    assert "2 rows in" in err
    assert "(prompt + max_tokens)" in err
    assert "(longest sequence, 256)" in err


def test_prompt_flag_streams_the_answer(paged):
    paged.use_engine(next_token=scripted({"say": "héllo"}))
    result = paged("generate", "-p", "say")
    assert (result.code, result.out) == (0, "héllo\n")


def test_prompt_flag_with_output_is_a_row(paged):
    paged("generate", "-p", "x", "-o", "out.jsonl", "--max-tokens", 1)
    assert [row["id"] for row in paged.read()] == ["1"]


def test_prompt_flag_with_several_answers(paged):
    out = paged("generate", "-p", "x", "-n", 2, "--max-tokens", 3).out
    assert [line[:4] for line in out.splitlines()] == ["[0] ", "[1] "]


def test_prompt_that_is_too_long_is_one_line_and_exit_code_2(paged):
    result = paged("generate", "-p", "x" * 3000)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("paged: ")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing to answer"),
        (("none.jsonl",), "none.jsonl: No such file"),
        ((".",), "Is a directory"),
        (("in.jsonl", "-p", "x"), "-p and FILE both give prompts"),
        (("in.jsonl", "--chat"), "--chat answers in the terminal"),
        (("in.jsonl", "--overwrite"), "give -o OUT"),
        (("in.jsonl", "--retry-errors"), "give -o OUT"),
        (("in.jsonl", "-o", "o", "--retry-errors", "--overwrite"), "give one of them"),
        (("in.jsonl", "-o", "missing/out.jsonl"), "missing/out.jsonl: No such file or directory"),
        (("in.jsonl", "-o", "."), "is a folder"),
        (("in.jsonl", "-o", "in.jsonl"), "is the input"),
        (("in.jsonl", "--temperature", "-1"), "--temperature: temperature is -1.0"),
        (("in.jsonl", "--max-tokens", "-1"), "--max-tokens: max_tokens is -1"),
        (("in.jsonl", "--page-size", "0"), "--page-size: cache.page_size is 0"),
        (("in.jsonl", "--kv-memory", "lots"), "--kv-memory: cache.kv_memory_bytes is 'lots'"),
        (("in.jsonl", "--dtype", "float23"), "did you mean float32?"),
        (("in.jsonl", "--set", "cache.page_sice=3"), "did you mean page_size?"),
        (("in.jsonl", "--config", "none.toml"), "none.toml: No such file"),
        (("in.jsonl", "--activation", "int9"), "did you mean int8?"),
        (("in.jsonl", "--quantization", "awk"), "did you mean awq?"),
        (("in.jsonl", "--tensor-parallel-size", "2"), "--tensor-parallel-size 2: this version runs on one"),
        (("in.jsonl", "--page-sise", "3"), "No such option: --page-sise"),
        (("in.jsonl", "--page-size", "x"), "--page-size"),
    ],
)
def test_mistakes_are_one_line_with_exit_code_2_and_nothing_is_run(paged, arguments, words):
    paged.write("in.jsonl", prompts("x"))
    result = paged("generate", *arguments)
    assert result.code == 2
    assert words in result.err
    assert result.err.count("\n") == 1
    assert result.out == ""
    assert paged.engines == []


def test_unreadable_input(paged):
    path = paged.write("in.jsonl", prompts("x"))
    path.chmod(0)
    try:
        path.open().close()
    except PermissionError:
        result = paged("generate", "in.jsonl")
        assert (result.code, "Permission denied" in result.err) == (2, True)
    else:
        pytest.skip("this user may read every file")


def test_aliases_and_what_changes_nothing_are_taken(paged):
    paged.write("in.jsonl", prompts("x", max_tokens=1))
    result = paged(
        *("generate", "in.jsonl", "--block-size", 8, "--kv-cache-memory-bytes", 1 << 20),
        *("--tensor-parallel-size", 1, "--activation", "auto"),
    )
    assert result.code == 0
    assert paged.engines[0].resolved.page_size == 8


def test_binary_input_gives_error_rows(paged):
    paged.write("in.jsonl", bytes(range(256)) * 3)
    result = paged("generate", "in.jsonl")
    assert result.code == 3
    assert all("error" in row for row in result.rows)
    assert [row["error"]["line"] for row in result.rows] == [1, 2, 3, 4]


def test_dead_engine_is_our_fault_and_what_was_done_is_kept(paged):
    paged.use_engine(fail_at=12)
    paged.write("in.jsonl", [{"id": i, "prompt": "x", "max_tokens": 2 + 30 * (i % 2)} for i in range(6)])
    result = paged("generate", "in.jsonl", "-o", "out.jsonl")
    assert result.code == 1
    assert [row["id"] for row in paged.read()] == [0]
    paged.use_engine()
    result = paged("generate", "in.jsonl", "-o", "out.jsonl")
    assert result.code == 0
    assert [row["id"] for row in paged.read()] == list(range(6))


def test_unexpected_errors_are_one_line_and_a_traceback_with_v(paged, monkeypatch):
    def broken(*arguments):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("pagedcli.cli.engine_access.open_engine", broken)
    result = paged("generate", "-p", "x")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "unexpected ZeroDivisionError: a defect" in result.err
    assert "Traceback" in paged("generate", "-p", "x", "-v").err


def test_chat_remembers_and_forgets(paged):
    answers = {
        "[user]one\n[assistant]": "first",
        "[user]one\n[assistant]first\n[user]two\n[assistant]": "second",
        "[user]three\n[assistant]": "third",
    }
    paged.use_engine(next_token=scripted(answers, default="wrong"))
    typed = iter(["one", "", "two", "/clear", "/what", "three", "/exit", "never"])
    paged_input = paged._monkeypatch
    paged_input.setattr("pagedcli.cli.chat._input", lambda: next(typed))
    result = paged("generate", "--chat")
    assert (result.code, result.out) == (0, "first\nsecond\nthird\n")
    assert next(typed) == "never"


def test_chat_ends_with_stdin_and_takes_the_models_sampling_below_flags(paged, monkeypatch):
    seen = []

    def next_token(tokens, num_prompt, sample_index, seed, temperature):
        seen.append(temperature)
        return 257

    paged.use_engine(next_token=next_token)

    def end():
        raise EOFError

    typed = iter(["hi"])
    monkeypatch.setattr("pagedcli.cli.chat._input", lambda: next(typed, None) or end())
    assert paged("generate", "--chat").code == 0
    assert paged("generate", "--chat", "-p", "x", "--temperature", 0.25).code == 0
    assert paged("generate", "-p", "x").code == 0
    assert list(dict.fromkeys(seen)) == [0.5, 0.25, 0.0]  # depth 2: a step more than there are tokens


def test_chat_names_the_models_file_when_its_sampling_is_wrong(paged, monkeypatch):
    monkeypatch.setattr("pagedcli.cli.chat.model_defaults", lambda config: {"temperature": "hot"})
    result = paged("generate", "--chat", "-p", "x")
    assert result.code == 2
    assert "the model's generation_config.json: temperature is 'hot'" in result.err
    assert paged("generate", "--chat", "-p", "x", "--temperature", 0.25).code == 0


def test_chat_tells_an_answer_that_was_cut_from_one_that_ended(paged, monkeypatch):
    paged.use_engine(next_token=scripted({"[user]short\n[assistant]": "ok"}, default="and so on"))
    typed = iter(["short", "long", "/exit"])
    monkeypatch.setattr("pagedcli.cli.chat._input", lambda: next(typed))
    result = paged("generate", "--chat", "--max-tokens", 5)
    assert result.out == "ok\nand s\n"
    assert result.err.count("cut after 5 tokens: --max-tokens N allows more") == 1


def test_chat_refuses_a_message_and_goes_on(paged, monkeypatch):
    typed = iter(["x" * 5000, "short", "/exit"])
    monkeypatch.setattr("pagedcli.cli.chat._input", lambda: next(typed))
    result = paged("generate", "--chat", "--max-tokens", 3)
    assert result.code == 0
    assert "/clear forgets" in result.err
    assert len(result.out.splitlines()) == 1


def test_a_run_off_the_main_thread_works(paged):
    path = paged.write("in.jsonl", prompts("x", max_tokens=1))
    codes = []
    thread = threading.Thread(target=lambda: codes.append(paged("generate", path).code))
    thread.start()
    thread.join()
    assert codes == [0]


def test_ids_and_texts_are_written_as_they_are(paged):
    paged.use_engine(next_token=scripted({"p": "日本 \u2028 é"}))
    paged.write("in.jsonl", [{"id": "ключ", "prompt": "p"}])
    result = paged("generate", "in.jsonl", "-o", "out.jsonl")
    assert result.code == 0
    line = (paged.folder / "out.jsonl").read_bytes()
    assert "ключ" in line.decode()
    assert json.loads(line)["text"] == "日本 \u2028 é"
