"""Input rows: ids, kinds, checks and errors; lines with their physical numbers (C23); a fuzz of malformed lines."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcli.cli.lines import read_lines
from pagedcli.cli.row_fields import RowKind
from pagedcli.cli.rows import RowReader, row_seed


def read(data: bytes, *, text: bool = False, defaults=None, max_bytes: int = 1 << 20):
    reader = RowReader(defaults or {}, text=text, run_seed=1)
    return list(reader.rows(read_lines(io.BytesIO(data), max_bytes)))


def one(value: object, **options):
    (row,) = read(json.dumps(value).encode(), **options)
    return row


def test_C23_byte_order_mark_crlf_blank_lines_and_no_final_newline():
    data = b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n   \t\r\n{"prompt": "b"}\r\n{"prompt": "c"}'
    rows = read(data)
    assert [(row.line, row.ordinal, row.id, row.prompt) for row in rows] == [
        (1, 0, "1", "a"),
        (4, 1, "4", "b"),
        (5, 2, "5", "c"),
    ]


@pytest.mark.parametrize("data", [b"", b"\n", b"\r\n \n\t", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_blank_files_have_no_rows(data):
    assert read(data) == []


def test_text_file_is_a_prompt_a_line_with_its_spaces():
    rows = read(b"  one \r\n\n{two}\n", text=True)
    assert [(row.id, row.prompt) for row in rows] == [("1", "  one "), ("3", "{two}")]


def test_unicode_line_separators_do_not_end_a_line():
    (row,) = read('{"prompt": "a\u2028b\u0085c"}'.encode())
    assert row.prompt == "a\u2028b\u0085c"


def test_later_rows_with_an_id_are_errors_with_that_id():
    rows = read(
        b'{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n{"id": "2", "prompt": "z"}\n{"id": "a"}'
    )
    assert [(row.id, row.error and row.error.code) for row in rows] == [
        ("a", None),
        ("a", "duplicate_id"),
        ("2", None),
        ("a", "duplicate_id"),
    ]


def test_line_number_as_id_is_an_id_too():
    rows = read(b'{"id": "2", "prompt": "x"}\n{"prompt": "y"}\n{bad\n{"id": "3", "prompt": "x"}')
    assert [(row.id, row.error and row.error.code) for row in rows] == [
        ("2", None),
        ("2", "duplicate_id"),
        ("3", "invalid_json"),
        ("3", "duplicate_id"),
    ]


@pytest.mark.parametrize("value", [None, 1.5, True, [], {}, "\ud800", 1 << 70])
def test_ids_that_cannot_be_read_give_the_line_number(value):
    row = one({"id": value, "prompt": "x"})
    assert row.id == "1"
    assert row.error is not None
    assert row.error.field == "id"


@pytest.mark.parametrize("value", ["", "a b", "ü", 0, -7, 12345678901])
def test_ids_are_kept_as_given(value):
    assert one({"id": value, "prompt": "x"}).id == value


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        ({"id": "a"}, "invalid_row", "give one of prompt, messages and prompt_token_ids: it has none"),
        ({"prompt": "a", "messages": []}, "invalid_row", "it has prompt and messages"),
        ({"prompt": 3}, "invalid_row", "prompt: give text"),
        ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, "invalid_row", "needs messages: leave it out"),
        ({"prompt": "\ud800"}, "invalid_row", "half a surrogate pair"),
        ({"messages": "hi"}, "invalid_row", "messages: give a list"),
        ({"messages": []}, "invalid_row", "messages: give a list"),
        ({"messages": [{"content": "x"}]}, "invalid_row", "messages[0]: give an object"),
        ({"messages": [{"role": "user", "content": "\udc00"}]}, "invalid_row", "half a surrogate pair"),
        ({"prompt_token_ids": []}, "invalid_row", "at least one token id"),
        ({"prompt_token_ids": [1, True]}, "invalid_row", "at least one token id"),
        ({"prompt_token_ids": "12"}, "invalid_row", "at least one token id"),
        (
            {"prompt": "x", "tempratur": 1},
            "unknown_field",
            "unknown field 'tempratur': did you mean temperature?",
        ),
        ({"prompt": "x", "zzzz": 1}, "unknown_field", "unknown field 'zzzz': leave it out"),
        ({"prompt": "x", "temperature": "hot"}, "invalid_value", "temperature is 'hot'"),
        ({"prompt": "x", "max_tokens": -1}, "invalid_value", "max_tokens is -1"),
        ({"prompt": "x", "stop": ["", "x"]}, "invalid_value", "stop"),
        ({"prompt": "x", "logit_bias": {"abc": 1}}, "invalid_value", "logit_bias"),
        ({"messages": [{"role": "user"}], "chat_template_kwargs": 1}, "invalid_row", "chat_template_kwargs"),
        (
            {"messages": [{"role": "user"}], "chat_template_kwargs": {"template": "x"}},
            "invalid_row",
            "template is set by the row itself",
        ),
        ([1], "invalid_json", "not a JSON object"),
        ("prompt", "invalid_json", "not a JSON object"),
    ],
)
def test_bad_rows_name_field_and_remedy(value, code, words):
    row = one(value)
    assert row.error is not None
    assert row.error.code == code
    assert words in str(row.error)


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (b"{bad", "invalid_json", "at character 2"),
        (b"The sea is", "invalid_json", 'write {"prompt": "..."}, or name the file .txt'),
        (b'{"prompt": "a", "prompt": "b"}', "invalid_json", "'prompt' is given twice"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json", "NaN is not JSON"),
        (b'{"prompt": ' + b"[" * 100_000, "invalid_json", "nested too deeply"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "invalid_json", "a number has too many digits"),
        (b'{"prompt": "\xff"}', "invalid_utf8", "not UTF-8 at byte 13"),
        ('{"prompt": "a"}'.encode("utf-16"), "invalid_utf8", "UTF-16: convert it with iconv"),
        (b"\x00\x01\x02", "invalid_json", "not JSON"),
        (b'{"prompt": "a"} {"prompt": "b"}', "invalid_json", "Extra data"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_lines_that_are_no_json_are_error_rows(data, code, words):
    (row,) = read(data)
    assert row.id == "1"
    assert row.error is not None
    assert row.error.code == code
    assert words in str(row.error)
    assert len(str(row.error)) < 200


def test_a_huge_line_is_an_error_row_and_the_next_one_is_read():
    data = b'{"prompt": "' + b"x" * 5000 + b'"}\n{"prompt": "y"}\n' + b" " * 5000
    rows = read(data, max_bytes=1000)
    assert [(row.line, row.error and row.error.code) for row in rows] == [
        (1, "line_too_long"),
        (2, None),
        (3, "line_too_long"),
    ]


def test_line_of_exactly_the_limit_is_read():
    data = b'{"prompt": "x"}'
    assert read(data + b"\n" + data, max_bytes=len(data))[0].error is None


def test_row_fields_count_more_than_defaults_and_null_means_not_given():
    row = one(
        {"prompt": "x", "temperature": 0.5, "top_k": None, "max_tokens": None},
        defaults={"temperature": 0.9, "top_k": 5, "max_tokens": 7, "top_p": 0.3},
    )
    assert (row.params.temperature, row.params.top_k, row.params.max_tokens, row.params.top_p) == (
        0.5,
        5,
        None,
        0.3,
    )


def test_seeds_follow_from_run_seed_and_line_unless_given():
    rows = read(b'{"prompt": "x"}\n{"prompt": "y"}\n{"prompt": "z", "seed": 3}')
    assert [row.params.seed for row in rows] == [row_seed(1, 1), row_seed(1, 2), 3]
    assert row_seed(1, 1) != row_seed(2, 1)


def test_echo_with_logprobs_asks_for_the_prompts_too():
    assert one({"prompt": "x", "echo": True, "logprobs": 2}).params.prompt_logprobs == 2
    assert one({"prompt": "x", "logprobs": 2}).params.prompt_logprobs is None


def batch(url: str, **body):
    return {"custom_id": "c", "method": "POST", "url": url, "body": body}


USER = [{"role": "user", "content": "hi"}]


def test_batch_chat_line():
    body = {
        "model": "gpt-4o",
        "messages": USER,
        "max_completion_tokens": 9,
        "logprobs": True,
        "top_logprobs": 3,
    }
    extra = {
        "user": "u",
        "store": False,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
    }
    row = one(batch("/v1/chat/completions", **body, **extra, reasoning_effort="low", temperature=None))
    assert row.error is None
    assert (row.kind, row.id, row.messages) == (RowKind.CHAT, "c", USER)
    assert (row.params.max_tokens, row.params.logprobs) == (9, 3)
    assert row.template_args == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("prompt", "expected"), [("x", "x"), ([1, 2], (1, 2)), (["x"], "x"), ([[1, 2]], (1, 2))]
)
def test_batch_completion_prompts(prompt, expected):
    row = one(batch("/v1/completions", prompt=prompt, logprobs=1))
    assert row.error is None
    assert (row.kind, row.prompt, row.params.logprobs) == (RowKind.COMPLETION, expected, 1)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (batch("/v1/embeddings", input="x"), "url is '/v1/embeddings'"),
        (batch("/v1/completions", prompt=["a", "b"]), "give one prompt in a line"),
        (batch("/v1/completions"), "prompt: give text"),
        (batch("/v1/completions", prompt="x", stream=True), "stream is not supported in a batch"),
        (
            batch("/v1/chat/completions", messages=USER, tools=[{"type": "function"}]),
            "tools is not supported",
        ),
        (batch("/v1/chat/completions", messages=USER, logprobs=3), "give true or false"),
        (batch("/v1/chat/completions", messages=USER, top_logprobs=3), "top_logprobs needs logprobs true"),
        (batch("/v1/chat/completions", messages=USER, prompt="x"), "unknown field 'prompt'"),
        (batch("/v1/chat/completions", messages=USER) | {"id": 3}, "unknown field 'id'"),
        (batch("/v1/chat/completions", messages=USER) | {"method": "GET"}, "method is 'GET'"),
        ({"custom_id": "c", "url": "/v1/completions", "body": 3}, "body: give an object"),
    ],
)
def test_bad_batch_lines_keep_their_custom_id(value, words):
    row = one(value)
    assert row.id == "c"
    assert row.kind is not RowKind.PLAIN
    assert words in str(row.error)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=6), items, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        "id",
        "prompt",
        "messages",
        "prompt_token_ids",
        "temperature",
        "stop",
        "n",
        "seed",
        "custom_id",
        "url",
        "body",
    ]
)
OBJECTS = st.dictionaries(NAMES | st.text(max_size=6), JSON_VALUES, max_size=5).map(
    lambda value: json.dumps(value).encode()
)
LINES = st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"")) | OBJECTS


@settings(max_examples=300, deadline=None)
@given(st.lists(LINES, max_size=8), st.booleans(), st.sampled_from([b"\n", b"\r\n"]))
def test_any_line_that_is_not_blank_gives_exactly_one_row(lines, text, end):
    data = end.join(lines)
    physical = data.split(b"\n")
    if physical[0].startswith(b"\xef\xbb\xbf"):
        physical[0] = physical[0][3:]
    expected = [number for number, line in enumerate(physical, 1) if line.strip()]
    rows = read(data, text=text)
    assert [row.line for row in rows] == expected
    assert [row.ordinal for row in rows] == list(range(len(expected)))
    served = [str(row.id) for row in rows if row.error is None or row.error.code != "duplicate_id"]
    assert len(served) == len(set(served))
    for row in rows:
        json.dumps(row.id, ensure_ascii=False).encode()
