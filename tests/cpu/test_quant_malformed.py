"""Broken and unsupported quantized folders: always one CheckpointError that names file and tensor or key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.errors import CheckpointError
from tests.quant_support import safetensors, write_quantized_model

Leaves = dict[str, np.ndarray]
LINEAR = "model.layers.0.self_attn.q_proj"


def read_all(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for name in checkpoint.names():
        checkpoint.quantized(name.removesuffix(".weight"))


def outcome(folder: Path) -> str | None:
    """Why the folder is refused, in one line; None if it is read."""
    try:
        read_all(folder)
    except CheckpointError as error:
        message = str(error)
    else:
        return None
    assert "\n" not in message
    return message


def refusal(folder: Path) -> str:
    message = outcome(folder)
    assert message is not None
    return message


def with_settings(folder: Path, kind: str, change: dict[str, Any], **options: Any) -> None:
    written = write_quantized_model(folder, kind, **options)
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = {**written.config, "quantization_config": {**said, **change}}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("awq", {"version": "gemv"}, "version is 'gemv'"),
        ("awq", {"version": "exllama"}, "version is 'exllama'"),
        ("awq", {"version": "marlin"}, "version is 'marlin'"),
        ("awq", {"bits": 8}, "bits is 8"),
        ("gptq", {"bits": 5}, "bits is 5"),
        ("gptq", {"bits": "4"}, "bits is '4'"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format is True"),
        ("gptq", {"pack_dtype": "int8"}, "pack_dtype is 'int8'"),
        ("gptq", {"adapter": {"path": "x"}}, "adapter is"),
        ("gptq", {"group_size": 0}, "group_size is 0"),
        ("gptq", {"group_size": "128"}, "group_size is '128'"),
        ("gptq", {"desc_act": "yes"}, "desc_act is 'yes'"),
        ("gptq", {"sym": 1}, "sym is 1"),
        ("gptq", {"dynamic": ["x"]}, "dynamic is"),
        ("gptq", {"dynamic": {"+:(": {"bits": 8}}}, "is no pattern"),
        ("gptq", {"dynamic": {"+:model": {"bits": 7}}}, "bits is 7"),
        ("gptq", {"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
        ("gptq", {"quant_method": ["x"]}, "quant_method is ['x']"),
        ("gptq", {"quant_method": "fp8"}, "quant_method is 'fp8'"),
        ("compressed-tensors", {"format": "int-quantized"}, "format is 'int-quantized'"),
        ("compressed-tensors", {"config_groups": {}}, "config_groups is {}"),
        ("compressed-tensors", {"config_groups": {"g": 1}}, "config_groups.g.weights is None"),
        ("compressed-tensors", {"config_groups": {"g": {"weights": {"num_bits": 3}}}}, "num_bits is 3"),
        (
            "compressed-tensors",
            {"config_groups": {"g": {"weights": {"num_bits": 4, "type": "float"}}}},
            "'float'",
        ),
        ("compressed-tensors", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
        ("compressed-tensors", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config is"),
        (
            "compressed-tensors",
            {"config_groups": {"g": {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 8}}}},
            "input_activations is",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    kind: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with_settings(tmp_path, kind, change)
    message = refusal(tmp_path)
    assert words in message
    assert "config.json" in message


@pytest.mark.parametrize("value", [7, "x", [1], True])
def test_settings_that_are_no_object(value: Any, tmp_path: Path) -> None:
    written = write_quantized_model(tmp_path, "gptq")
    (tmp_path / "config.json").write_text(json.dumps({**written.config, "quantization_config": value}))
    assert "config.json: quantization_config is" in refusal(tmp_path)


def test_settings_without_codes(tmp_path: Path) -> None:
    with_settings(tmp_path, "gptq", {}, kept=("proj",))
    assert "no tensor holds codes" in refusal(tmp_path)


def set_leaf(leaf: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[Leaves], None]:
    def apply(tensors: Leaves) -> None:
        value = change(tensors.pop(f"{LINEAR}.{leaf}"))
        if value is not None:
            tensors[f"{LINEAR}.{leaf}"] = value

    return apply


def add(name: str, value: np.ndarray) -> Callable[[Leaves], None]:
    return lambda tensors: tensors.update({name: value})


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("gptq", set_leaf("qzeros", lambda _: None), "qzeros: is missing"),
        ("gptq", set_leaf("scales", lambda _: None), "scales: is missing"),
        ("gptq", set_leaf("scales", lambda x: x.astype(np.int32)), "scales: is stored as I32"),
        ("gptq", set_leaf("qweight", lambda x: x.astype(np.int64)), "qweight: is stored as I64"),
        ("gptq", set_leaf("qweight", lambda x: x[:, :-1]), "qweight: has shape"),
        ("gptq", set_leaf("qweight", lambda x: x[0]), "qweight: has shape"),
        ("gptq", set_leaf("qweight", lambda x: x[:0]), "qweight: has shape"),
        ("gptq", set_leaf("qzeros", lambda x: x[:1]), "qzeros: has 1 groups"),
        ("gptq", set_leaf("qzeros", lambda x: x[:, :5]), "qzeros: has 5 words"),
        ("gptq", set_leaf("g_idx", lambda x: x[:5]), "g_idx: has shape [5]"),
        ("gptq", set_leaf("g_idx", lambda x: x + 1), "g_idx: holds group 2"),
        ("gptq", set_leaf("g_idx", lambda x: x - 1), "g_idx: holds group -1"),
        ("gptq", set_leaf("g_idx", lambda x: x * 0), "g_idx: group 0 has 64 inputs, not 32"),
        ("gptq", set_leaf("g_idx", lambda x: x.astype(np.float16)), "g_idx: is stored as F16"),
        ("gptq", add(f"{LINEAR}.weight", np.zeros((64, 64), np.float32)), "is there beside"),
        ("awq", set_leaf("qweight", lambda x: np.ascontiguousarray(x.T)), "stored as gptq"),
        ("awq", set_leaf("qweight", lambda x: x[:, :-1]), "neither AWQ gemm nor GPTQ"),
        ("awq", set_leaf("scales", lambda x: x[:1]), "qzeros: has 2 groups"),
        ("compressed-tensors", set_leaf("weight_shape", lambda _: None), "weight_shape: is missing"),
        ("compressed-tensors", set_leaf("weight_shape", lambda x: x * 9), "weight_shape: says [576, 576]"),
        ("compressed-tensors", set_leaf("weight_shape", lambda x: x - 60), "weight_shape: says"),
        ("compressed-tensors", set_leaf("weight_scale", lambda _: None), "weight_scale: is missing"),
        ("compressed-tensors", set_leaf("weight_scale", lambda x: x[:3]), "weight_scale: has shape"),
        ("compressed-tensors", set_leaf("weight_packed", lambda x: x[:, :5]), "weight_shape: says [64, 64]"),
        (
            "compressed-tensors",
            add(f"{LINEAR}.weight_zero_point", np.zeros((3, 1), np.int32)),
            "weight_zero_point: is I32",
        ),
    ],
)
def test_broken_tensors_are_named(
    kind: str, change: Callable[[Leaves], None], words: str, tmp_path: Path
) -> None:
    write_quantized_model(tmp_path, kind)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    (tmp_path / "model.safetensors").write_bytes(safetensors(tensors))
    message = refusal(tmp_path)
    assert LINEAR in message
    assert words in message
    assert str(tmp_path) in message


def test_tensors_of_two_methods(tmp_path: Path) -> None:
    write_quantized_model(tmp_path / "a", "awq", settings_in=())
    write_quantized_model(tmp_path / "b", "gptq", settings_in=())
    other = load_file(tmp_path / "b" / "model.safetensors")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors |= {name: value for name, value in other.items() if name.startswith(LINEAR)}
    del tensors[f"{LINEAR}.g_idx"]
    (tmp_path / "a" / "model.safetensors").write_bytes(safetensors(tensors))
    assert "tensors of two models are mixed" in refusal(tmp_path / "a")


@pytest.mark.parametrize("kind", ["awq", "gptq", "compressed-tensors"])
def test_any_tensor_may_have_any_shape_and_dtype(kind: str, tmp_path: Path) -> None:
    """Whatever is put in a leaf's place: read, or a CheckpointError in one line."""
    write_quantized_model(tmp_path, kind)
    good = load_file(tmp_path / "model.safetensors")
    leaves = [name for name in good if name.startswith(LINEAR)]
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        name = leaves[random.integers(len(leaves))]
        shape = tuple(int(x) for x in random.choice([0, 1, 2, 3, 8, 16, 64], random.integers(0, 4)))
        dtype = [np.int32, np.int64, np.float16, np.float32, np.int8][random.integers(5)]
        values = random.integers(-3, 3, shape).astype(dtype)
        (tmp_path / "model.safetensors").write_bytes(safetensors({**good, name: values}))
        message = outcome(tmp_path)
        refused += message is not None
        assert message is None or LINEAR in message
    assert refused > 100


SLIPS = ("x", "", -1, 0, 1, 2.5, True, [], ["x"], {}, {"a": 1}, 10**30)
KEYS = (
    "quant_method",
    "bits",
    "group_size",
    "desc_act",
    "sym",
    "checkpoint_format",
    "version",
    "dynamic",
    "format",
)


@pytest.mark.parametrize("kind", ["awq", "gptq", "compressed-tensors"])
def test_any_setting_may_have_any_value(kind: str, tmp_path: Path) -> None:
    with_settings(tmp_path, kind, {})
    config = json.loads((tmp_path / "config.json").read_text())
    for key in (*KEYS, "config_groups", "pack_dtype", "sparsity_config"):
        for value in SLIPS:
            changed = {**config, "quantization_config": {**config["quantization_config"], key: value}}
            (tmp_path / "config.json").write_text(json.dumps(changed))
            message = outcome(tmp_path)
            assert message is None or "config.json" in message, (key, value)
