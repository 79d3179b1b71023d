"""Our kernels in the benchmark: every op on the emulator is right and is timed; recording calls as on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from paged_kernels.bench import torch_runner
from paged_kernels.bench.cases import FORMATS, Case, UnavailableError
from paged_kernels.bench.cuda_runner import VARIANT, CudaRunner
from paged_kernels.bench.torch_runner import Timer

DENSE, CODES = FORMATS["bfloat16"], FORMATS["int4-g128-a16"]
HEADS = (4, 2, 64)
CASES = (
    Case("attention", "decode", (), DENSE, 2, 256, 256, HEADS, 2, 70, 16),
    Case("attention", "prefill", (), DENSE, 40, 256, 256, HEADS, 2, 37, 16),
    Case("linear", "few", (), CODES, 3, 256, 48),
    Case("linear", "ring", (), CODES, 20, 256, 48),
    Case("linear", "dequantized", (), CODES, 70, 256, 48),
    Case("norm", "norm", (), DENSE, 3, 256, 256),
    Case("gated", "gated", (), DENSE, 3, 256, 128),
    Case("embedding", "embedding", (), DENSE, 3, 100, 64),
    Case("rope", "rope", (), DENSE, 3, 8 * 64, 256, HEADS),
    Case("sampler", "greedy", (), FORMATS["float32"], 3, 3001, 1),
    Case("sampler", "top-p", (), FORMATS["float32"], 3, 3001, 1),
)


@pytest.fixture
def runner(emulated: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> CudaRunner:
    monkeypatch.setattr(torch_runner, "LEAST_SECONDS", 1e-6)
    return CudaRunner(1, "cpu", 1, emulated)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op}-{case.name}")
def test_every_op_is_right_and_timed(runner: CudaRunner, case: Case) -> None:
    opened = runner.open(case, VARIANT)
    assert opened.error <= 1.0
    seconds, calls = opened.measure()
    assert seconds > 0.0
    assert calls >= 1


def test_what_has_no_kernel_is_said(runner: CudaRunner) -> None:
    with pytest.raises(UnavailableError, match="cuBLAS"):
        runner.open(Case("linear", "dense", (), DENSE, 3, 256, 48), VARIANT)
    with pytest.raises(UnavailableError, match="float32"):
        runner.open(Case("norm", "norm", (), FORMATS["float32"], 1, 512, 512), VARIANT)
    with pytest.raises(UnavailableError, match="300,000"):
        runner.open(Case("sampler", "greedy", (), FORMATS["float32"], 1, 300_001, 1), VARIANT)
    with pytest.raises(UnavailableError, match="heads of 72"):
        runner.open(Case("attention", "decode", (), DENSE, 1, 144, 144, (2, 1, 72), 1, 9, 16), VARIANT)


@pytest.mark.parametrize("case", [CASES[5], CASES[-2]], ids=lambda case: case.op)
def test_a_wrong_kernel_is_noticed(runner: CudaRunner, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """One that does nothing; the memory that it should have written is known."""
    monkeypatch.setattr(runner, "call", lambda name, *arguments: None)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    assert not runner.open(case, VARIANT).error <= 1.0


class Recording:
    """Torch's graphs, on the CPU: what is called while one records is called again by its replay."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.replays, self.is_open = fails, 0, False

    def replay(self) -> None:
        self.replays += 1

    @contextlib.contextmanager
    def graph(self, graph: Recording) -> Iterator[None]:
        assert graph is self
        self.is_open = True
        yield
        self.is_open = False
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("fails", [False, True])
def test_calls_are_recorded_where_they_can_be(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    recording, issued = Recording(fails), []
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 4.0)
    for name, value in {
        "CUDAGraph": lambda: recording,
        "graph": recording.graph,
        "Event": lambda enable_timing: event,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    timer = Timer([lambda: issued.append(recording.is_open)], torch.device("cuda"))
    assert timer.is_recorded is not fails
    seconds, calls = timer()
    assert seconds == pytest.approx(4e-3)
    if fails:
        assert issued.count(False) == 1 + 2 * calls
        assert recording.replays == 0
    else:
        assert issued == [False] + [True] * torch_runner.LEAST_RECORDED
        assert calls == torch_runner.LEAST_RECORDED
        assert recording.replays == 2
