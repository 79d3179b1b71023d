"""The native engine's logits against transformers' on tiny random models, in float32; and against torch's ops.

The cases and the tolerance are those of `test_models_parity`.
"""

from __future__ import annotations

import re
from ast import literal_eval
from pathlib import Path

import numpy as np
import pytest
import torch
from paged_kernels.native import available_isas

from pagedcli.checkpoint import open_checkpoint
from pagedcli.models.load import load_model
from pagedcli.ops.select import make_ops
from tests.cpu.test_models_parity import CASES, LENGTH, SIZES, TOLERANCE, oracle_logits, tiny_oracle
from tests.forward_support import run_steps
from tests.native_support import NativeModel, run_native
from tests.tables import chunked

ROOT = Path(__file__).parents[2]
WIDE = ("avx2", "avx512", "avx512bf16", "amx", "neon", "neondot")


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("case", CASES)
def test_native_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    oracle = tiny_oracle(*CASES[case])
    oracle.save_pretrained(tmp_path)
    tokens = torch.randint(0, SIZES["vocab_size"], (LENGTH,)).tolist()
    expected = oracle_logits(oracle, tokens).numpy()
    model = NativeModel.load(tmp_path, "float32", max_model_len=256)
    (prefill,) = run_native(model, [tokens], [[(0, LENGTH)]])
    assert_close(prefill, expected)
    (mixed,) = run_native(model, [tokens], [*chunked(0, LENGTH - 13, 37), *[[(0, 1)]] * 13], block_size=8)
    assert_close(mixed, expected)


@pytest.mark.parametrize("isa", ["portable", *WIDE])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_variant_is_near_the_torch_reference(isa: str, dtype: str, tmp_path: Path) -> None:
    """In bfloat16 every op rounds, so that orders of summation differ by more: the bound is loose, the shape odd."""
    if isa not in available_isas():
        pytest.skip(f"{isa} is not built, or not for this machine")
    oracle = tiny_oracle(*CASES["qwen3"])
    oracle.save_pretrained(tmp_path)
    tokens = list(range(90))
    reference = load_model(open_checkpoint(tmp_path), make_ops("cpu", dtype), 256)
    (expected,) = run_steps(reference, [tokens], [[(0, 90)]])
    (actual,) = run_native(NativeModel.load(tmp_path, dtype, isa=isa), [tokens], [[(0, 90)]])
    assert_close(actual, expected.numpy(), TOLERANCE if dtype == "float32" else 0.04)


@pytest.mark.parametrize("isa", WIDE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["llama-gqa7-head12-biases", "qwen3"])
def test_the_override_runs_each_variant_near_the_portable_one(
    case: str, isa: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in chunks, then decodes; every position's logits."""
    if isa not in available_isas():
        pytest.skip(f"{isa} is not built, or not for this machine")
    tiny_oracle(*CASES[case]).save_pretrained(tmp_path)
    tokens = list(range(7, 97))
    logits = []
    for name in ("portable", isa):
        monkeypatch.setenv("PAGED_CPU_ISA", name)
        model = NativeModel.load(tmp_path, dtype)
        assert model.ops.runtime.isa == name
        (found,) = run_native(model, [tokens], [*chunked(0, 81, 33), *[[(0, 1)]] * 9])
        logits.append(found)
    assert_close(logits[1], logits[0], TOLERANCE if dtype == "float32" else 0.04)


def test_every_variant_that_is_compiled_is_tried_and_looked_for_in_the_wheel() -> None:
    compiled = set(re.findall(r"paged_variant\((\w+) ", (ROOT / "CMakeLists.txt").read_text())) - {"name"}
    assert compiled == {"portable", *WIDE}
    checked = re.search(r"^wanted = (\{.*\})", (ROOT / "tools" / "check_wheel.sh").read_text(), re.MULTILINE)
    assert checked is not None
    assert {name for names in literal_eval(checked[1]).values() for name in names.split()} == compiled


def test_a_file_is_never_resident_as_a_whole_beside_its_packing(tmp_path: Path) -> None:
    """Weights at the run's dtype and some; measured in a process of its own, on a model of 100 MB."""
    import subprocess
    import sys

    from tests.fixtures_checkpoints import write_tiny_checkpoint

    path = write_tiny_checkpoint(
        tmp_path / "m", "llama", dtype="bfloat16", hidden_size=1024, intermediate_size=4096, num_hidden_layers=2,
        vocab_size=32_000, tie_word_embeddings=False, head_dim=64,
    )  # fmt: skip
    code = """
import re, sys
from pathlib import Path
from pagedcli.checkpoint import open_checkpoint
from pagedcli.models.load import load_model
from pagedcli.ops.native_ops import NativeOps

def resident():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

checkpoint, ops = open_checkpoint(Path(sys.argv[1])), NativeOps("bfloat16", threads=1)
before = resident()
load_model(checkpoint, ops, 64)
print(ops.weight_bytes, resident() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True, check=True
    )
    weights, taken = map(int, done.stdout.split())
    assert weights > 150e6
    assert taken < weights + 40e6
