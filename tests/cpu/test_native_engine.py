"""Whole engines on the native backend: the same texts under every setting that only decides when something runs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedcli.api.llm import LLM
from pagedcli.api.native_backend import _cpus as cpus_of_threads
from pagedcli.api.resolve import resolve_backend
from pagedcli.core.sampling import SamplingParams
from pagedcli.errors import ConfigError, MissingDependencyError, how_to_install
from pagedcli.runtime.cgroups import ControlGroups
from pagedcli.runtime.threads import core_cpus
from tests.conftest import MakeModel
from tests.fixtures_checkpoints import tensor_shapes, tiny_config, write_tiny_checkpoint

SETTINGS: dict[str, Any] = {"device": "cpu", "threads": 1, "max_model_len": 200, "num_pages": 200, "seed": 3}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.0, "n": 3, "seed": 8},
    {"repetition_penalty": 1.3, "prompt_logprobs": 1},
)

PREAMBLE = "You are a terse assistant who answers in one line and never explains what was not asked for. "
PROMPTS = [PREAMBLE + f"question {index} " + "word " * (7 * index) for index in range(6)] * 2
PARAMS = [
    SamplingParams(
        **{"max_tokens": 20 + 3 * index, "ignore_eos": True, "seed": index, **KINDS[index % len(KINDS)]}
    )
    for index in range(len(PROMPTS))
]


def answers(path: Path, **changes: Any) -> list[Any]:
    """Everything that a schedule must not change."""
    with LLM(str(path), **{**SETTINGS, **changes}) as llm:
        assert llm.engine.resolved.backend == changes.get("backend", "native")
        outputs = llm.generate(PROMPTS, PARAMS)
    return [(output.samples, output.prompt_logprobs) for output in outputs]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def path(request: pytest.FixtureRequest, tiny_checkpoint: MakeModel) -> Path:
    return tiny_checkpoint("qwen2", dtype=request.param)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Any]:
    """One request at a time, no sharing, no steps ahead."""
    return answers(path, max_num_seqs=1, depth=1, prefix_caching=False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"depth": 1},
        {"depth": 3, "threads": 2},
        {"page_size": 1, "num_pages": 2000},
        {"page_size": 64},
        {"page_size": 256, "num_pages": 30},
        {"max_num_batched_tokens": 11, "max_num_seqs": 8},
        {"prefix_caching": False, "threads": 3},
        {"num_pages": 16, "policy": "shortest"},
        {"allocation": "contiguous", "num_pages": 60},
    ],
    ids=str,
)
def test_no_setting_of_the_schedule_changes_an_answer(
    path: Path, expected: list[Any], changes: dict[str, Any]
) -> None:
    assert answers(path, **changes) == expected


def test_preemptions_happen_in_the_small_pool(path: Path, expected: list[Any]) -> None:
    with LLM(str(path), **{**SETTINGS, "num_pages": 16}) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert sum(output.num_preemptions for output in outputs) > 0
    assert [(output.samples, output.prompt_logprobs) for output in outputs] == expected


def test_greedy_ids_equal_those_of_the_torch_reference(tiny_checkpoint: MakeModel) -> None:
    """Float32 on a model whose logits lie clearly apart; both round differently, so only ids can be compared."""
    path = tiny_checkpoint("llama")
    params = SamplingParams(max_tokens=24, ignore_eos=True)

    def ids(backend: str) -> list[tuple[int, ...]]:
        with LLM(str(path), **SETTINGS, dtype="float32", backend=backend) as llm:
            return [output.samples[0].token_ids for output in llm.generate(PROMPTS[:4], params)]

    assert ids("native") == ids("torch")


def pinned_to_one(before: set[Path]) -> list[int]:
    """The CPU of each thread that began since and may run on one alone."""
    found = []
    for task in set(Path("/proc/self/task").iterdir()) - before:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            found.append(os.sched_getaffinity(int(task.name)))
    return sorted(cpu for cpus in found if len(cpus) == 1 for cpu in cpus)


@pytest.mark.skipif(len(core_cpus()) < 2, reason="needs two cores")
def test_threads_are_pinned_where_there_is_one_for_every_core_that_the_quota_leaves(
    tiny_checkpoint: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cores = str(tiny_checkpoint("llama")), core_cpus()
    before = set(Path("/proc/self/task").iterdir())
    monkeypatch.setattr(ControlGroups, "cpu_quota", lambda self: None)
    with LLM(path, num_pages=50) as llm:
        assert llm.engine.resolved.threads == len(cores)
        until = time.monotonic() + 60  # each pins itself when it first runs
        while pinned_to_one(before) != list(cores[1:]):
            assert time.monotonic() < until, pinned_to_one(before)
            time.sleep(0.01)
    monkeypatch.setattr(ControlGroups, "cpu_quota", lambda self: len(cores) - 0.5)
    with LLM(path, num_pages=50) as llm:
        assert llm.engine.resolved.threads == len(cores) - 1
    assert cpus_of_threads(len(cores)) == cores
    assert cpus_of_threads(len(cores) - 1) == ()


def test_backend_is_native_on_a_cpu_and_torch_on_cuda() -> None:
    assert resolve_backend("auto", "cpu") == "native"
    assert resolve_backend("auto", "cuda") == "torch"
    assert resolve_backend("torch", "cpu") == "torch"
    with pytest.raises(ConfigError, match=r"device\.backend is native.*--device cpu"):
        resolve_backend("native", "cuda")


# What None stands for cannot be imported, nor found.
BLOCKER = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"


def run_blocked(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process in which torch and transformers cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKER + code, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_generate_and_the_python_api_run_without_torch_and_transformers(tiny_checkpoint: MakeModel) -> None:
    path = str(tiny_checkpoint("llama"))
    api = """
from pagedcli import LLM, SamplingParams
with LLM(sys.argv[1], num_pages=50) as llm:
    (output,) = llm.generate("hello", SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0, logprobs=1))
    assert len(output.samples[0].token_ids) == 4
    print("backend", llm.engine.resolved.backend)
assert not [name for name in sys.modules if name.startswith(("torch.", "transformers."))]
"""
    done = run_blocked(api, path)
    assert (done.returncode, done.stdout) == (0, "backend native\n"), done.stderr
    command = """
from pagedcli.cli.main import run
sys.exit(run(sys.argv[1:]))
"""
    flags = ["generate", "-m", path, "-p", "hello", "--max-tokens", "4", "--num-pages", "50"]
    for device in ([], ["--device", "cpu"]):
        done = run_blocked(command, *flags, *device)
        assert done.returncode == 0, done.stderr
    done = run_blocked(command, "doctor")
    assert done.returncode == 0, done.stderr
    assert "native" in done.stdout


def zeros_in_a_sparse_file(folder: Path, **sizes: Any) -> int:
    """A bfloat16 model of these sizes whose weights are all zero; parameters. Takes no time and no disk."""
    write_tiny_checkpoint(folder, "llama")
    config = tiny_config("llama", **sizes)
    header, end = {}, 0
    for name, shape in tensor_shapes(config).items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)
    return end // 2


@pytest.mark.parametrize("tied", [False, True])
def test_an_engine_takes_weights_and_kv_and_at_most_300_mb(tmp_path: Path, tied: bool) -> None:
    """The peak of a whole process. A second copy of the weights would not fit in; a tied head has none of its own."""
    parameters = zeros_in_a_sparse_file(
        tmp_path, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, head_dim=64,
        vocab_size=140_000 if tied else 70_000, tie_word_embeddings=tied,
    )  # fmt: skip
    code = """
import re
from pathlib import Path
from pagedcli import LLM, SamplingParams
with LLM(sys.argv[1], num_pages=64, threads=2) as llm:
    prompts = [[5, 6, 7] * 100, [8, 9] * 20]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, logprobs=3))
    assert all(len(output.samples[0].token_ids) == 8 for output in outputs)
    info = llm.engine.resolved
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())
print(info.dtype, info.weight_bytes, info.kv_bytes, 1024 * int(peak[1]))
"""
    done = run_blocked(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    dtype, *sizes = done.stdout.split()
    weights, kv, peak = map(int, sizes)
    assert dtype == "bfloat16"
    assert 300e6 < weights < 2 * parameters * 1.01
    assert weights < peak < weights + kv + 300e6


def test_what_needs_torch_says_so_in_one_line(
    tiny_checkpoint: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tiny_checkpoint("llama"))
    monkeypatch.setattr("pagedcli.ops.select.torch_is_installed", lambda: False)
    monkeypatch.setattr("pagedcli.ops.select._count_devices", lambda: 1)
    for settings, extra in (({"device": "cuda"}, "cuda"), ({"device": "cpu", "backend": "torch"}, "all")):
        with pytest.raises(MissingDependencyError) as caught:
            LLM(path, num_pages=50, **settings)
        assert f"torch is not installed: {how_to_install(extra)}" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_request_that_meets_nan_weights_fails_alone(tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    """Its pages come back holding NaN, and whoever gets them next must not notice."""
    from safetensors.numpy import load_file, save_file

    source = tiny_checkpoint("llama")
    shutil.copytree(source, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["model.embed_tokens.weight"][77] = np.nan
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    # Nobody may choose the token whose embedding is NaN, and a tied head would spoil every row.
    params = SamplingParams(max_tokens=8, ignore_eos=True, bad_token_ids=[77])
    well = [list(range(100 + index, 130 + index)) for index in range(4)]
    sick = [*range(100, 120), 77, 3]
    settings = {**SETTINGS, "num_pages": 14, "prefix_caching": False}
    with LLM(str(source), **settings) as llm:
        expected = [output.samples for output in llm.generate(well, params)]
    with LLM(str(tmp_path / "m"), **settings) as llm:
        for _ in range(3):
            outputs = llm.generate([well[0], sick, *well[1:], sick], params, errors="return")
            assert [output.samples for output in outputs if output.error is None] == expected
            failed = [output for output in outputs if output.error is not None]
            assert len(failed) == 2
            assert "NaN or infinite logits" in str(failed[0].error)


def test_missing_kernels_and_unknown_variants_are_told_in_one_line(tiny_checkpoint: MakeModel) -> None:
    flags = ["generate", "-m", str(tiny_checkpoint("llama")), "-p", "hello", "--num-pages", "50"]
    command = "from pagedcli.cli.main import run\nsys.exit(run(sys.argv[1:]))\n"
    missing = run_blocked("sys.modules['paged_kernels._native'] = None\n" + command, *flags)
    assert missing.returncode == 2
    assert "the native kernels are not built: run `pip install .`" in missing.stderr
    assert "--set device.backend=torch" in missing.stderr
    unknown = run_blocked("import os; os.environ['PAGED_CPU_ISA'] = 'sse9'\n" + command, *flags)
    assert unknown.returncode == 2
    assert "sse9" in unknown.stderr
    assert len(unknown.stderr.strip().splitlines()) == 1
