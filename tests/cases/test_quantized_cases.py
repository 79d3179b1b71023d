"""Field cases of quantized checkpoints: group sizes, missing and contradicting settings, zero points, odd shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedcli.checkpoint.folder import SafetensorsCheckpoint
from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.cli.main import run
from pagedcli.errors import CheckpointError
from tests.quant_logits import assert_as_dequantized
from tests.quant_support import write_quantized_model


def settings_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "quantize_config.json").read_text())
    return found


def refusal(folder: Path) -> str:
    def read() -> None:
        checkpoint = open_checkpoint(folder)
        for name in checkpoint.names():
            checkpoint.quantized(name.removesuffix(".weight"))

    with pytest.raises(CheckpointError) as caught:
        read()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("group", [-1, 32, 64, 128])
@pytest.mark.parametrize(("kind", "order"), [("awq", False), ("gptq", False), ("gptq", True)])
def test_A19_group_sizes(backend: str, kind: str, order: bool, group: int, tmp_path: Path) -> None:
    """Inputs of 128 and 256, so that each size is one of its own."""
    written = write_quantized_model(
        tmp_path,
        kind,
        group=group,
        act_order=order,
        symmetric=kind != "awq",
        hidden_size=128,
        intermediate_size=256,
    )
    assert_as_dequantized(written, backend)


@pytest.mark.parametrize("settings_in", [("quantize_config.json",), ("config.json",), ()], ids=str)
@pytest.mark.parametrize("kind", ["awq", "gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_A20_settings_in_one_file_or_in_none(
    kind: str, symmetric: bool, settings_in: tuple[str, ...], tmp_path: Path
) -> None:
    written = write_quantized_model(tmp_path, kind, symmetric=symmetric, settings_in=settings_in)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for name, grid in written.grids.items():
        found = checkpoint.quantized(name)
        assert found is not None
        np.testing.assert_array_equal(found.zeros, grid.zeros)
        assert found.group_size == 32
    assert checkpoint.quantization is not None
    notes = checkpoint.quantization.notes
    assert bool(notes) == (not settings_in)
    if not settings_in:
        assert "read off the tensors: " in notes[0]
        assert "4 bits, groups of 32, 14 linears" in notes[0]
        assert "paged doctor" in notes[0]


@pytest.mark.parametrize("kind", ["awq", "gptq", "gptq_v2"])
def test_A20_doctor_writes_what_is_missing_once(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_quantized_model(tmp_path, kind, symmetric=kind == "gptq", settings_in=(), act_order=kind == "gptq")
    assert run(["doctor", str(tmp_path)]) == 0
    out = capfd.readouterr().out
    assert f"wrote {tmp_path / 'quantize_config.json'}, which was missing" in out
    common = {"bits": 4, "group_size": 32}
    if kind == "awq":
        assert settings_of(tmp_path) == {
            "quant_method": "awq",
            **common,
            "zero_point": True,
            "version": "gemm",
        }
    else:
        own = {"desc_act": kind == "gptq", "sym": kind == "gptq", "checkpoint_format": kind}
        assert settings_of(tmp_path) == {"quant_method": "gptq", **common, **own}
    before = (tmp_path / "quantize_config.json").read_bytes()
    assert run(["doctor", str(tmp_path)]) == 0
    assert "wrote" not in capfd.readouterr().out
    assert (tmp_path / "quantize_config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("kind", "file", "change", "words"),
    [
        ("gptq", "config.json", {"bits": 8}, ("bits is 8", "hold 4 bits")),
        ("gptq", "config.json", {"group_size": 128}, ("group_size is 128", "groups for 64 inputs")),
        ("gptq", "config.json", {"group_size": -1}, ("group_size is -1", "2 groups for 64 inputs")),
        ("gptq", "config.json", {"quant_method": "awq"}, ("quant_method is 'awq'", "stored as gptq")),
        ("awq", "config.json", {"quant_method": "gptq"}, ("quant_method is 'gptq'", "stored as awq")),
        ("gptq_v2", "config.json", {"sym": True}, ("sym is True", ".qzeros")),
        ("gptq", "config.json", {"checkpoint_format": "gptq_v2"}, ("sym is True", "version 2")),
        ("gptq", "config.json", {"desc_act": False}, ("desc_act is False", ".g_idx")),
        ("gptq", "quantize_config.json", {"bits": 8}, ("bits is 8", "config.json says 4")),
    ],
)
def test_A20_a_contradiction_names_file_key_and_values(
    kind: str, file: str, change: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    written = write_quantized_model(
        tmp_path, kind, symmetric=kind == "gptq", act_order=kind == "gptq", settings_in=("config.json",)
    )
    config = dict(written.config)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    if file == "config.json":
        (tmp_path / file).write_text(json.dumps({**config, "quantization_config": {**said, **change}}))
    else:
        (tmp_path / file).write_text(json.dumps({**said, **change}))
    message = refusal(tmp_path)
    assert file in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_C15_zero_points_of_0(version: str, tmp_path: Path) -> None:
    """Groups without a negative weight; in version 1 the zero point borrows from the next one of its word."""
    written = write_quantized_model(tmp_path, version, symmetric=False, never_negative=True)
    zeros = [grid.zeros for grid in written.grids.values()]
    assert any((z == 0).any() and (z > 0).any() for z in zeros)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for name, grid in written.grids.items():
        found = checkpoint.quantized(name)
        assert found is not None
        np.testing.assert_array_equal(found.zeros, grid.zeros)
    assert_as_dequantized(written, "native")


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("kind", ["awq", "gptq", "compressed-tensors"])
def test_C17_a_last_group_that_is_short(backend: str, kind: str, tmp_path: Path) -> None:
    """192 inputs in groups of 128."""
    written = write_quantized_model(
        tmp_path, kind, group=128, hidden_size=192, num_attention_heads=6, intermediate_size=320
    )
    assert any(grid.codes.shape[1] % grid.group for grid in written.grids.values())
    assert_as_dequantized(written, backend)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_C17_layers_that_are_left_dense(backend: str, tmp_path: Path) -> None:
    """Also one part of a fused linear."""
    written = write_quantized_model(
        tmp_path, "gptq", kept=("layers.0.mlp.down_proj", "layers.1.self_attn.k_proj")
    )
    assert_as_dequantized(written, backend)
