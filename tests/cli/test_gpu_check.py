"""`make gpu-check` without a GPU: parts that fail or hang, the time they share, the table, what it measures with."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"
DEVICE = {
    "gpu": "H200",
    "capability": "9.0",
    "torch": "2.11",
    "cuda": "13.0",
    "python": "3.12",
    "memory_bytes": 1,
}


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    """Imports a script of tools/ by its name."""
    sys.path.insert(0, str(TOOLS))
    yield importlib.import_module
    sys.path.remove(str(TOOLS))


def printing(tool: Any, name: str, code: str, limit_s: float = 60.0, writes: Path | None = None) -> Any:
    return tool("gpu_check").Part(name, ("-c", code), limit_s, writes)


def test_a_failing_part_does_not_stop_the_rest(tool: Any, tmp_path: Path) -> None:
    data, broken = tmp_path / "data.json", tmp_path / "broken.json"
    data.write_text("{}")  # of an earlier run: not to be taken for this one's
    chosen = [
        printing(tool, "first", "print('hello'); raise SystemExit(3)", writes=data),
        printing(tool, "second", f"open({str(broken)!r}, 'w').write('[1,')", writes=broken),
        printing(tool, "third", f"open({str(data)!r}, 'w').write('[1]')", writes=data),
    ]
    found = tool("gpu_check").run_all(chosen, 100.0, dict(os.environ), tmp_path)
    assert [part["outcome"] for part in found] == ["exit code 3", "passed", "passed"]
    assert "hello" in found[0]["output"]
    assert [part["data"] for part in found] == [None, None, [1]]


def test_a_part_that_hangs_is_stopped_with_its_children(tool: Any, tmp_path: Path) -> None:
    data = tmp_path / "data.json"
    code = f"""
import subprocess, sys, pathlib
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(data)!r}).write_text(str(child.pid))
print("started", flush=True)
child.wait()
"""
    started = time.monotonic()
    hanging = printing(tool, "hangs", code, 6.0, data)
    (found,) = tool("gpu_check").run_all([hanging], 100.0, dict(os.environ), tmp_path)
    assert found["outcome"] == "over 6 s"
    assert "started" in found["output"]
    assert time.monotonic() - started < 60
    ended = time.monotonic() + 30  # killed is not yet gone: on a busy machine it dies when it next runs
    while alive(found["data"]):
        assert time.monotonic() < ended, "the child lives on"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs: one that has ended and that nobody has waited for does not."""
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_parts_share_the_time(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool("gpu_check"), "LEAST_S", 1.0)
    chosen = [
        printing(tool, "slow", "import time; time.sleep(600)"),
        printing(tool, "late", "print('never')"),
    ]
    found = tool("gpu_check").run_all(chosen, 2.0, dict(os.environ), tmp_path)
    assert [part["outcome"] for part in found] == ["over 2 s", "left out: no time"]


def test_parts_fit_the_time_and_can_be_parsed(tool: Any, tmp_path: Path) -> None:
    gpu_check = tool("gpu_check")
    names = [part.name for part in gpu_check.parts(tmp_path, 90)]
    assert names[:3] == ["build", "conformance", "tests"]
    assert gpu_check.TOTAL_S <= 480
    models = {part.name: part for part in gpu_check.parts(tmp_path, 90)}
    for name in gpu_check.MODELS:
        script, *words = models[name].arguments
        assert Path(script).is_file()
        assert tool("gpu_model").parse(words).batches == [1, 16, 64, 256]


def test_a_process_that_outlives_its_part_holds_nothing_up(tool: Any, tmp_path: Path) -> None:
    """It is in a session of its own, and keeps what it got as standard output open."""
    code = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
"""
    (found,) = tool("gpu_check").run_all([printing(tool, "leaves", code)], 100.0, dict(os.environ), tmp_path)
    os.kill(int(found["output"]), signal.SIGKILL)
    assert found["outcome"] == "passed"
    assert found["seconds"] < 60
    assert (tmp_path / "leaves.log").read_text() == found["output"]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "import sys; sys.exit('torch 2.13.0 (a build without CUDA) finds no CUDA device')",
            "build without CUDA",
        ),
        ("import no_such_torch", "ModuleNotFoundError: No module named 'no_such_torch'"),
        ("import os; os._exit(9)", "exit code 9"),
        ("import time; time.sleep(600)", "no answer"),
    ],
)
def test_without_a_device_it_says_so(
    tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any, code: str, says: str
) -> None:
    monkeypatch.setattr(tool("gpu_check"), "_DEVICE", code)
    monkeypatch.setattr(tool("gpu_check"), "DEVICE_LIMIT_S", 5.0)
    report = tmp_path / "report.json"
    assert tool("gpu_check").main(["--json", str(report)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu-check: nothing can be checked with ")
    found = json.loads(report.read_text())
    assert says in line
    assert says in found["device"]["missing"]
    assert found["parts"] == []


def test_parts_need_no_more_packages_than_torch_and_transformers_bring(tool: Any, tmp_path: Path) -> None:
    """An image with a GPU has them, pytest and the like: nothing of ours can be installed there."""
    missing = (
        "pydantic",
        "pydantic_core",
        "typer",
        "starlette",
        "uvicorn",
        "httptools",
        "gguf",
        "platformdirs",
    )
    blocker = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing} or name == "paged_kernels._native":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
"""
    (tmp_path / "sitecustomize.py").write_text(blocker)
    gpu_check = tool("gpu_check")
    variables = gpu_check.environment(tmp_path) | {"OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join((str(tmp_path), variables["PYTHONPATH"]))
    named = {part.name: part for part in gpu_check.parts(tmp_path, 90)}
    assert named["build"].arguments[0].endswith("cuda_build.py")
    script = str(TOOLS / "gpu_model.py")
    tiny = ["--shape", "tiny", "--device", "cpu", "--batches", "1", "--context", "20", "--new-tokens", "3"]
    words = (script, "paged-int4", "--json", str(tmp_path / "model.json"), *tiny, "--bytes-per-s", "1e9")
    chosen = [
        gpu_check.Part("model", words, 100.0),
        gpu_check.Part("kernels", (str(TOOLS / "gpu_kernels.py"), "--help"), 60.0),
        gpu_check.Part("tests", (*named["tests"].arguments, "--collect-only"), 100.0),
    ]
    found = gpu_check.run_all(chosen, 300.0, variables, tmp_path)
    assert [part["outcome"] for part in found] == ["passed"] * 3, [part["output"] for part in found]


def test_report_and_choice_of_parts(tool: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    gpu_check = tool("gpu_check")
    monkeypatch.setattr(gpu_check, "device", lambda: DEVICE)
    monkeypatch.setattr(
        gpu_check,
        "parts",
        lambda build, sm: [printing(tool, "a", f"print({sm})"), printing(tool, "b", "1/0")],
    )
    report = tmp_path / "deep" / "report.json"
    assert gpu_check.main(["--json", str(report)]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert [part["name"] for part in json.loads(report.read_text())["parts"]] == ["a", "b"]
    assert "| b | exit code 1 |" in report.with_suffix(".md").read_text()
    assert gpu_check.main(["--json", str(report), "--only", "a"]) == 0
    assert json.loads(report.read_text())["parts"][0]["output"] == "90\n"
    with pytest.raises(SystemExit):
        gpu_check.main(["--json", str(report), "--only", "a", "c"])


def test_table_of_what_was_measured(tool: Any) -> None:
    case = {
        "op": "attention",
        "name": "decode 16 x 1,024 / 16",
        "format": "bfloat16",
        "rows": 16,
        "bytes": 4e6,
    }
    kernels = {
        "bytes_per_s": 4e12,
        "cases": [
            {
                **case,
                "variants": {
                    "cuda": {"seconds": {"median": 2e-6}, "error": 0.25},
                    "torch": {"seconds": {"median": 5e-6}, "error": 0.1},
                },
            },
            {**case, "variants": {"cuda": {"missing": "no kernel"}, "torch": {"missing": "no op"}}},
        ],
        "left_out": "3 of 5 cases",
    }
    row = {"batch": 16, "tokens_per_s": 3000.0, "limit_tokens_per_s": 4000.0, "prefill_tokens_per_s": 9e4}
    models = [
        {"engine": "paged-bf16", "shape": "llama", "rows": [{**row, "share": 0.75}]},
        {
            "engine": "transformers",
            "shape": "llama",
            "rows": [{**row, "tokens_per_s": 1500.0, "share": None}],
        },
        {"engine": "paged-int4", "shape": "llama", "rows": [], "left_out": "batches from 1 on"},
    ]
    parts = [{"name": "kernels", "outcome": "passed", "seconds": 1.0, "data": kernels}]
    parts += [{"name": item["engine"], "outcome": "passed", "seconds": 1.0, "data": item} for item in models]
    parts.append({"name": "tests", "outcome": "over 9 s", "seconds": 9.0, "data": None})
    text = tool("gpu_table").markdown(DEVICE, parts)
    assert (
        "| attention | decode 16 x 1,024 / 16 | bfloat16 | 16 | 2.0 | 2,000 | 50% | 5.0 | 2.50 | 0.25 |"
        in text
    )
    assert "| attention | decode 16 x 1,024 / 16 | bfloat16 | 16 |  |  |  |  |  |  |" in text
    assert "| paged-bf16 | 16 | 3,000 | 4,000 | 75% | 2.00 | 90,000 |" in text
    assert "left out: 3 of 5 cases" in text
    assert "paged-int4: left out: batches from 1 on" in text
    assert "| tests | over 9 s | 9.0 |" in text


def test_window_in_which_all_decode(tool: Any) -> None:
    window = tool("gpu_model").window
    assert window([[1.0, 2.0, 3.0, 4.0], [2.5, 3.5, 5.0]]) == (1.5, 3)
    assert window([[1.0, 2.0], [3.0, 4.0]]) == (0.0, 0)


@pytest.mark.parametrize("engine", ["paged-bf16", "paged-int4"])
def test_model_benchmark_runs(tool: Any, tmp_path: Path, engine: str) -> None:
    """All of it but the device, on a tiny model."""
    written = tmp_path / "model.json"
    words = [engine, "--json", str(written), "--shape", "tiny", "--device", "cpu", "--batches", "2,1"]
    words += ["--context", "20", "--new-tokens", "6", "--bytes-per-s", "1e9"]
    assert tool("gpu_model").main(words) == 0
    found = json.loads(written.read_text())
    assert [row["batch"] for row in found["rows"]] == [1, 2]
    for row in found["rows"]:
        assert 0 < row["decode_tokens"] <= 5 * row["batch"]
        assert row["share"] == pytest.approx(row["tokens_per_s"] / row["limit_tokens_per_s"])


def test_kernel_benchmark_lists_the_aims(tool: Any) -> None:
    kernels = tool("gpu_kernels")
    found = kernels.cases(kernels.SHAPES["llama-3-8b"])
    decodes = {(case.sequences, case.context) for case in found if case.name == "decode"}
    assert {(16, 1024), (64, 1024), (1, 1024)} <= decodes
    products = {case.rows for case in found if case.op == "linear" and case.format.bits == 4}
    assert {1, 2, 4, 8, 16, 32, 64, 256, 1024} <= products
    assert {case.op for case in found} == {
        "attention", "linear", "norm", "rope", "gated", "embedding", "sampler",
    }  # fmt: skip


def test_kernel_benchmark_writes_what_it_finds(tool: Any, tmp_path: Path, emulated_path: Path) -> None:
    written = tmp_path / "kernels.json"
    words = ["--json", str(written), "--library", str(emulated_path), "--device", "cpu", "--shape", "tiny"]
    assert tool("gpu_kernels").main([*words, "--most", "1", "--bytes-per-s", "1e9"]) == 0
    found = json.loads(written.read_text())
    (case,) = found["cases"]
    assert case["variants"]["cuda"]["error"] <= 1.0
    assert case["variants"]["torch"]["seconds"]["median"] > 0
    assert tool("gpu_kernels").main([*words, "--library", str(tmp_path / "none.so")]) == 1


@pytest.fixture(scope="module")
def emulated_path() -> Path:
    """The kernels on the emulator."""
    build_emulated: ModuleType = importlib.import_module("build_emulated")
    if build_emulated.toolkit_headers() is None:
        pytest.skip("no CUDA toolkit here (cuda_fp16.h): set CUDA_HOME")
    path: Path = build_emulated.build(ROOT / "build/emulated")
    return path


# ---- conformance


def test_conformance_on_the_emulator(tool: Any, tmp_path: Path) -> None:
    """The program that a GPU is to run; held against what one found, once one has."""
    conformance = tool("conformance")
    if conformance.build_emulated.toolkit_headers() is None:
        pytest.skip("no CUDA toolkit here (cuda_fp16.h): set CUDA_HOME")
    found = conformance.emulated(tmp_path)
    assert len(found) == 12
    kept = conformance.golden()
    if kept is None:
        assert not conformance.GOLDEN.exists(), "no GPU has run it yet; keep what one finds as golden.json"
    else:
        assert conformance.differences(found, kept) == []
    # What is known without a GPU: ldmatrix of rows that number their elements.
    words = found["ldmatrix"]["words"].split()
    assert [int(word, 16) for word in words[:8]] == [
        (first + 1) << 16 | first for first in (0, 64, 128, 192, 2, 66, 130, 194)
    ]


def test_conformance_tells_differences(tool: Any) -> None:
    differences = tool("conformance").differences
    good = {"a": {"kind": "exact", "words": "00000001 00000002"}, "b": {"kind": "near", "words": "3f800000"}}
    assert differences(good, good) == []
    near = good | {"b": {"kind": "near", "words": "3f800010"}}
    assert differences(near, good) == []
    far = good | {"b": {"kind": "near", "words": "3f880000"}}
    assert differences(far, good) == ["b: 1 of 1 words, the first word 0: 3f880000 for 3f800000"]
    off = good | {"a": {"kind": "exact", "words": "00000001 00000003"}}
    assert "a: 1 of 2 words" in differences(off, good)[0]
    assert differences({"a": good["a"]}, good) == ["b is only in one of the two"]


# ---- machine code, planted faults


def test_planting_leaves_what_a_case_uses(tool: Any, tmp_path: Path) -> None:
    proof = tool("cuda_proof")
    names = [bug.name for bug in proof.BUGS]
    assert len(set(names)) == len(names) >= 18
    for number, bug in enumerate(proof.BUGS):  # each stands where it is said to stand
        unit = proof.plant(bug, tmp_path / str(number))
        if unit.name == "attention.cu":
            sizes = {64, 80, 96, 128, 256}
            text = unit.read_text()
            kept = {size for size in sizes if f"case {size}: return run" in text}
            assert kept == {int(bug.case.split("-")[1])}


def test_library_of_the_emulator_is_the_one_that_is_loaded(emulated_path: Path) -> None:
    assert ctypes.CDLL(str(emulated_path)).paged_cuda_w4a16_max_rows() == 64


def test_ceilings_of_the_machine_code(tool: Any) -> None:
    """Registers, spills and shared memory as ptxas tells them; one byte of shared memory too many is a fault."""
    gate = tool("machine_code")
    said = "\n".join(
        f"""ptxas info    : Compiling entry function '{name}' for 'sm_90'
ptxas info    : Function properties for {name}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, {smem}480 bytes cmem[0]"""
        for name, smem in (("few_rows", "4096 bytes smem, "), ("rope", ""))
    )
    found = gate.assembler_figures(said)
    assert found == {
        "few_rows": {"spill": 0, "registers": 40, "shared": 4096},
        "rope": {"spill": 0, "registers": 40, "shared": 0},
    }
    assert gate.faults("few_rows", found["few_rows"], None) == []
    assert gate.faults("few_rows", {"shared": 4097}, None) == ["shared 4097, allowed ..4096"]
    assert gate.faults("rope", {"shared": 18 * 1024 + 1}, None) == ["shared 18433, allowed ..18432"]
