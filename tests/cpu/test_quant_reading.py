"""Quantized folders of every kind, written by independent code, are read with equal codes, scales and zero points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedcli.checkpoint.folder import SafetensorsCheckpoint
from tests.quant_support import Written, write_quantized_model

GPTQ_GRID = [
    (kind, bits, group, symmetric, order)
    for kind in ("gptq", "gptq_v2")
    for bits in (2, 3, 4, 8)
    for group in (-1, 16, 32, 64)
    for symmetric in (True, False)
    for order in (False, True)
    if (bits in (4, 8) or group == 32) and not (order and group == 64)
]


def check_all(written: Written, method: str) -> SafetensorsCheckpoint:
    """Every linear as it was meant, in codes and in float32."""
    checkpoint = SafetensorsCheckpoint(written.folder)
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.method == method
    assert set(written.tensors()) <= set(checkpoint.names())
    for name, grid in written.grids.items():
        found = checkpoint.quantized(name)
        assert found is not None
        assert found.bits == grid.bits
        np.testing.assert_array_equal(found.codes, grid.codes)
        np.testing.assert_array_equal(found.scales, grid.scales.astype(np.float32))
        np.testing.assert_array_equal(found.zeros, grid.zeros)
        np.testing.assert_array_equal(found.groups(), grid.g_idx)
        dense = checkpoint.tensor(f"{name}.weight")
        values = dense.data.view(np.float32).reshape(dense.shape)
        np.testing.assert_array_equal(values, grid.weight().astype(np.float32))
        np.testing.assert_array_equal(dense.rows(3, 9).data.view(np.float32).reshape(6, -1), values[3:9])
    return checkpoint


@pytest.mark.parametrize("group", [-1, 16, 32, 64])
@pytest.mark.parametrize("symmetric", [True, False])
def test_awq(group: int, symmetric: bool, tmp_path: Path) -> None:
    check_all(write_quantized_model(tmp_path, "awq", group=group, symmetric=symmetric), "awq")


@pytest.mark.parametrize(("kind", "bits", "group", "symmetric", "order"), GPTQ_GRID)
def test_gptq(kind: str, bits: int, group: int, symmetric: bool, order: bool, tmp_path: Path) -> None:
    written = write_quantized_model(
        tmp_path, kind, bits=bits, group=group, symmetric=symmetric, act_order=order
    )
    check_all(written, "gptq")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [-1, 16, 32])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors(bits: int, group: int, symmetric: bool, tmp_path: Path) -> None:
    written = write_quantized_model(
        tmp_path, "compressed-tensors", bits=bits, group=group, symmetric=symmetric
    )
    check_all(written, "compressed-tensors")


def test_compressed_tensors_with_groups_out_of_order(tmp_path: Path) -> None:
    check_all(write_quantized_model(tmp_path, "compressed-tensors", act_order=True), "compressed-tensors")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_dtype_is_that_of_the_dense_weights(dtype: str, tmp_path: Path) -> None:
    """The scales' dtype says nothing."""
    checkpoint = check_all(write_quantized_model(tmp_path, "gptq", dtype=dtype), "gptq")
    assert checkpoint.config["torch_dtype"] == dtype


@pytest.mark.parametrize(
    "options",
    [
        {"g_idx": False},
        {"zero_bias": True},
        {"file": "gptq_model-4bit-32g.safetensors"},
        {"settings_in": ("quantize_config.json",)},
        {"settings_in": ("quant_config.json",)},
        {"settings_in": ("config.json", "quantize_config.json")},
        {"kept": ("layers.1.", "down_proj")},
    ],
    ids=str,
)
def test_gptq_as_packages_have_written_it(options: dict[str, Any], tmp_path: Path) -> None:
    check_all(write_quantized_model(tmp_path, "gptq", **options), "gptq")


def test_older_names_of_awq_settings(tmp_path: Path) -> None:
    settings = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    written = write_quantized_model(tmp_path, "awq", settings=settings, settings_in=("quant_config.json",))
    assert check_all(written, "awq").quantization.notes == ()  # type: ignore[union-attr]


def test_a_whole_row_group_that_is_not_said_as_one(tmp_path: Path) -> None:
    """group_size 128 over 64 and 96 inputs: one group each."""
    check_all(write_quantized_model(tmp_path, "gptq", group=128), "gptq")
