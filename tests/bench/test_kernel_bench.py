"""`paged bench kernels`: turns, what is left out, shares of limits, the report, and the command on tiny shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from paged_kernels.bench.cases import FORMATS, Case
from paged_kernels.bench.families import FAMILIES, Family

from pagedcli.bench.kernel_results import case_dict, report_dict, share_of_limit
from pagedcli.bench.kernels import KernelBench, KernelTimes, Worker, WorkerError, start_workers
from pagedcli.bench.machine import MachineLimits, MachineRates
from pagedcli.bench.report.build import build_document
from pagedcli.bench.report.markdown import as_markdown
from pagedcli.cli import bench_kernels_run
from pagedcli.cli.main import run
from pagedcli.ops import select

LINEAR = Case("linear", "o", ("x",), FORMATS["bfloat16"], 1, 1000, 1000)
MANY = Case("linear", "o", ("x",), FORMATS["bfloat16"], 1000, 1000, 1000)
RATES = MachineRates(2, 20e9, 1e11, 2e11, 4e11, 2e12, 8e11, 4e12)
MACHINE = MachineLimits("cpu", 2, 20e9, 2e12, "bfloat16", "made up", RATES)


class FakeWorker:
    """Takes as long as it says."""

    about, cold_bytes = "made up", 1

    def __init__(self, **seconds: float) -> None:
        self.variants = tuple(seconds)
        self._seconds, self.asked = seconds, []

    def open(self, case: Case, variant: str) -> dict[str, Any]:
        return {"unavailable": "no such op"} if self._seconds[variant] < 0 else {"error": 0.5, "op": "f"}

    def seconds(self, variant: str, at_least: float) -> float:
        self.asked.append(variant)
        return self._seconds[variant]

    def close(self) -> None:
        pass


def measure(worker: FakeWorker, *cases: Case, rounds: int = 4) -> list[KernelTimes]:
    with KernelBench([worker], worker.variants, seconds=0.1, rounds=rounds) as bench:  # type: ignore[list-item]
        return list(bench.run(cases, lambda case: None))


def test_variants_take_turns_and_the_order_turns_round() -> None:
    worker = FakeWorker(a=1e-3, b=2e-3)
    (times,) = measure(worker, LINEAR)
    assert worker.asked == ["a", "b", "b", "a"] * 2
    assert times.seconds == {"a": [1e-3] * 4, "b": [2e-3] * 4}


def test_what_a_variant_does_not_have_is_said() -> None:
    (times,) = measure(FakeWorker(a=1e-3, b=-1.0), LINEAR)
    assert times.missing == {"b": "no such op"}
    assert "b" not in times.seconds


def test_what_would_take_too_long_is_left_out() -> None:
    first, second = measure(FakeWorker(slow=0.01, fast=1e-5), LINEAR, MANY)
    assert set(first.seconds) == {"slow", "fast"}
    assert second.missing == {"slow": "left out: about 10 s for one op"}
    assert "fast" in second.seconds


def test_slow_cases_get_the_least_number_of_rounds() -> None:
    worker = FakeWorker(a=2.0)
    (times,) = measure(worker, LINEAR, rounds=50)
    assert len(times.seconds["a"]) == 3


def test_share_of_the_limit_by_hand() -> None:
    # 2 MB at 20 GB/s take 100 us; 2 MFLOP are nothing
    assert share_of_limit(LINEAR, "amx", 200e-6, MACHINE) == (pytest.approx(0.5), "memory")
    # 2 GFLOP at 2 TFLOP/s take 1 ms, at 0.1 TFLOP/s 20 ms
    assert share_of_limit(MANY, "amx", 4e-3, MACHINE) == (pytest.approx(0.25), "arithmetic")
    assert share_of_limit(MANY, "avx2", 40e-3, MACHINE) == (pytest.approx(0.5), "arithmetic")
    norm = Case("norm", "n", ("x",), FORMATS["bfloat16"], 1, 1000, 1000)
    assert share_of_limit(norm, "amx", 1e-6, MACHINE) == (None, None)


def test_ratios_are_of_rounds() -> None:
    times = KernelTimes(
        LINEAR, {"amx": [1.0, 2.0, 4.0], "torch": [2.0, 4.0, 8.0]}, {"amx": 0.1, "torch": 0.1}
    )
    times.called = {"amx": "linear", "torch": "linear"}
    found = case_dict(times, MACHINE)
    ratio = found["variants"]["amx"]["times_torch"]
    assert ratio == {"low": pytest.approx(2), "median": pytest.approx(2), "high": pytest.approx(2)}
    assert "times_torch" not in found["variants"]["torch"]


def test_the_report_tells_what_was_measured_and_what_was_not() -> None:
    times = KernelTimes(LINEAR, {"amx": [1e-4] * 7, "torch": [2e-4] * 7}, {"amx": 0.1, "torch": 0.1})
    times.called, times.missing = {"amx": "linear", "torch": "linear"}, {"avx2": "left out"}
    wrong = KernelTimes(MANY, {"amx": [1e-2] * 7}, {"amx": 3.0}, {"amx": "linear"})
    data = report_dict(
        {"model": "shapes"}, {}, [case_dict(times, MACHINE), case_dict(wrong, MACHINE)], notes=["a note"]
    )
    text = as_markdown(build_document(json.loads(json.dumps(data))))
    assert "2.00 (2.00-2.00)" in text
    assert "100% memory" in text
    assert "WRONG RESULT" in text
    assert "avx2: left out" in text
    assert "a note" in text


def test_a_worker_that_dies_is_told_of() -> None:
    import sys

    with pytest.raises(WorkerError, match=r"died: .*no such thing"):
        Worker([sys.executable, "-c", "import sys; sys.exit('no such thing')"])


def test_workers_measure_for_real() -> None:
    workers = start_workers(native=True, torch_device=None, threads=1, cpus=(), cold_bytes=1 << 16)
    case = Case("linear", "o", ("x",), FORMATS["int4-g128"], 3, 128, 64)
    with KernelBench(workers, workers[0].variants, seconds=0.02, rounds=3) as bench:
        (times,) = bench.run([case], lambda item: None)
    assert set(times.seconds) == set(workers[0].variants)
    assert not times.wrong
    assert all(0 < value < 1 for values in times.seconds.values() for value in values)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "tiny", Family("tiny", 64, 4, 2, 16, 48, 160))
    monkeypatch.setattr(bench_kernels_run, "measure_limits", lambda *arguments: MACHINE)
    monkeypatch.setattr(bench_kernels_run, "torch_is_installed", lambda: False)
    monkeypatch.setattr(select, "torch_is_installed", lambda: False)


def test_the_command(tiny: None, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = [
        "--shapes",
        "tiny",
        "--op",
        "norm,linear",
        "--format",
        "bfloat16",
        "--m",
        "1,2",
        "--threads",
        "1",
    ]
    assert (
        run(["bench", "kernels", *arguments, "--seconds", "0.01", "--rounds", "2", "--json", str(out)]) == 0
    )
    data = json.loads(out.read_text())
    assert {(case["op"], case["rows"]) for case in data["cases"]} == {
        (op, m) for op in ("norm", "linear") for m in (1, 2)
    }
    assert data["limits"]["read_bytes_per_s"] == 20e9
    shown = capsys.readouterr().out
    assert "tiny: Linears" in shown
    assert "torch is not installed" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "llama"], "did you mean llama-3-8b?"),
        (["--op", "lineer"], "did you mean linear?"),
        (["--m", "0"], "0 is out of range: choose 1 to 8,192"),
        (["--m", "x"], "give whole numbers"),
        (["--variant", "sse"], "'sse' is not to be had here: choose of best, all"),
        (["--format", "int5"], "--format int5"),
        (["--op", "norm", "--format", "int4-g128"], "nothing is left to measure"),
        (["--device", "tpu"], "choose cpu or cuda"),
        (["--seconds", "0"], "both must be positive"),
        (["--seconds", "nan"], "both must be positive"),
        (["--seconds", "inf"], "both must be positive"),
        (["--variant", "torch"], "torch is not installed"),
    ],
)
def test_mistakes(tiny: None, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "kernels", *arguments]) == 2
    assert message in capsys.readouterr().err
