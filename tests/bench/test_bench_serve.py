"""`paged bench serve` as a command, against a small server: files, exit codes, refusals, what is shown."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pagedcli.bench.goodput import Targets
from pagedcli.bench.http_answer import Answer
from pagedcli.bench.http_drive import LoadState
from pagedcli.bench.http_prompts import WORDS, words
from pagedcli.bench.http_report import LoadRun
from pagedcli.bench.http_server import engine_figures, parse_metrics
from pagedcli.bench.report.build import build_document
from pagedcli.bench.report.markdown import as_markdown
from pagedcli.bench.server_process import free_port
from pagedcli.cli.bench_serve_display import plain_line, render, view_of
from pagedcli.cli.main import run
from tests.bench.openai_server import OpenAIServer, openai_server

ROWS = "rows.jsonl"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAIServer]:
    monkeypatch.delenv("PAGED_API_KEY", raising=False)
    with openai_server() as running:
        yield running


def bench(url: str, *arguments: str) -> int:
    return run(["bench", "serve", url, "--workload", "random:3-6:2-4", *arguments])


def test_a_run_writes_what_the_page_promises(
    server: OpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "load.json"
    server.metrics = ['vllm:num_preemptions_total{a="b"} 3\n', 'vllm:num_preemptions_total{a="b"} 5\n']
    assert bench(server.url, "-n", "6", "--json", str(file), "--goodput", "e2e:60s", "-c", "2") == 0
    figures = json.loads(file.read_text())
    assert {"settings", "machine", "requests", "failed", "throughput", "ttft_s", "tpot_s", "itl_s", "e2e_s", "kv_use",
            "prefix_hit_rate", "preemptions", "recomputed_tokens", "executor_busy", "limits", "goodput", "arrivals",
            "server", "client", "counted", "version", "date"} <= figures.keys()  # fmt: skip
    assert (figures["requests"], figures["failed"], figures["unfinished"]) == (6, 0, 0)
    assert figures["settings"]["model"] == figures["server"]["model"] == "tiny"
    assert figures["arrivals"] == {"kind": "closed loop", "concurrency": 2}
    assert figures["goodput"]["share"] == 1.0
    assert figures["counted"]["by_usage"] == 6
    assert (figures["preemptions"], figures["prefix_hit_rate"]) == (2, None)
    sent = server.bodies[2:]
    assert len(sent) == 6
    assert all(body["stream"] and body["ignore_eos"] and body["temperature"] == 0 for body in sent)
    assert figures["throughput"]["output_tokens_per_s"] * figures["seconds"] == pytest.approx(
        sum(body["max_tokens"] for body in sent)
    )
    shown = capsys.readouterr().out
    assert "Time to first token" in shown
    assert "Goodput: E2E 60,000 ms" in shown


def test_a_written_workload_asks_the_same_again(server: OpenAIServer, tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    assert (
        bench(server.url, "-n", "5", "-q", "--warm-up", "1", "--rate", "500", "--save-workload", str(file))
        == 0
    )
    first = sorted(body["prompt"] for body in server.bodies[1:])
    server.bodies.clear()
    assert (
        run(["bench", "serve", server.url, "-q", "--warm-up", "1", "--workload", str(file), "--seed", "8"])
        == 0
    )
    assert sorted(body["prompt"] for body in server.bodies[1:]) == first
    assert server.bodies[0]["prompt"] not in first  # the warm-up fills no cache with what is measured


def test_chats_carry_the_answers_and_the_key_goes_along(server: OpenAIServer, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sesame\n")
    code = run(
        ["bench", "serve", f"{server.url}/v1/", "--workload", "chats:2:3:2", "-n", "2", "--chat", "-q",
         "--api-key-file", str(tmp_path / "key"), "--body", "ignore_eos=null", "--body", "top_p=0.5", "-m", "mine"]
    )  # fmt: skip
    assert code == 0
    assert set(server.keys) == {"Bearer sesame"}
    assert set(server.paths) == {"/v1/chat/completions"}
    last = server.bodies[-1]
    assert [message["role"] for message in last["messages"]] == ["user", "assistant", "user"]
    assert last["messages"][1]["content"] == "w0 w1 "
    assert (last["model"], last["top_p"], "ignore_eos" in last) == ("mine", 0.5, False)


def test_failed_requests_give_exit_code_3(
    server: OpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refuse = lambda number, body: (500, b"broken") if number in (3, 4) else None
    assert bench(server.url, "-n", "6", "--json", str(tmp_path / "f.json")) == 3
    figures = json.loads((tmp_path / "f.json").read_text())
    assert (figures["requests"], figures["failed"], figures["errors"]) == (6, 2, {"500: broken": 2})
    assert "500: broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"error": {"message": "prompt must be a string"}}', "prompt must be a string.*--prompt-text"),
        (401, b"", "--api-key-file"),
        (404, b"no such route", "404: no such route.*--chat"),
        (308, b"", "308: redirected to nowhere"),
    ],
)
def test_a_server_that_refuses_such_requests_is_not_measured(
    server: OpenAIServer, capsys: pytest.CaptureFixture[str], status: int, body: bytes, message: str
) -> None:
    server.refuse = lambda number, _: (status, body)
    assert bench(server.url) == 2
    assert len(server.bodies) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(message, said), said


def test_no_server_is_said_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(f"http://127.0.0.1:{free_port()}") == 2
    assert "start the server first" in capsys.readouterr().err


def test_https_is_spoken_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificate can be made")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=127.0.0.1"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    with openai_server(tls) as secure:
        assert bench(secure.url, "-n", "2", "-q") == 2
        assert "certificate" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        assert bench(secure.url, "-n", "2", "-q") == 0
        assert len(secure.bodies) == 4


def test_a_server_without_models_needs_a_name(
    server: OpenAIServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for models in (404, {"data": []}, [], {"data": [{"id": 5}]}):
        server.models = models
        assert bench(server.url) == 2
        assert "--model NAME" in capsys.readouterr().err
    assert bench(server.url, "-m", "x", "-n", "1", "-q") == 0
    server.models = 401
    assert bench(server.url, "-m", "x") == 2
    server.models = 302
    assert bench(server.url) == 2
    assert "redirection" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rate", "0"], ["--rate", "nan"], ["--rate", "1", "-c", "2"], ["-c", "0"], ["-n", "0"],
        ["--arrival", "poisson"], ["--rate", "1", "--arrival", "x"], ["--goodput", "x"],
        ["--body", "x"], ["--body", "prompt=1"], ["--share", "2"],
        ["--saturation", "--arrival", "ramp:3"], ["--saturation", "-c", "3"], ["--timeout", "0"],
        ["--warm-up", "0"], ["--api-key-file", "/no/such"], ["--json", "/no/such/folder/x"],
        ["--workload", "nix"], ["--vocab-size", "1"], ["--time-scale", "0"], ["--length-scale", "-1"],
        ["--tolerance", "0"], ["--saturation", "--rate", "0"], ["--share", "0.5"], ["--tolerance", "0.5"],
        ["--seconds", "5"], ["--saturation", "--share", "0.5"], ["--time-scale", "2"], ["--length-scale", "2"],
        ["--workload", ROWS, "--length-scale", "2"], ["--workload", ROWS, "--time-scale", "2", "--rate", "5"],
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused_before_anything_is_sent(
    server: OpenAIServer,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(ROWS).write_text('{"prompt_token_ids": [800, 801], "arrival_s": 0.5}\n')
    assert bench(server.url, *arguments) == 2
    assert not server.bodies
    said = capsys.readouterr().err
    assert said.startswith("paged: ")
    assert said.count("\n") == 1


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what it puts into the background with SIGINT ignored, and so would the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_keeps_what_was_answered(
    server: OpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on_request = lambda number: os.kill(os.getpid(), signal.SIGINT) if number == 8 else None
    assert bench(server.url, "-n", "50", "-c", "1", "--json", str(tmp_path / "f.json")) == 130
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["interrupted"] is True
    assert 5 <= figures["requests"] <= 8
    assert figures["requests"] + figures["unfinished"] == 50
    assert figures["failed"] == 0
    assert "interrupted" in capsys.readouterr().out


def test_a_search_writes_its_trials(server: OpenAIServer, tmp_path: Path) -> None:
    """Nothing is good: the rate is halved until requests meet no other; every trial has requests of its own."""
    arguments = [
        "--saturation",
        "--rate",
        "4000",
        "--goodput",
        "ttft:1us",
        "--seconds",
        "0.01",
        "-n",
        "2",
        "-q",
    ]
    assert bench(server.url, *arguments, "--json", str(tmp_path / "s.json")) == 0
    found = json.loads((tmp_path / "s.json").read_text())["saturation"]
    assert (found["rate"], found["is_found"], len(found["trials"])) == (None, False, len(found["trials"]))
    assert 2 <= len(found["trials"]) <= 16
    assert "90% of requests" in found["criterion"]
    prompts = [json.dumps(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_keeps_the_trials_of_a_search(
    server: OpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three requests of warm-up, two trials of four, and the interrupt in the third."""
    server.on_request = lambda number: os.kill(os.getpid(), signal.SIGINT) if number == 13 else None
    arguments = ["--saturation", "--rate", "500", "--goodput", "e2e:60s", "-n", "4"]
    assert bench(server.url, *arguments, "--json", str(tmp_path / "s.json")) == 130
    figures = json.loads((tmp_path / "s.json").read_text())
    found = figures["saturation"]
    assert [(trial["rate"], trial["is_kept"]) for trial in found["trials"]] == [(500, True), (1000, True)]
    assert (found["rate"], found["above"], found["is_found"]) == (1000, None, False)
    assert (figures["interrupted"], figures["requests"]) == (True, 4)
    assert "The search was interrupted." in capsys.readouterr().out


def test_a_search_ends_where_nothing_is_answered_any_more(
    server: OpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three requests of warm-up and a trial of four, then it fails: lower rates would not help it."""
    server.refuse = lambda number, body: (500, b"broken") if number >= 7 else None
    arguments = ["--saturation", "--rate", "500", "--goodput", "e2e:60s", "-n", "4"]
    assert bench(server.url, *arguments, "--json", str(tmp_path / "s.json")) == 3
    assert len(server.bodies) == 3 + 4 + 4
    found = json.loads((tmp_path / "s.json").read_text())["saturation"]
    assert (found["rate"], len(found["trials"])) == (500, 1)
    assert "nothing was answered at the last rate, so the search ends: 500: broken" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_search_without_an_answer_in_its_warm_up_has_no_first_rate(
    server: OpenAIServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refuse = lambda number, body: (500, b"broken")
    assert bench(server.url, "--saturation", "-n", "4") == 2
    assert len(server.bodies) == 3
    error = " ".join(capsys.readouterr().err.split())
    assert "none of the 3 requests of the warm-up was answered" in error
    assert "500: broken" in error


def test_failures_of_a_warm_up_give_a_search_no_rate(server: OpenAIServer, tmp_path: Path) -> None:
    """Two of three fail at once; the third takes 0.2 s, so that the first rate is at most 5 a second."""

    def refuse(number: int, body: object) -> tuple[int, bytes] | None:
        if number == 2:
            time.sleep(0.2)
        return (500, b"broken") if number < 2 else None

    server.refuse = refuse
    bench(server.url, "--saturation", "-n", "2", "--goodput", "e2e:1us", "--json", str(tmp_path / "s.json"))
    assert json.loads((tmp_path / "s.json").read_text())["saturation"]["trials"][0]["rate"] <= 5


def test_what_is_shown_while_it_runs() -> None:
    state = LoadState(10, 100.0, num_in_flight=3)
    for index in range(4):
        start = 100.0 + index
        state.answers.append(
            Answer(
                start + 0.02,
                start,
                f"r{index}",
                200,
                [start + 0.5, start + 0.6],
                start + 0.7,
                ["a", "b"],
                3,
                2,
            )
        )
    state.answers.append(Answer(104.0, 104.0, "bad", 500, end_s=104.5, error="500: x"))
    state.under_way["r9"] = Answer(104.0, 104.0, "r9", token_times=[105.0, 106.0], texts=["a", "b"])
    view = view_of(state, "m at url", Targets.parse("ttft:1s"), 110.0, None)
    assert (view.done, view.failed, view.in_flight, view.requests_per_s, view.output_tokens_per_s) == (
        5,
        1,
        3,
        0.4,
        1.0,
    )
    assert (view.good, view.eta_s) == (0.8, 10.0)
    line = plain_line(view)
    assert line.startswith(
        "5/10 requests, 1 failed, 3 in flight, 0.40 requests/s, 1 output tokens/s, TTFT p50 500 ms"
    )
    console = Console(file=io.StringIO(), width=90)
    console.print(render(view, 90))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "5/10" in text
    assert "80% of requests met the targets" in text
    assert "sent up to 20 ms late" in text
    assert view_of(LoadState(3, 1.0), "x", None, 1.0, None).eta_s is None
    paced = view_of(state, "m at url", None, 110.0, None, 1.5)
    assert "0.40 of 1.50 requests/s" in plain_line(paced)
    console.print(render(paced, 90))
    assert "0.40 of 1.50 requests/s" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("workload", "hits", "is_noted"),
    [("mixed", 0.4, True), ("fixed:8:8", 0.4, True), ("random:8:8", 0.01, False), ("mixed", None, False),
     ("chats:4", 0.4, False), ("shared-prefix:512", 0.9, False), ("/a/file", 0.9, False)],
)  # fmt: skip
def test_prompts_that_the_server_knew_already_are_noted(
    workload: str, hits: float | None, is_noted: bool
) -> None:
    state = LoadState(1, 0.0, [Answer(0.0, 0.0, "a", 200, [1.0, 2.0], 2.0, ["a", "b"], 0, 8)])
    engine = {"prefix_hit_rate": hits}
    notes = LoadRun(state, {"workload": workload}, {}, {}, 0.0, 1.0, engine=engine).as_dict()["notes"]
    assert bool([note for note in notes if "the server knew 40% of the prompts' tokens" in note]) == is_noted


def test_reports_tell_arrivals_doubts_and_the_search() -> None:
    trial = {"rate": 2.0, "is_kept": True, "share": 0.95, "throughput": {"requests_per_s": 1.9}, "failed": 0,
             "ttft_s": {"p50": 0.1, "p99": 0.2}, "tpot_s": {"p50": None, "p99": None}}  # fmt: skip
    found = {"rate": 2.0, "above": 2.2, "is_found": True, "criterion": "all good", "note": "same prompts",
             "trials": [trial | {"rate": 2.2, "is_kept": False}, trial]}  # fmt: skip
    state = LoadState(
        1, 0.0, [Answer(0.0, 0.0, "a", 200, [1.0, 2.0], 2.0, ["a", "b"], 0, 8, doubts=["no usage"])]
    )
    run_ = LoadRun(state, {}, {}, {}, 0.95, 1.0).as_dict()
    shown = {
        "closed loop, 4 at once": {"kind": "closed loop", "concurrency": 4},
        "poisson, 8.50 requests/s": {"kind": "poisson", "requests_per_s": 8.5},
        "bursts of 3, 2 requests/s": {"kind": "bursts", "requests_per_s": 2, "size": 3},
        "ramp from 1 to 9 requests/s": {"kind": "ramp", "requests_per_s": 1, "last_rate": 9},
        "as the trace says, gaps times 0.500": {"kind": "trace", "time_scale": 0.5},
    }
    for words_, arrivals in shown.items():
        text = as_markdown(build_document(run_ | {"arrivals": arrivals, "saturation": found}))
        assert words_ in text
    assert "The largest rate kept up with is 2 requests/s; 2.20 was not." in text.replace(
        "2.00 requests", "2 requests"
    )
    for part in ("all good", "same prompts", "no usage: 1 answers", "An event brought 4", "busy for 95%"):
        assert part in text, part


def test_metrics_are_read_and_never_guessed() -> None:
    text = '# TYPE a counter\na{x="1 2"} 3\na{x="}"} 4 1700000000\nb 2.5\nbad\nc NaN\nd{e="f"} x\n'
    assert parse_metrics(text) == {"a": 7.0, "b": 2.5}
    before = {
        "vllm:prefix_cache_hits_total": 5.0,
        "vllm:prefix_cache_queries_total": 10.0,
        "vllm:num_preemptions_total": 4.0,
    }
    after = {
        "vllm:prefix_cache_hits_total": 8.0,
        "vllm:prefix_cache_queries_total": 16.0,
        "vllm:num_preemptions_total": 1.0,
    }
    figures: dict[str, Any] = dict(engine_figures(before, after))
    assert figures["prefix_hit_rate"] == 0.5
    assert figures["preemptions"] is None  # it was started anew
    assert engine_figures({}, {})["prefix_hit_rate"] is None


def test_words_stand_for_ids() -> None:
    assert len(set(WORDS)) == len(WORDS) > 100
    assert words((0, 1, len(WORDS))) == f"{WORDS[0]} {WORDS[1]} {WORDS[0]}"
