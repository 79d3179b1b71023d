"""Servers that misbehave: each gives a failed request with its reason, or believable figures; never an absurd one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import re
from collections.abc import Awaitable, Callable

import pytest

from pagedcli.bench.goodput import Targets
from pagedcli.bench.http_answer import AnswerReader
from pagedcli.bench.http_drive import LoadState, drive
from pagedcli.bench.http_prompts import Asking, PromptForm
from pagedcli.bench.http_reading import BadAnswer, Reader
from pagedcli.bench.http_report import LoadRun
from pagedcli.bench.http_target import parse_target
from pagedcli.bench.load import Answer, Client, LoadRequest, Target, run_load
from pagedcli.errors import ConfigError
from pagedcli.workloads.requests import WorkloadRequest

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
OLD = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
DONE = b"data: [DONE]\n\n"
Act = Callable[[asyncio.StreamWriter], Awaitable[None]]


def data(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text(word: str, reason: str | None = None) -> bytes:
    return data({"choices": [{"index": 0, "text": word, "finish_reason": reason}]})


def usage(prompt: object = 3, output: object = 2) -> bytes:
    return data({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}})


def chunks(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def ask(*pieces: bytes, pause_s: float = 0.0, stay_open: bool = False, timeout_s: float = 60.0) -> Answer:
    """One request to a server that sends these pieces and closes."""

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        if stay_open:
            await reader.read()

    async def act(target: Target) -> Answer:
        [answer] = await run_load(target, [LoadRequest({"max_tokens": 8})], timeout_s=timeout_s)
        return answer

    answer = asyncio.run(serving(send, act))
    check_sane(answer)
    return answer


async def serving(
    send: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    act: Callable[[Target], Awaitable[Answer]],
) -> Answer:
    """Do something with a server in real time; all its connections are closed afterwards."""
    tasks: list[asyncio.Task[None]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            await send(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        answer = await act(Target("127.0.0.1", server.sockets[0].getsockname()[1]))
        await asyncio.gather(*tasks)
    return answer


def check_sane(answer: Answer) -> None:
    """What must hold whatever a server does."""
    assert answer.end_s >= answer.sent_s
    assert answer.token_times == sorted(answer.token_times)
    assert all(gap >= 0 for gap in answer.itl_s)
    assert 0 <= answer.output_tokens <= max(8, len(answer.token_times))
    if answer.is_served:
        assert answer.ttft_s >= 0
        assert answer.e2e_s >= answer.ttft_s
        assert answer.tpot_s is None or 0 <= answer.tpot_s <= answer.e2e_s
        assert answer.output_tokens >= 1
    state = LoadState(1, answer.start_s, [answer], 0, [(answer.start_s, 1), (answer.end_s, 0)])
    shown = LoadRun(state, {}, {}, {}, 0.0, 1.0, targets=Targets.parse("ttft:1s")).as_dict()
    json.dumps(shown, allow_nan=False)
    assert shown["failed"] == (not answer.is_served)
    for rate in shown["throughput"].values():
        assert 0 <= rate < 1e9


SERVED = {
    "as it should be": (CHUNKED, chunks(text("a"), text("b", "length"), usage(), DONE)),
    "HTTP/1.0 without framing": (OLD, text("a") + text("b", "length") + usage() + DONE),
    "no chunking, with a length": (
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
        % len(text("a") + text("b", "stop") + usage() + DONE),
        text("a") + text("b", "stop") + usage() + DONE,
    ),
    "CRLF, comments and names of events": (
        OLD,
        b": hello\r\n\r\nevent: x\r\nid: 3\r\n"
        + (text("a") + text("b", "stop") + usage() + DONE).replace(b"\n", b"\r\n"),
    ),
    "data without a space": (OLD, (text("a") + text("b") + usage() + DONE).replace(b"data: ", b"data:")),
    "interim answers first": (
        b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED,
        chunks(text("a"), text("b"), usage(), DONE),
    ),
    "the last line without its end": (OLD, text("a") + text("b") + usage() + b"data: [DONE]"),
    "empty deltas and a role first": (
        OLD,
        data({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        + data({"choices": [{"index": 0, "delta": {}}]})
        + data({"choices": []})
        + data({"choices": [{"index": 0, "delta": {"content": "a"}}]})
        + data({"choices": [{"index": 0, "delta": {"content": None, "reasoning_content": "b"}}]})
        + usage()
        + DONE,
    ),
    "headers of 60 KB": (
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 60_000 + b"\r\n\r\n",
        text("a") + text("b") + usage() + DONE,
    ),
    "usage in every event": (
        OLD,
        data({"choices": [{"index": 0, "text": "a"}], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})
        + data(
            {"choices": [{"index": 0, "text": "b"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
        )
        + DONE,
    ),
    "text after the end": (OLD, text("a") + text("b") + usage() + DONE + text("c") + usage(9, 9)),
}


@pytest.mark.parametrize("name", SERVED)
def test_odd_but_whole_answers_count(name: str) -> None:
    answer = ask(*SERVED[name])
    assert (answer.error, answer.text, answer.doubts) == (None, "ab", [])
    assert (answer.prompt_tokens, answer.output_tokens, len(answer.token_times)) == (3, 2, 2)


@pytest.mark.parametrize(
    "name", ["as it should be", "no chunking, with a length", "HTTP/1.0 without framing"]
)
def test_an_answer_ends_though_the_connection_stays_open(name: str) -> None:
    assert ask(*SERVED[name], stay_open=True).error is None


@pytest.mark.parametrize("name", SERVED)
def test_answers_may_come_in_any_pieces(name: str) -> None:
    whole = b"".join(SERVED[name])
    for size in (1, 2, 3, 7):
        if len(whole) < 4000:
            reader = Reader()
            for start in range(0, len(whole), size):
                reader.feed(float(start), whole[start : start + size])
            reader.close(float(len(whole)))
            assert [json.loads(event) for _, event in reader.events.found if event[:1] == b"{"]


DOUBTED = {
    "no usage": (text("a") + text("b", "stop") + DONE, "no usage"),
    "usage is null": (text("a") + text("b") + data({"choices": [], "usage": None}) + DONE, "no usage"),
    "negative": (text("a") + text("b") + usage(3, -7) + DONE, "usage cannot be true"),
    "more than asked for": (text("a") + text("b") + usage(3, 10**12) + DONE, "usage cannot be true"),
    "text": (text("a") + text("b") + usage("3", "2") + DONE, "usage cannot be true"),
    "true": (text("a") + text("b") + usage(True, True) + DONE, "usage cannot be true"),
    "a fraction": (text("a") + text("b") + usage(3.5, 2.5) + DONE, "usage cannot be true"),
    "none at all": (text("a") + text("b") + usage(0, 0) + DONE, "usage cannot be true"),
    "no [DONE]": (text("a") + text("b", "length") + usage(), "no [DONE]"),
}


@pytest.mark.parametrize("name", DOUBTED)
def test_what_cannot_be_true_is_counted_otherwise_and_said(name: str) -> None:
    body, doubt = DOUBTED[name]
    answer = ask(OLD, body)
    assert (answer.error, answer.doubts, answer.output_tokens) == (None, [doubt], 2)
    assert answer.prompt_tokens in (0, 3)


def test_several_tokens_in_an_event_are_as_many_as_the_server_says() -> None:
    answer = ask(CHUNKED, chunks(text("a b c d")), chunks(text("e f g h"))[:-5], pause_s=0.02)
    assert answer.error is not None  # cut off
    answer = ask(OLD, text("a b c d"), text("e f g h") + usage(3, 8) + DONE, pause_s=0.05)
    assert (answer.output_tokens, len(answer.token_times)) == (8, 2)
    assert answer.tpot_s == pytest.approx((answer.token_times[1] - answer.token_times[0]) / 7)


FAILED = {
    "closed at once": ((), "closed without an answer"),
    "half a head": ((b"HTTP/1.1 200",), "closed without an answer"),
    "not HTTP": ((b"SSH-2.0-OpenSSH_9.6\r\n",), "no HTTP"),
    "garbage": ((bytes(range(256)) * 20,), "no HTTP"),
    "a head without end": ((b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,), "head of more than 65536"),
    "a status that is none": ((b"HTTP/1.1 abc OK\r\n\r\n",), "no HTTP"),
    "cut in the middle": ((CHUNKED, b"5\r\ndata:"), "no event stream|ended before"),
    "cut after a token": ((CHUNKED, chunks(text("a"))[:-5]), "ended before \\[DONE\\]"),
    "cut after the reason": ((CHUNKED, chunks(text("a", "stop"))[:-5]), "ended before \\[DONE\\]"),
    "no token": ((CHUNKED, chunks(usage(3, 0), DONE)), "no token came"),
    "an empty answer": ((b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",), "an empty answer"),
    "not streamed": (
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n",
            b'{"choices": []}',
        ),
        "no event stream came, but application/json",
    ),
    "a web page": ((OLD, b"<html>Sign in</html>"), "no event stream came"),
    "an event that is no JSON": ((OLD, b"data: {oops\n\n" + DONE), "no JSON"),
    "an event that is no object": ((OLD, b"data: 7\n\n" + DONE), "no object"),
    "an event nested deeply": ((OLD, b"data: " + b"[" * 100_000 + b"\n\n" + DONE), "no JSON"),
    "an error in the stream": (
        (OLD, text("a") + data({"error": {"message": "out of pages"}}) + DONE),
        "out of pages",
    ),
    "aborted": ((OLD, text("a", "abort") + DONE), "aborted by the server"),
    "500": ((b"HTTP/1.1 500 Internal\r\nContent-Length: 4\r\n\r\noops",), "500: oops"),
    "503 without a length": ((b'HTTP/1.1 503 No\r\n\r\n{"error": {"message": "full"}}',), "503: full"),
    "429": (
        (b"HTTP/1.1 429 Slow\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n",),
        "429 \\(Retry-After: 7\\)",
    ),
    "a redirection": (
        (b"HTTP/1.1 307 There\r\nLocation: http://other/v1\r\nContent-Length: 0\r\n\r\n",),
        "307: redirected to http://other/v1",
    ),
    "a chunk of no length": ((CHUNKED, b"zz\r\nabc"), "a chunk has the length"),
    "a chunk of negative length": ((CHUNKED, b"-5\r\nabc"), "a chunk has the length"),
    "a chunk of huge length": ((CHUNKED, b"fffffffffff\r\nabc"), "a chunk has the length"),
    "a chunk line without end": ((CHUNKED, b"1" * 5000), "a chunk has no length"),
    "a length that is none": ((b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\nabc",), "Content-Length"),
    "shorter than its length": (
        (b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + text("a", "stop"),),
        "ended before",
    ),
}


@pytest.mark.parametrize("name", FAILED)
def test_what_is_no_answer_fails_and_says_why(name: str) -> None:
    pieces, wanted = FAILED[name]
    answer = ask(*pieces)
    assert answer.error is not None
    assert not answer.is_served
    assert "\n" not in answer.error
    assert re.search(wanted, answer.error), answer.error


def test_a_trickle_fails_when_its_time_is_over() -> None:
    answer = ask(*(CHUNKED[index : index + 1] for index in range(60)), pause_s=0.02, timeout_s=0.2)
    assert answer.error == "not answered within 0.2 s"
    assert 0.2 <= answer.e2e_s < 60
    assert ask(OLD, text("a"), stay_open=True, timeout_s=0.1).error == "not answered within 0.1 s"


def test_a_clock_that_goes_back_gives_no_negative_time() -> None:
    moments = iter([10.0, 10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0])

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OLD)
        for part in (text("a"), text("b"), usage() + DONE):
            await asyncio.sleep(0.01)
            writer.write(part)

    async def act(target: Target) -> Answer:
        state = LoadState(1)
        client = Client(clock=lambda: next(moments, 3.0))
        requests = [WorkloadRequest("a", (1,), 2, 2)]
        await drive(target, requests, Asking(PromptForm.IDS), client, state, concurrency=None)
        return state.answers[0]

    answer = asyncio.run(serving(send, act))
    assert answer.error is None
    assert answer.ttft_s == 0
    assert answer.itl_s == [0]
    assert answer.e2e_s >= 0


def test_no_bytes_whatsoever_break_the_reader() -> None:
    rng = random.Random(5)
    good = b"".join(SERVED["as it should be"])
    words = [
        CHUNKED,
        OLD,
        DONE,
        text("a"),
        usage(),
        b"0\r\n\r\n",
        b"\r\n",
        b"5\r\n",
        b"data: {",
        b"\n\n",
        b"\xff\x00",
    ]
    for round_ in range(3000):
        piece = bytearray(b"".join(rng.choices(words, k=rng.randint(1, 8))) if round_ % 2 else good)
        for _ in range(rng.randint(0, 6)):
            piece[rng.randrange(len(piece))] = rng.randrange(256)
        reader, answer = Reader(), Answer(0.0)
        try:
            reader.feed(1.0, bytes(piece[: len(piece) // 2]))
            reader.feed(2.0, bytes(piece[len(piece) // 2 :]))
        except BadAnswer as error:
            answer.error = str(error)
        reader.close(3.0)
        answer.end_s = 3.0
        AnswerReader(answer, 8).finish(reader)
        check_sane(answer)


def test_urls_are_read_or_refused() -> None:
    def parts(url: str) -> tuple[str, int, str, bool]:
        target = parse_target(url)
        return target.host, target.port, target.path, target.tls is not None

    assert parts("localhost:8000") == ("localhost", 8000, "/v1", False)
    assert parts("http://h") == ("h", 80, "/v1", False)
    assert parts("https://h/") == ("h", 443, "/v1", True)
    assert parts("http://h:1/api/v3/chat/completions/") == ("h", 1, "/api/v3", False)
    assert parse_target("http://[::1]:8000/v1/completions").url == "http://[::1]:8000/v1"
    for url in ("", "ftp://h", "http://", "http://h:99999", "http://h:x", "http://h/v1?a=b", "http://h/a b"):
        with pytest.raises(ConfigError, match="URL"):
            parse_target(url)
    with pytest.raises(ConfigError, match="--api-key-file"):
        parse_target("http://me:secret@h/")


def test_the_key_is_sent_and_never_shown() -> None:
    target = parse_target("http://h:1", "secret")
    assert b"Authorization: Bearer secret\r\n" in target.message({"a": math.pi})
    assert b"Authorization: Bearer secret\r\n" in target.get()
    assert "secret" not in target.url


def test_brackets_without_an_end_are_no_url() -> None:
    with pytest.raises(ConfigError, match="Invalid IPv6 URL: give one such as"):
        parse_target("http://[::1")
