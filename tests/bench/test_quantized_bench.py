"""`make bench-quant`: whose turn it is, when its time is up, what must be read, and what becomes of the figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagedcli.bench import quantized
from pagedcli.bench.cpu_engine import CpuBench
from pagedcli.bench.cpu_workloads import CpuWorkload, cpu_workloads
from pagedcli.bench.peers import PeerResult
from pagedcli.bench.work import ModelSizes
from pagedcli.errors import ConfigError
from pagedcli.models.spec import ModelSpec
from pagedcli.workloads.requests import WorkloadRequest
from tests.fixtures_checkpoints import write_tiny_checkpoint
from tests.quant_support import write_quantized_model

NAMES = ("whole", "codes")
SPEC = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    "rope_theta": 1e4,
}  # fmt: skip


class Fake:
    """A bench whose runs take as long as they are told to."""

    def __init__(self, name: str, seconds: float, clock: list[float], log: list[str], weights: int) -> None:
        self.name, self.seconds, self.clock, self.log = name, seconds, clock, log
        self.backend = SimpleNamespace(weight_bytes=weights)
        self.choice = SimpleNamespace(activation="int8" if name == "codes" else "")
        self.sizes = ModelSizes.of(ModelSpec.from_config(SPEC), "bfloat16")

    @contextmanager
    def open(self) -> Iterator[Fake]:
        yield self

    def run(self, requests: tuple[Any, ...]) -> Any:
        if all(request.max_tokens <= 4 for request in requests):
            return None  # warming up, or a prefill
        self.clock[0] += self.seconds
        self.log.append(self.name)
        return SimpleNamespace(seconds=self.seconds)


def decode() -> list[CpuWorkload]:
    return [workload for workload in cpu_workloads(None) if workload.name == "decode"]


def fakes(clock: list[float], log: list[str]) -> list[CpuBench]:
    pair = (Fake("whole", 4.0, clock, log, 1000), Fake("codes", 2.0, clock, log, 300))
    return cast(list[CpuBench], list(pair))


def test_models_take_turns_and_no_round_begins_that_time_does_not_hold() -> None:
    clock = [100.0]
    log: list[str] = []
    said: list[str] = []

    def peer(workloads: Mapping[str, str]) -> Mapping[str, PeerResult]:
        assert workloads == {"decode": "output"}
        log.append("peer")
        clock[0] += 4.0
        return {"decode": PeerResult(tokens_per_s=16.0, version="9")}

    turns = quantized.measure_in_turns(
        fakes(clock, log), NAMES, decode(),
        repeats=9, seconds=25.0, say=said.append, peer=peer, clock=lambda: clock[0],
    )  # fmt: skip
    assert log == ["whole", "codes", "peer", "codes", "whole", "peer"]
    assert turns.ours == [[[32.0, 32.0]], [[64.0, 64.0]]]
    assert [line for line in said if "OpenVINO" in line] == [
        "round 1: one stream, decode (prompt 32, 128 new): OpenVINO 16.0 tokens/s",
        "round 2: one stream, decode (prompt 32, 128 new): OpenVINO 16.0 tokens/s",
    ]
    assert said[-1] == "2 rounds in 20 s: another would take longer than 25 s"


def test_the_first_round_is_run_however_long_it_takes() -> None:
    clock = [100.0]
    log: list[str] = []
    quantized.measure_in_turns(
        fakes(clock, log), NAMES, decode(),
        repeats=2, seconds=0, say=lambda _: None, clock=lambda: clock[0],
    )  # fmt: skip
    assert log == ["whole", "codes"]


def test_every_step_reads_the_kept_weights_and_the_positions() -> None:
    codes = fakes([0.0], [])[1]
    cast(Any, codes).sizes = ModelSizes(body=1000, head=100, attention=8, kv=20, item_bytes=2)
    workload = CpuWorkload("decode", "one stream", (WorkloadRequest("0", (1, 2, 3), 4, 4),), "output")
    # Four steps: the prompt's writes 3 positions, then 3, 4 and 5 are read with the new one; the last is not computed.
    positions = 3 + (4 + 5 + 6)
    assert quantized.bytes_to_read(codes, workload) == 4 * 300 + 2 * 20 * positions


def test_rows_hold_ratios_of_rounds_and_the_limit_of_bytes() -> None:
    benches = fakes([0.0], [])
    # The machine drifts: the ratio of the codes' medians would be 3 here, not the median 2 of the rounds' ratios.
    failed, reached = PeerResult(error="no memory"), PeerResult(tokens_per_s=90.0, version="9")
    turns = quantized.Turns(
        [[[10.0, 20.0, 30.0]], [[20.0, 60.0, 60.0]]], [{"decode": failed}, {"decode": reached}]
    )
    whole, codes, other = quantized.rows(benches, NAMES, decode(), turns, 1e6)
    assert (whole.ratio, codes.ratio, other.ratio) == (1.0, 2.0, 4.5)
    assert (codes.tokens_per_s, other.model, other.runs) == (60.0, "OpenVINO 9", [90.0])
    assert (codes.activation, whole.activation) == ("int8", "")
    assert codes.limit_bytes is not None
    assert whole.limit_bytes is not None
    assert whole.limit_bytes - codes.limit_bytes == 128 * 700
    assert codes.limit_tokens_per_s == pytest.approx(128 * 1e6 / codes.limit_bytes)
    assert other.limit_bytes is None
    assert quantized.table([whole, codes, other]).row_count == 3


def test_openvino_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VENVS", str(tmp_path))
    monkeypatch.setenv("MODELS", str(tmp_path))
    (tmp_path / "peer_openvino.py").touch()
    with pytest.raises(ConfigError, match="OpenVINO cannot be run"):
        quantized.openvino(tmp_path, tmp_path, 2, 10.0)


def test_a_quantized_model_runs_as_its_codes(tmp_path: Path) -> None:
    folder = write_quantized_model(tmp_path, "awq", symmetric=False, dtype="bfloat16").folder
    bench = CpuBench(str(folder), "auto", 1)
    assert bench.choice.as_codes


def test_a_model_that_is_not_quantized_is_refused(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match="does not run as codes"):
        quantized.main(str(tmp_path), str(tmp_path), threads=1)
