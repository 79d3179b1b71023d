"""GuideLLM, a load client of other people's, against the server: every request served, every token counted.

Nightly, and only where `guidellm` is installed (the `clients` extra).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.support import Served

ROWS = 8
TOKENS = 12


def program() -> str:
    """The program beside this interpreter, or on the path."""
    beside = Path(sys.executable).with_name("guidellm")
    found = str(beside) if beside.exists() else shutil.which("guidellm")
    return found or pytest.skip("guidellm is not installed")


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_every_request_of_a_load_is_served_and_counted(server: Served, route: str, tmp_path: Path) -> None:
    rows, report = tmp_path / "rows.jsonl", tmp_path / "report.json"
    rows.write_text("".join(json.dumps({"prompt": f"question number {i}"}) + "\n" for i in range(ROWS)))
    backend = f"kind=openai_http,target={server.url},max_tokens={TOKENS},request_format={route}"
    command = [program(), "run", "--backend", backend, "--profile", "kind=concurrent,streams=4"]
    command += ["--data", f"kind=json_file,path={rows}", "--constraint", f"kind=max_requests,count={ROWS}"]
    command += ["--output", f"kind=json,path={report}", "--disable-progress"]
    before = len(server.records)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert report.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    assert metrics["request_totals"]["successful"] == ROWS
    assert metrics["request_totals"]["errored"] == 0
    assert metrics["output_token_count"]["successful"]["mean"] == TOKENS
    asked = server.records[before:]
    assert len(asked) >= ROWS
    assert all(record.status == 200 and record.endpoint == route and record.stream for record in asked)
