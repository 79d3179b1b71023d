"""What the CPU benchmark counts, against figures worked out by hand and independently; and a small run of all of it."""

from __future__ import annotations

import io
import json
import time
from contextlib import nullcontext
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from paged_kernels.native import available_isas
from rich.console import Console
from typer.testing import CliRunner

from pagedcli.bench import cpu
from pagedcli.bench.cpu_report import Findings, Row, notes, report, table
from pagedcli.bench.cpu_workloads import cpu_workloads, long_context
from pagedcli.bench.machine import MachineRates
from pagedcli.bench.peers import Peer, PeerBudget, PeerResult, installed_peers, run_peer
from pagedcli.bench.random_checkpoint import QWEN2_5_0_5B, RandomCheckpoint
from pagedcli.bench.work import ModelSizes
from pagedcli.models.load import check_tensors, expected_tensors
from pagedcli.models.spec import ModelSpec
from pagedcli.workloads.requests import WorkloadRequest
from tests.conftest import MakeModel

SMOLLM2 = ModelSpec.from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "tie_word_embeddings": True,
    }
)


def request(prompt: list[int], new: int) -> WorkloadRequest:
    return WorkloadRequest("r", tuple(prompt), new, new)


def test_sizes_are_those_of_the_checkpoints_tensors() -> None:
    """106 M in the body and 28 M in the tied head: 269 MB to read for a token in bfloat16."""
    sizes = ModelSizes.of(SMOLLM2, "bfloat16")
    shapes = expected_tensors(SMOLLM2)
    assert sizes.body == sum(s[0] * s[1] for name, s in shapes.items() if len(s) == 2 and "embed" not in name)
    assert sizes.head == shapes["model.embed_tokens.weight"][0] * 576
    assert sizes.weights(1).weight_bytes == pytest.approx(269e6, rel=0.001)
    assert 36e9 / sizes.weights(1).weight_bytes == pytest.approx(134, abs=0.5)
    assert 469e9 / (2 * sizes.body) == pytest.approx(2210, abs=3)


def test_attention_is_counted_over_all_earlier_positions() -> None:
    sizes = ModelSizes.of(SMOLLM2, "bfloat16")
    pairs = sum(range(1, 101))
    scores_and_sums = 2 * 2 * 30 * 9 * 64 * pairs
    assert sizes.prefill(0, 100).attention_flops == scores_and_sums
    assert sizes.prefill(0, 60).attention_flops + sizes.prefill(60, 40).attention_flops == scores_and_sums
    assert sizes.decode(99, 1).attention_flops == 2 * 2 * 30 * 9 * 64 * 100
    assert sizes.decode(99, 1).kv_bytes == 2 * 2 * 30 * 3 * 64 * 100


def test_a_shared_prefix_is_computed_once_and_weights_are_read_once_a_step() -> None:
    sizes = ModelSizes.of(SMOLLM2, "bfloat16")
    prefix = list(range(64))
    alone = sizes.workload([request([*prefix, 1, 2], 5)])
    both = sizes.workload([request([*prefix, 1, 2], 5), request([*prefix, 3], 2)])
    assert alone.body_flops == 2 * sizes.body * (66 + 4)
    assert both.body_flops == 2 * sizes.body * (66 + 4 + 1 + 1)
    assert both.head_flops == 2 * sizes.head * 7
    assert both.weight_bytes == alone.weight_bytes == sizes.weights(5).weight_bytes
    # The very same prompt again still computes its last page.
    twice = sizes.workload([request(prefix, 1), request(prefix, 1)])
    assert twice.body_flops == 2 * sizes.body * (64 + 16)


def test_the_binding_rate_gives_the_least_time() -> None:
    work = ModelSizes.of(SMOLLM2, "bfloat16").decode(0, 1)
    assert work.least_seconds(work.flops, 1e30) == 1
    assert work.least_seconds(1e30, work.num_bytes / 2) == 2


def test_rates_are_those_of_the_variant() -> None:
    rates = MachineRates(2, 36e9, 120e9, 235e9, 469e9, 2e12)
    assert rates.flops_per_s("bfloat16", "amx") == 2e12
    assert rates.flops_per_s("bfloat16", "avx512bf16") == 469e9
    assert rates.flops_per_s("bfloat16", "avx512") == rates.flops_per_s("float32", "amx") == 235e9
    assert rates.flops_per_s("bfloat16", "avx2") == 120e9
    # A processor whose dots of bfloat16 are slower than its float32: the limit is still that of the dots.
    slow_dots = MachineRates(2, 36e9, 138e9, 189e9, 156e9, 5e12)
    assert slow_dots.flops_per_s("bfloat16", "avx512bf16") == 156e9
    assert slow_dots.flops_per_s("float32", "avx512bf16") == 189e9


def test_drawn_workloads_are_like_those_of_the_peers() -> None:
    decode, prefill, mixed, prefix = cpu_workloads(None)
    assert (decode.counted_tokens(), prefill.counted_tokens()) == (128, 512)
    assert len(mixed.requests) == 64
    assert prefix.counted_tokens() == 32 * (512 + 32 + 64)
    assert {r.prompt_token_ids[:512] for r in prefix.requests} == {prefix.requests[0].prompt_token_ids[:512]}
    first, second = mixed.shifted(0), mixed.shifted(1)
    assert [r.output_tokens for r in first] == [r.output_tokens for r in second]
    assert all(a.prompt_token_ids[0] != b.prompt_token_ids[0] for a, b in zip(first, second, strict=True))
    assert all(1000 <= token < 30_000 for r in second for token in r.prompt_token_ids)
    assert long_context(100, 3).requests[0].output_tokens == 3


def test_peers_lists_are_read_and_missing_peers_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = {
        name: {"requests": [{"prompt": [1000, 2000], "new": 3}]}
        for name in ("decode", "prefill512", "batch64", "prefix32")
    }
    (tmp_path / "workloads.json").write_text(json.dumps(lists))
    assert cpu_workloads(tmp_path)[0].requests[0].prompt_token_ids == (1000, 2000)
    monkeypatch.setenv("VENVS", str(tmp_path))
    monkeypatch.setenv("MODELS", str(tmp_path))
    assert installed_peers(tmp_path) == installed_peers(None) == ()
    for file in ("peer_vllm.py", "vllm/bin/python", "hf/smollm2-135m/config.json"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    assert [peer.name for peer in installed_peers(tmp_path)] == ["vLLM"]


FAKE_PEER = """
import argparse, json, os, sys, time
parser = argparse.ArgumentParser()
for name in ("model", "label", "workload", "runs", "budget", "threads"):
    parser.add_argument("--" + name)
options = parser.parse_args()
print("a log line", flush=True)
with open(options.model, "a") as log:
    log.write(options.workload + "\\n")
for name in options.workload.split(","):
    if name == "slow":
        if os.fork() == 0:
            time.sleep(600)  # what it started is ended too
        time.sleep(600)
    if name == "fatal":
        sys.exit("no such instruction")
    rates = {"out_tok_s": 10, "prefill_tok_s": 20, "total_tok_s": 30}
    line = {"workload": name, "load_s": 1.5, "version": "7", "others_cpu": 0.01, **rates}
    print(json.dumps({"workload": name, "error": "ValueError: odd"} if name == "odd" else line), flush=True)
"""


@pytest.fixture
def fake_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peer:
    (tmp_path / "peer_fake.py").write_text(FAKE_PEER)
    monkeypatch.setenv("MODELS", str(tmp_path))
    return Peer("fake", "peer_fake.py", "", "log", ())


def test_a_peer_that_is_slow_is_over_its_time_and_begins_anew(fake_peer: Peer, tmp_path: Path) -> None:
    workloads = {"first": "output", "slow": "total", "odd": "total", "last": "prompt"}
    started = time.monotonic()
    results = run_peer(fake_peer, tmp_path, workloads, 1, PeerBudget(load_s=20, workload_s=2))
    assert time.monotonic() - started < 100  # what is over its time would take 600 s
    assert [str(results[name]) for name in workloads] == ["10.0", "over 2 s", "failed", "20.0"]
    assert results["slow"].tokens_per_s is None
    assert results["odd"].error == "ValueError: odd"
    assert (results["last"].load_s, results["last"].version) == (1.5, "7")
    assert (tmp_path / "log").read_text().split() == ["first,slow,odd,last", "odd,last"]


def test_a_peer_that_cannot_load_is_over_both_times(fake_peer: Peer, tmp_path: Path) -> None:
    results = run_peer(fake_peer, tmp_path, {"slow": "output"}, 1, PeerBudget(load_s=1.5, workload_s=0.5))
    assert results == {"slow": PeerResult(over_s=2.0)}


def test_a_peer_that_dies_has_failed_on_all_that_is_left(fake_peer: Peer, tmp_path: Path) -> None:
    results = run_peer(
        fake_peer, tmp_path, dict.fromkeys(("first", "fatal", "last"), "total"), 1, PeerBudget()
    )
    assert results["first"].tokens_per_s == 30
    assert results["fatal"].error == results["last"].error == "exit code 1: no such instruction"


def test_peers_stand_in_the_table_and_are_never_averaged_when_over_time() -> None:
    row = Row(
        "m",
        "batch64",
        "64 requests",
        "total",
        50.0,
        [50.0],
        100.0,
        125.0,
        200.0,
        4e10,
        8e10,
        "bytes",
        1.0,
        1e9,
        25.0,
    )
    row.peers = {"a": PeerResult(tokens_per_s=40.0, load_s=2.0), "b": PeerResult(over_s=90.0)}
    found = Findings(
        MachineRates(1, 1e9, 1e9, 1e9, 1e9, 1e9), {}, "bfloat16", "amx", [row], budget=PeerBudget(5, 90)
    )
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table(found.rows))
    shown = console.export_text()
    assert "over 90 s" in shown
    assert "40.0" in shown
    assert "50%" in shown
    assert "40%" in shown  # of the limit at memory's best
    assert "25%" in shown  # of that of reading as many bytes as the weights again and again
    assert "200%" in shown  # of the limit with dots
    text = " ".join(notes(found))
    assert "5 s to load and 90 s for each workload" in text
    assert "a: loaded in 2.0 s" in text
    assert json.loads(json.dumps(report(found)))["rows"][0]["peers"]["b"]["over_s"] == 90.0


def test_a_part_that_does_not_exist_is_refused() -> None:
    app = typer.Typer()
    app.command()(cpu.main)
    result = CliRunner().invoke(app, ["--without", "peers,lunch"])
    assert result.exit_code == 2
    assert "'lunch' is no part" in result.output


def test_random_weights_have_the_shape_of_the_model() -> None:
    small = {**QWEN2_5_0_5B, "num_hidden_layers": 1, "vocab_size": 100, "intermediate_size": 64}
    checkpoint = RandomCheckpoint(small)
    check_tensors(checkpoint, ModelSpec.from_config(small))
    assert checkpoint.tensor("model.norm.weight").data[:2].tolist() == [0x80, 0x3F]


def test_the_benchmark_runs_on_a_tiny_model(
    tiny_checkpoint: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cpu, "measure_machine", lambda threads: MachineRates(threads, 1e12, 5e12, 1e13, 2e13, 4e13)
    )

    def reads(megabytes: int) -> list[float]:
        return [1e12, 4e12, 2e12] if megabytes == 1024 else [8e12]

    monkeypatch.setattr(cpu, "reading", lambda threads: nullcontext(reads))
    path = tiny_checkpoint("llama", vocab_size=30_000, max_position_embeddings=1024)
    app = typer.Typer()
    app.command()(cpu.main)
    file = tmp_path / "out" / "bench.json"
    options = [
        "-m",
        str(path),
        "--threads",
        "1",
        "--only",
        "decode,prefill512",
        "--repeats",
        "1",
        "--context",
        "200",
        "--without",
        "qwen",
    ]
    plot = tmp_path / "roofline.svg"
    files = ["--json", str(file), "--roofline", str(plot)]
    result = CliRunner().invoke(app, [*options, *files], catch_exceptions=False)
    assert result.exit_code == 0
    written = json.loads(file.read_text())
    rows = [row["workload"] for row in written["rows"]]
    assert rows[:3] == ["decode", "prefill512", "context200"]
    others = [isa for isa in cpu.VARIANTS if isa in available_isas()[1:]]
    assert rows[3:] == ["decode", "prefill512"] * len(others)
    assert [row["engine"].split(", ")[2] for row in written["rows"][3::2]] == others
    assert all(row["tokens_per_s"] > 0 and 0 < row["limit_share"] < 1 for row in written["rows"])
    assert all(row["read_bytes_per_s"] == 2e12 for row in written["rows"])
    decode_row = written["rows"][0]
    assert decode_row["bound_by"] == "bytes"
    assert decode_row["limit_share"] == pytest.approx(2 * decode_row["best_limit_share"])
    assert decode_row["limit_share"] == pytest.approx(4 * decode_row["again_limit_share"])
    assert written["left_out"] == ["qwen"]
    assert set(written["python_ms_per_step"]) == set(written["python_ms_of_usual_step"]) == {"1", "64"}
    assert all(0 < written["python_ms_of_usual_step"][batch] < 1000 for batch in ("1", "64"))
    assert written["ready"]["seconds"] > 0
    assert "Python per step at batch 64" in result.stdout
    drawing = ElementTree.fromstring(plot.read_text())
    circles = [item for item in drawing if item.tag.endswith("circle")]
    assert len(circles) == 3
    decode, prefill = sorted(circles, key=lambda circle: float(circle.attrib["cx"]))[::2]
    # More operations per byte lie further right, more per second further up.
    assert float(prefill.attrib["cx"]) > float(decode.attrib["cx"])
    assert float(prefill.attrib["cy"]) < float(decode.attrib["cy"])
