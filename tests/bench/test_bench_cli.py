"""`paged bench` on a tiny model, through the command line: its JSON, sweeps, failures, Ctrl-C, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedcli.bench.machine import MachineLimits
from pagedcli.bench.run import RequestRun
from pagedcli.cli.bench_live import BenchLive
from pagedcli.cli.main import run
from tests.conftest import MakeModel

LIMITS = MachineLimits("cpu", 1, 1e9, 1e9, "float32", "a test")
DISTRIBUTION = {"mean", "p50", "p90", "p99"}


@pytest.fixture
def bench(
    tiny_checkpoint: MakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Any:
    """Runs `paged bench` in an empty folder; its exit code, what it wrote to FILE, stdout and stderr."""
    model = tiny_checkpoint("llama")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pagedcli.bench.session.measure_limits", lambda *about: LIMITS)

    def call(*arguments: str) -> tuple[int, Any, str, str]:
        file = tmp_path / "figures.json"
        code = run(
            [
                "bench",
                "-m",
                str(model),
                "--threads",
                "1",
                "--num-pages",
                "64",
                "--json",
                str(file),
                *arguments,
            ]
        )
        out, err = capfd.readouterr()
        return code, json.loads(file.read_text()) if file.is_file() else None, out, err

    return call


ONCE = ("--repeats", "1")
SMALL = ("--requests", "6", "--workload", "random:8-30:2-9", "--repeats", "2")


def test_the_json_is_that_of_interface_md(bench: Any) -> None:
    code, figures, out, err = bench(*SMALL, "--page-size", "8")
    assert code == 0
    settings = figures["settings"]
    assert (settings["page_size"], settings["num_pages"], settings["threads"]) == (8, 64, 1)
    assert (settings["dtype"], settings["max_num_seqs"]) == ("float32", 256)
    assert settings["model"].endswith("llama") or Path(settings["model"]).is_dir()
    assert {"cpu", "cores", "memory_bytes"} <= set(figures["machine"])
    assert (figures["requests"], figures["failed"]) == (6, 0)
    throughput = figures["throughput"]
    assert all(throughput[f"{name}_per_s"] > 0 for name in ("requests", "total_tokens", "output_tokens"))
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert set(figures[name]) == DISTRIBUTION
        assert 0 < figures[name]["p50"] <= figures[name]["p90"] <= figures[name]["p99"]
    assert 0 < figures["kv_use"] <= 1
    assert figures["prefix_hit_rate"] == 0.0
    assert (figures["preemptions"], figures["recomputed_tokens"]) == (0, 0)
    assert 0 < figures["executor_busy"] <= 1
    assert set(figures["gap_s"]) == {"scheduler_s", "tokenizer_s", "no_work_s"}
    assert figures["limits"]["bandwidth_share"] > 0
    assert figures["block_tables"]["bytes"] > 0
    assert figures["rounds"]["count"] == 2
    assert "as asked for" in figures["stopped"]
    assert "output tokens/s" in err.replace("\n", " ")
    assert "KV use" in out


def test_lists_sweep_and_give_a_list(bench: Any) -> None:
    code, runs, _, _ = bench(*SMALL, "--page-size", "8,16", "--max-num-seqs", "1,4")
    assert code == 0
    found = [(run["settings"]["page_size"], run["settings"]["max_num_seqs"]) for run in runs]
    assert found == [(8, 1), (8, 4), (16, 1), (16, 4)]
    assert [run["peak_running"] for run in runs] == [1, 4, 1, 4]
    assert runs[0]["swept"] == ["page_size", "max_num_seqs"]
    assert "against_first" not in runs[0]
    assert all({"low", "middle", "high", "verdict"} <= set(run["against_first"]) for run in runs[1:])


def test_a_shared_prefix_is_hit_and_not_without_caching(bench: Any) -> None:
    workload = (
        "--workload",
        "shared-prefix:48:2-5:2-5",
        "--requests",
        "8",
        "--repeats",
        "1",
        "--max-num-seqs",
        "2",
    )
    _, shared, _, _ = bench(*workload)
    _, apart, _, _ = bench(*workload, "--no-prefix-caching")
    assert shared["prefix_hit_rate"] > 0.5
    assert apart["prefix_hit_rate"] == 0.0
    assert shared["computed_tokens"] < apart["computed_tokens"]


def test_too_small_a_pool_preempts_and_is_counted(bench: Any) -> None:
    code, figures, _, _ = bench(
        "--requests", "8", "--workload", "fixed:20:40", "--repeats", "1", "--num-pages", "8"
    )  # fmt: skip
    assert code == 0
    assert figures["preemptions"] > 0
    assert figures["recomputed_tokens"] > 0


def test_failed_requests_give_exit_code_3_and_stay_out_of_the_figures(bench: Any) -> None:
    code, figures, _, err = bench(
        "--requests", "8", "--workload", "random:20-80:5-5", "--max-model-len", "60", "--repeats", "1"
    )
    assert code == 3
    assert 0 < figures["failed"] < 8
    assert sum(figures["errors"].values()) == figures["failed"]
    assert "failed:" in err


def test_if_every_request_fails_the_file_is_still_json(bench: Any) -> None:
    code, figures, _, _ = bench(
        "--requests", "2", "--workload", "fixed:80:5", "--max-model-len", "60", "--repeats", "1"
    )
    assert code == 3
    assert figures["failed"] == 2
    assert figures["ttft_s"]["p50"] is None


@pytest.mark.parametrize(("after", "rounds", "told"), [(2, 1, "until then"), (8, 1, "1 whole run")])
def test_ctrl_c_writes_what_was_measured(
    bench: Any, monkeypatch: pytest.MonkeyPatch, after: int, rounds: int, told: str
) -> None:
    seen = []

    def interrupt(self: BenchLive, request: RequestRun) -> None:
        seen.append(request)
        if len(seen) == after:
            raise KeyboardInterrupt

    monkeypatch.setattr(BenchLive, "answered", interrupt)
    code, figures, _, err = bench("--requests", "6", "--workload", "random:8-30:2-9", "--repeats", "3")
    assert code == 130
    assert figures["rounds"]["count"] == rounds
    assert figures["rounds"]["interrupted"] is (after < 6)
    assert figures["throughput"]["output_tokens_per_s"] > 0
    assert told in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--page-size", "8,300"], "--page-size: cache.page_size is 300"),
        (["--page-size", "8,x"], "--page-size 8,x"),
        (["--threads", "0,1"], "--threads: device.threads is 0"),
        (["--policy", "fcfs,best"], "--policy"),
        (["--requests", "0"], "--requests is 0"),
        (["--seconds", "0"], "--seconds is 0"),
        (["--seconds", "nan"], "--seconds is nan"),
        (["--seconds", "inf"], "--seconds is inf: give a number"),
        (["--json", "no/such/folder/file.json"], "no/such/folder"),
        (["--num-pages", "8", "--kv-memory", "1MiB"], "both set the size"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def load(*about: Any, **more: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("pagedcli.cli.bench_run.Session", load)
    assert run(["bench", *arguments]) == 2
    assert told in capfd.readouterr().err


def test_a_workload_that_does_not_exist_is_named(bench: Any) -> None:
    code, _, _, err = bench("--workload", "nothing.json")
    assert code == 2
    assert "nothing.json" in err


def test_flags_before_a_subcommand_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--page-size", "8", "kernels"]) == 2
    assert "after the subcommand" in capfd.readouterr().err


def test_the_help_fits_on_a_screen(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--help"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) <= 56
    assert max(map(len, lines)) <= 100
    for name in ("compare", "serve", "kernels", "tune", "report"):
        assert any(line.split()[:1] == [name] for line in lines)


def test_rows_of_a_file_are_tokenized_with_the_model_s_tokenizer(bench: Any, tmp_path: Path) -> None:
    rows = [{"id": str(index), "prompt": "a b " * (index + 3), "max_tokens": 4} for index in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, figures, _, _ = bench("--workload", "rows.jsonl", *ONCE)
    assert code == 0
    assert (figures["requests"], figures["failed"]) == (3, 0)
    assert figures["workload"]["output_tokens"] == 12
    assert figures["workload"]["prompt_tokens"] > 9


def test_batch_lines_and_messages_go_through_the_chat_template(
    bench: Any, tmp_path: Path, tiny_checkpoint: MakeModel
) -> None:
    """One file of every kind of row; the prompts are as long as transformers' own template makes them."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a b c"}]
    body = {"model": "m", "messages": messages, "max_tokens": 3}
    rows = [
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {
            "custom_id": "t",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "a b", "max_tokens": 3},
        },
        {"id": "m", "messages": messages, "max_tokens": 3},
        {"id": "p", "prompt": "a b", "max_tokens": 3},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, figures, _, _ = bench("--workload", "rows.jsonl", *ONCE)
    assert code == 0
    assert (figures["requests"], figures["failed"]) == (4, 0)
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tiny_checkpoint("llama")))
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    long, short = (len(tokenizer(text, add_special_tokens=False).input_ids) for text in (chat, "a b"))
    assert long > short
    assert figures["workload"]["prompt_tokens"] == 2 * long + 2 * short


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--json", "."], ". is a folder"),
        (["--json", ""], "the name of a report is empty"),
        (["--json", "a" * 300], "cannot be the name of a file: File name too long"),
        (["--json", "a.x", "--markdown", "./a.x"], "given for two files"),
        (["--html", "no/a.html"], "no/a.html: there is no folder no"),
    ],
)
def test_a_report_that_could_not_be_written_is_refused_first(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pagedcli.cli.bench_run.Session", None)
    assert run(["bench", *arguments]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert told in lines[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_costs_only_the_file_on_it(bench: Any) -> None:
    code, figures, out, err = bench(*SMALL, "--markdown", "/dev/full")
    assert code == 1
    assert figures["requests"] == 6
    assert "KV use" in out
    assert err.splitlines()[-1] == "paged: /dev/full: cannot write: No space left on device"


@pytest.mark.parametrize(
    ("workload", "told"),
    [
        (["--workload", ""], "cannot be read: Is a directory"),
        (["--workload", "fixed:0:1"], "fixed:0:1': 0: give a number from 1 to 10000000"),
        (["--workload", "random:5-2:1"], "5-2: give a number from 1 to 10000000, or a range such as 16-64"),
        (["--requests", "1000000000000"], "give at most 195312 requests"),
        (["--workload", "chats:9999"], "a request of up to"),
        (["--workload", "empty.jsonl"], "empty.jsonl: is empty: it holds no request"),
    ],
)
def test_a_workload_that_cannot_be_is_one_line(
    bench: Any, tmp_path: Path, workload: list[str], told: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n \n")
    code, _, _, err = bench(*workload)
    assert code == 2
    assert len(err.splitlines()) == 1
    assert told in err


def test_many_reasons_to_fail_are_a_few_lines(bench: Any) -> None:
    code, figures, _, err = bench(
        "--requests", "12", "--workload", "random:100-400:5", "--num-pages", "2", "--repeats", "1"
    )
    assert code == 3
    assert len(figures["errors"]) > 5
    assert err.count("failed: ") == 5
    assert "for other reasons, which --json FILE has" in err


def test_tuned_settings_are_read_said_and_can_be_left_out(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "paged.toml").write_text(
        "[cache]\npage_size = 32\n[serve]\nport = 8001\n[tuned]\ncores = 999\n"
    )
    code, figures, _, err = bench(*SMALL)
    told = " ".join(err.split())
    assert (code, figures["settings"]["page_size"]) == (0, 32)
    assert "settings from paged.toml in this folder" in told
    assert "tuned for cores 999" in told
    code, figures, _, err = bench(*SMALL, "--no-config")
    assert (code, figures["settings"]["page_size"]) == (0, 16)
    assert "paged.toml" not in err


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"kind":"serve"}',
        '{"kind":"compare"}',
        '{"kind":"kernels"}',
        '[{"throughput":{}},{"throughput":{}}]',
        "[" * 99999,
    ],
)
def test_a_report_of_a_changed_file_is_one_line(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text(text)
    assert run(["bench", "report", "a.json"]) == 2
    assert capfd.readouterr().err.startswith("paged: a.json")
    assert run(["bench", "report", "a.json", "--markdown", "./a.json"]) == 2
    assert "is what is read" in capfd.readouterr().err
