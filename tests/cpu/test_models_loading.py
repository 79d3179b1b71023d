"""What is refused, and with which words: architectures, settings, tensors that do not belong to the config."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedcli.checkpoint import open_checkpoint
from pagedcli.errors import CheckpointError
from pagedcli.models.load import expected_tensors, load_model
from pagedcli.models.registry import known_architectures
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.select import make_ops
from tests.fixtures_checkpoints import (
    safetensors_bytes,
    tensor_shapes,
    tiny_config,
    tiny_tensors,
    write_tiny_checkpoint,
)


def refusal(**overrides: Any) -> str:
    family = overrides.pop("family", "llama")
    with pytest.raises(CheckpointError) as caught:
        ModelSpec.from_config(tiny_config(family, **overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_unknown_architecture_is_refused_with_the_known_ones() -> None:
    message = refusal(architectures=["GPT2LMHeadModel"])
    assert "GPT2LMHeadModel" in message
    assert all(name in message for name in known_architectures())


def test_model_type_serves_configs_without_architectures() -> None:
    config = tiny_config("qwen2")
    del config["architectures"]
    spec = ModelSpec.from_config(config)
    assert spec.architecture == "Qwen2ForCausalLM"
    assert expected_tensors(spec) == tensor_shapes(config)


def test_dynamic_rope_is_refused_because_of_its_cached_keys() -> None:
    message = refusal(rope_scaling={"type": "dynamic", "factor": 2.0})
    assert "dynamic" in message
    assert "written to the cache" in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ("longrope", "yarn")),
        ({"rope_scaling": {"rope_type": "linear"}}, ("linear", "factor")),
        ({"rope_scaling": {"rope_type": "linear", "factor": "two"}}, ("factor", "'two'")),
        ({"rope_scaling": "yarn"}, ("rope_scaling", "'yarn'")),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ("full_attention",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ({"hidden_act": "relu2"}, ("relu2", "silu", "gelu_pytorch_tanh")),
        ({"num_key_value_heads": 2}, ("3", "2", "multiple")),
        ({"head_dim": 15}, ("head_dim 15", "odd")),
        ({"hidden_size": "48"}, ("hidden_size", "'48'")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers", "0")),
        ({"rms_norm_eps": None}, ("rms_norm_eps", "None")),
        ({"torch_dtype": "int8"}, ("int8", "bfloat16")),
        ({"tie_word_embeddings": "no"}, ("tie_word_embeddings", "'no'")),
        ({"family": "qwen2", "layer_types": ["sliding_attention", "full_attention"]}, ("sliding_window",)),
        ({"family": "qwen2", "layer_types": ["full_attention"]}, ("layer_types", "2 layers")),
        ({"family": "qwen3", "layer_types": ["linear_attention", "full_attention"]}, ("linear_attention",)),
    ],
)
def test_settings_that_cannot_be_served_are_refused(
    overrides: dict[str, Any], words: tuple[str, ...]
) -> None:
    message = refusal(**overrides)
    assert all(word in message for word in words), message


def test_missing_key_is_named() -> None:
    config = tiny_config("llama")
    del config["intermediate_size"]
    with pytest.raises(CheckpointError, match="intermediate_size is missing"):
        ModelSpec.from_config(config)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_expected_tensors_are_those_of_the_family(family: str) -> None:
    config = tiny_config(family)
    assert expected_tensors(ModelSpec.from_config(config)) == tensor_shapes(config)


def test_kv_of_a_token_is_counted() -> None:
    spec = ModelSpec.from_config(tiny_config("mistral"))
    assert spec.kv_elements_per_token() == 2 * 2 * 2 * 8  # k and v, layers, heads, head_dim


def load(folder: Path) -> None:
    load_model(open_checkpoint(folder), make_ops("cpu", "float32"), 64)


def write_changed(folder: Path, change: Callable[[dict[str, np.ndarray]], None], **overrides: Any) -> Path:
    write_tiny_checkpoint(folder, "llama", **overrides)
    tensors = tiny_tensors(tiny_config("llama", **overrides))
    change(tensors)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    def drop(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]

    with pytest.raises(CheckpointError) as caught:
        load(write_changed(tmp_path, drop))
    message = str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight is missing (and 1 more)" in message
    assert "[96, 48]" in message
    assert str(tmp_path) in message


def test_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    def widen(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((32, 48), np.float32)

    with pytest.raises(CheckpointError, match=r"k_proj.weight has shape \[32, 48\].*asks for \[16, 48\]"):
        load(write_changed(tmp_path, widen))


def test_left_over_tensor_is_named(tmp_path: Path) -> None:
    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((96, 48), np.float32)

    with pytest.raises(CheckpointError, match=r"model.layers.2.mlp.up_proj.weight is not part of"):
        load(write_changed(tmp_path, add))


def test_stored_rope_buffers_and_copies_of_a_tied_head_are_no_fault(tmp_path: Path) -> None:
    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    load(write_changed(tmp_path, add, tie_word_embeddings=True))


def test_tied_head_shares_the_embedding(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("qwen2"))
    decoder = load_model(checkpoint, make_ops("cpu", "bfloat16"), 64).decoder
    assert decoder.head.weight is decoder.embedding.data


def test_fused_linears_keep_the_names_of_their_parts(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("qwen2"))
    linear = load_model(checkpoint, make_ops("cpu", "float32"), 64).decoder.layers[1].attention.qkv
    names = [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"]
    assert [(part.name, part.size) for part in linear.parts] == list(zip(names, (48, 16, 16), strict=True))
    k_rows = linear.weight[48:64].numpy()
    assert k_rows.tobytes() == checkpoint.tensor(f"{names[1]}.weight").data.tobytes()


def test_models_import_no_backend() -> None:
    code = (
        "import sys, pagedcli.models.load, pagedcli.ops.select\n"
        "print(json.dumps(sorted({'torch', 'transformers', 'paged_kernels'} & set(sys.modules))))"
    )
    result = subprocess.run(
        [sys.executable, "-c", f"import json\n{code}"], capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) == []
