"""`paged serve` as a program: its flags, vLLM's flags, keys, TLS, and what it says."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.testing

from pagedcli.cli import vllm_flags
from pagedcli.cli.main import app, run
from pagedcli.cli.vllm_flags import translated
from pagedcli.errors import ConfigError
from tests.conftest import MakeModel

PROGRAM = "import sys; from pagedcli.cli.main import main; main()"
BLOCKED = "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None; "


@contextmanager
def program(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[tuple[str, Any]]:
    """`paged serve` on a free port; its URL and its process, which is ended with SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED + PROGRAM, "serve", *arguments, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
        cwd=Path(__file__).parents[2],
    )
    assert process.stderr is not None
    said = ""
    try:
        while (found := re.search(r"at (https?://\S+)/v1 as", said)) is None:
            line = process.stderr.readline()
            assert line, f"it ended: {said}"
            said += line
        process.said = said  # type: ignore[attr-defined]
        yield found.group(1), process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.stderr.close()
        assert process.wait(60) == 0


def small(tiny_checkpoint: MakeModel) -> list[str]:
    return [str(tiny_checkpoint("llama")), "--threads", "1", "--num-pages", "64", "--dtype", "float32"]


def test_a_command_line_of_vllms_serves(tiny_checkpoint: MakeModel) -> None:
    line = [
        *small(tiny_checkpoint),
        "--served-model-name",
        "one",
        "two",
        "--api-key",
        "secret",
        "--max_model_len",
        "100",
        "--block-size=8",
        "--enable-prefix-caching",
        "--enable-chunked-prefill",
        "--tensor-parallel-size",
        "1",
        "--generation-config",
        "auto",
        "--scheduling-policy=priority",
    ]
    with program(*line) as (url, process), httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 401
        client.headers["Authorization"] = "Bearer secret"
        listed = client.get("/v1/models").json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in listed] == [("one", 100), ("two", 100)]
        answer = client.post("/v1/completions", json={"model": "two", "prompt": "a", "max_tokens": 3})
        assert answer.status_code == 200, answer.text
        assert "secret" not in process.said
        assert "--api-key-file hides it" in process.said


def test_keys_of_the_environment_and_tls(tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=localhost",
            ),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("openssl makes no certificate here")
    flags = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    with program(*small(tiny_checkpoint), *flags, environment={"PAGED_API_KEY": "from-outside"}) as (url, _):
        assert url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(base_url=url, verify=trusted, timeout=60) as client:
            assert client.get("/v1/models").status_code == 401
            keyed = client.get("/v1/models", headers={"Authorization": "Bearer from-outside"})
            assert keyed.status_code == 200


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(
    tiny_checkpoint: MakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    with program(*small(tiny_checkpoint)) as (url, _):
        port = url.rpartition(":")[2]
        assert run(["serve", "/nowhere/at/all", "--port", port]) == 2
    assert "choose another port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "serve.port is 70000"),
        (["--host", ""], "serve.host is empty"),
        (["--ssl-keyfile", "x"], "give the certificate too"),
        (["--ssl-certfile", "/nowhere.pem"], "No such file"),
        (["--ssl-certfile", __file__], "PEM"),
        (["--api-key-file", "/nowhere"], "No such file"),
        (["--max-queue", "0"], "must be at least 1"),
        (["--max-itl-ms", "-1"], "max_itl_ms"),
        (["a", "--model", "b"], "give one of them"),
        (["--set", "serve.cors_origin=1"], "did you mean cors_origins"),
        (["--set", "serve.cors_origins=[1]"], "list of such texts"),
        (["--set", "serve.max_depth=deep"], "whole number"),
        (["--set", "sampling.temperature=hot"], "temperature"),
        (["--tensor-parallel-size", "2"], "one device"),
        (["--gpu-memory-utilization", "0.5", "--device", "cpu"], "--kv-memory"),
        (["--trust-remote-code"], "executed"),
        (["--kv-cache-dtype", "fp8"], "stored as --dtype"),
        (["--enable_lora"], "adapters"),
        (["--no-such-flag"], "No such option"),
    ],
    ids=str,
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("paged: ") == 1


def test_a_server_for_everybody_warns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["serve", "/nowhere/at/all", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "everybody who reaches 0.0.0.0" in capsys.readouterr().err
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    keys.chmod(0o644)
    flags = ["--host", "0.0.0.0", "--port", "0", "--api-key-file", str(keys)]
    assert run(["serve", "/nowhere/at/all", *flags]) == 2
    error = capsys.readouterr().err
    assert "everybody who" not in error
    assert "chmod 600" in error


def test_several_values_follow_a_flag_only_where_the_model_came_first() -> None:
    assert list(translated(["m", "--served-model-name", "a", "b", "--port", "1"])) == [
        "m",
        "--served-model-name",
        "a",
        "--served-model-name",
        "b",
        "--port",
        "1",
    ]
    assert list(translated(["--served-model-name", "a", "m"])) == ["--served-model-name", "a", "m"]
    assert list(translated(["--num-gpu-blocks-override=9", "--", "--x_y"])) == [
        "--num-pages=9",
        "--",
        "--x_y",
    ]


def test_no_flag_of_ours_is_taken_for_vllms() -> None:
    (command,) = (c for c in typer.main.get_command(app).commands.values() if c.name == "serve")  # type: ignore[attr-defined]
    ours = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    theirs = {*vllm_flags._REMEDIES, *vllm_flags._AT_THE_VALUE, *vllm_flags._ANYWAY, *vllm_flags._RENAMED}
    assert not ours & theirs
    assert set(vllm_flags._RENAMED.values()) <= ours
    assert set(vllm_flags._SEVERAL) <= ours


def test_one_paged_toml_serves_all_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "paged.toml").write_text(
        '[serve]\nport = 0\n[sampling]\ntemperature = 0.5\n[model]\nmodel = "/none"\n'
    )
    monkeypatch.chdir(tmp_path)
    for command in (["serve"], ["generate", "-p", "x"]):
        assert run(command) == 2
        assert "/none" in capsys.readouterr().err


def test_help_fits_a_screen() -> None:
    result = typer.testing.CliRunner().invoke(app, ["serve", "--help"])
    assert result.exit_code == 0
    assert len(result.output.splitlines()) <= 50
    with pytest.raises(ConfigError):
        list(translated(["--middleware"]))
