"""The job's threads: bounded reading, failures of the reader, and the real engine end to end."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from pagedcli.api.llm import LLM
from pagedcli.cli.job import Job
from pagedcli.cli.lines import Line
from pagedcli.cli.main import run
from pagedcli.cli.output_rows import RowStyle
from pagedcli.cli.progress import Progress
from pagedcli.cli.rows import RowReader
from pagedcli.cli.summary import KVEstimate
from pagedcli.core.sampling import SamplingParams
from pagedcli.errors import ConfigError, EngineDead

EXAMPLES = Path(__file__).parents[2] / "examples" / "prompts.jsonl"


class SilentClient:
    """Takes requests and never answers."""

    def __init__(self):
        self.added = []

    def add(self, spec, sink):
        self.added.append(spec)
        return spec.request_id


class ListSink:
    num_rows = num_errors = 0

    def __init__(self):
        self.values = []

    def put(self, ordinal, value):
        self.values.append((ordinal, value))

    def sync(self, *, force=False):
        pass

    def close(self):
        pass


def make_job(rows, client, sink=None, window=4):
    style = RowStyle(token_ids=False, model="m", created=0)
    return Job(rows, client, sink or ListSink(), style, window, None, Progress(), KVEstimate(100))


def endless_rows():
    reader = RowReader({}, text=True, run_seed=0)
    number = 0
    while True:
        number += 1
        yield reader.row(Line(number, number - 1, b"prompt"))


def test_an_input_without_end_is_read_no_further_than_the_window():
    client = SilentClient()
    job = make_job(endless_rows(), client)
    ended = []

    def work():
        with pytest.raises(KeyboardInterrupt):
            job.run()
        ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    until = time.monotonic() + 60
    while len(client.added) < 4:
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(client.added) == 4
    job.interrupt()
    thread.join(timeout=60)
    assert ended == [True]


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), ConfigError("changed"), ZeroDivisionError()]
)
def test_what_stops_the_reader_stops_the_job(error):
    def rows():
        yield from (row for row, _ in zip(endless_rows(), range(2), strict=False))
        raise error

    with pytest.raises(type(error)):
        make_job(rows(), SilentClient()).run()


def test_a_dead_engine_ends_the_job_without_error_rows():
    class DeadClient(SilentClient):
        def add(self, spec, sink):
            raise EngineDead("the device is on fire")

    sink = ListSink()
    with pytest.raises(EngineDead):
        make_job(endless_rows(), DeadClient(), sink).run()
    assert sink.values == []


def test_example_prompts_are_valid_and_varied():
    reader = RowReader({}, text=False, run_seed=0)
    rows = [reader.row(Line(i + 1, i, line)) for i, line in enumerate(EXAMPLES.read_bytes().splitlines())]
    assert 8 <= len(rows) <= 12
    assert [row.error for row in rows] == [None] * len(rows)
    assert any(row.messages for row in rows)
    assert any(row.prompt for row in rows)
    assert any(row.params.n > 1 for row in rows)


def test_the_real_engine_answers_as_the_python_api_does(tiny_checkpoint, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny_checkpoint("llama")
    prompts = [f"prompt number {i}" for i in range(5)]
    lines = [json.dumps({"id": i, "prompt": prompt}) for i, prompt in enumerate(prompts)]
    Path("in.jsonl").write_text("\n".join([*lines, "{bad"]))
    settings = ["-m", str(model), "--num-pages", "64", "--max-tokens", "8", "--threads", "1"]
    assert run(["generate", "in.jsonl", "-o", "out.jsonl", *settings, "-v"]) == 3
    err = capfd.readouterr().err
    assert "load weights" in err
    assert "5 answered, 1 failed" in err
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    with LLM(str(model), num_pages=64, threads=1) as llm:
        expected = llm.generate(prompts, SamplingParams(max_tokens=8))
    assert [row["text"] for row in rows[:5]] == [output.text for output in expected]
    assert run(["generate", "in.jsonl", "-o", "out.jsonl", *settings]) == 3
    assert "complete" in capfd.readouterr().err
    assert run(["generate", "-p", prompts[0], *settings]) == 0
    assert capfd.readouterr().out == expected[0].text + "\n"
