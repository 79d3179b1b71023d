"""The cases of `paged bench kernels`: bytes and operations counted by hand, right results, wrong ones found."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from paged_kernels.bench.cases import FORMATS, OPS, Case, list_cases
from paged_kernels.bench.data import Data, cold_target_bytes
from paged_kernels.bench.families import FAMILIES, Family
from paged_kernels.bench.native_runner import NativeRunner
from paged_kernels.native import available_isas

TINY = Family("tiny", 64, 4, 2, 16, 48, 160)
CASES = list_cases([TINY], rows=(1, 5), contexts=(24,), page_sizes=(1, 16))


def case(op: str, name: str, item: str, rows: int) -> Case:
    return next(
        found
        for found in CASES
        if (found.op, found.name, found.format.name, found.rows) == (op, name, item, rows)
    )


def test_bytes_and_operations_of_a_linear_by_hand() -> None:
    dense = case("linear", "down", "bfloat16", 5)  # 64 outputs of 48 inputs
    assert dense.flops == 5 * 64 * 48 * 2
    assert dense.cold_bytes == 64 * 48 * 2
    assert dense.bytes == 64 * 48 * 2 + 5 * (48 + 64) * 2
    codes = case("linear", "gate_up", "int4-g32", 1)  # half a byte, and 2 + 1 bytes for 32 of them
    assert codes.cold_bytes == 96 * 64 / 2 + 96 * 64 / 32 * 3


def test_bytes_and_operations_of_attention_by_hand() -> None:
    decode = case("attention", "decode", "float32", 8)
    assert (decode.sequences, decode.context) == (8, 24)
    assert (
        decode.flops == 8 * 24 * 4 * 16 * 4
    )  # sequences, keys, heads, head_dim, two products of two operations
    assert decode.cold_bytes == 2 * 8 * 24 * 2 * 16 * 4  # keys and values of two heads
    chunk = case("attention", "prefill", "float32", 24)
    assert chunk.flops == (24 * 25 // 2) * 4 * 16 * 4  # row r sees r + 1 keys


def test_bytes_of_the_others_by_hand() -> None:
    assert case("norm", "add + RMS norm", "float32", 5).bytes == 5 * 4 * 64 * 4  # two in, two out
    assert case("gated", "silu x up", "float32", 5).bytes == 5 * (96 + 48) * 4
    assert case("embedding", "embedding", "bfloat16", 5).bytes == 5 * 2 * 64 * 2
    assert case("sampler", "greedy", "float32", 5).bytes == 5 * 160 * 4
    assert case("norm", "add + RMS norm", "float32", 5).flops == 0


def test_families_of_one_shape_are_measured_once() -> None:
    both = list_cases([FAMILIES["llama-3-8b"], FAMILIES["mistral-7b"]], rows=(1,))
    linears = [found for found in both if found.op == "linear"]
    assert all(found.families == ("llama-3-8b", "mistral-7b") for found in linears)
    assert not [found for found in both if found.op == "head"]
    assert {found.families for found in both if found.op == "sampler"} == {("llama-3-8b",), ("mistral-7b",)}


@pytest.fixture(scope="module")
def runner() -> NativeRunner:
    return NativeRunner(2, (), cold_bytes=1 << 16)


@pytest.mark.parametrize("variant", available_isas())
@pytest.mark.parametrize("op", OPS)
def test_every_native_result_is_right(runner: NativeRunner, op: str, variant: str) -> None:
    for found in CASES:
        if found.op == op:
            opened = runner.open(found, variant)
            seconds, ops = opened.measure()
            assert opened.error <= 1, (found, opened.error)
            assert seconds > 0
            assert ops >= 1


def test_copies_together_are_larger_than_the_cache(runner: NativeRunner) -> None:
    found = case("linear", "o", "float32", 1)
    runner.open(found, available_isas()[0])
    weights = runner.weights(Data(found), runner._runtimes[available_isas()[0]])
    assert sum(weight.buffer.nbytes for weight in weights) >= 1 << 16
    assert len({weight.buffer.address for weight in weights}) == len(weights)


def test_copies_are_twice_the_last_cache_if_memory_allows(tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "2048K", "30M")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert cold_target_bytes(1 << 40, tmp_path) == 60 << 20
    assert cold_target_bytes(800, tmp_path) == 100
    assert cold_target_bytes(1 << 40, tmp_path / "none") == 256 << 20


@pytest.mark.parametrize("op", [op for op in OPS if op != "sampler"])
def test_a_wrong_result_is_found(op: str) -> None:
    found = next(item for item in CASES if item.op == op and item.format.name == "float32" and item.rows > 1)
    data = Data(found)
    right = data.expected()
    assert data.error(right) == 0
    wrong = right.copy()
    wrong[-1, -1] += 0.01 * np.abs(right).max()
    assert data.error(wrong) > 1


def test_torch_results_are_right() -> None:
    pytest.importorskip("torch")
    from paged_kernels.bench.torch_runner import TorchRunner

    runner = TorchRunner(1, "cpu", cold_bytes=1 << 16)
    called = set()
    for found in CASES:
        if found.rows != 5 or found.op != "attention":
            opened = runner.open(found, "torch")
            assert opened.error <= 1, (found, opened.error)
            called.add(opened.op)
    assert {"linear", "scaled_dot_product_attention", "argmax", "linear of bfloat16"} <= called


def test_torch_multiplies_codes_where_it_can() -> None:
    pytest.importorskip("torch")
    from paged_kernels.bench.torch_runner import TorchRunner

    runner = TorchRunner(1, "cpu", cold_bytes=1 << 16)
    for item, op in (("int4-g128", "_weight_int4pack_mm_for_cpu"), ("int8-g128", "_weight_int8pack_mm")):
        found = Case("linear", "down", ("x",), FORMATS[item], 3, 256, 64)
        opened = runner.open(found, "torch")
        assert opened.op == op
        assert opened.error <= 1


def test_cases_survive_the_way_to_a_worker() -> None:
    from paged_kernels.bench.worker import case_from

    for found in CASES:
        assert case_from(json.loads(json.dumps(dataclasses.asdict(found)))) == found
