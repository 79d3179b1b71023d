"""GGUF files in Hugging Face terms: configuration, names, row order, tied heads, end tokens. One test for each trap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pagedcli.checkpoint.base import RawTensor
from pagedcli.checkpoint.gguf_checkpoint import GGUFCheckpoint
from pagedcli.checkpoint.gguf_file import GGUFFile
from pagedcli.checkpoint.gguf_map import llama3_divisors
from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.errors import CheckpointError
from tests.fixtures_checkpoints import head_dim, permute_rows, tiny_config, tiny_tensors, write_tiny_gguf

MakeModel = Callable[..., Path]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
QUANTIZED = ["Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"]
WIDE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def array(tensor: RawTensor) -> np.ndarray:
    if tensor.dtype == "BF16":
        bits = tensor.data.view("<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(tensor.shape)
    return tensor.data.view({"F32": "<f4", "F16": "<f2"}[tensor.dtype]).reshape(tensor.shape)


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_reads_as_the_folder_it_was_made_from(
    family: str, tiny_gguf: MakeModel, tiny_checkpoint: MakeModel
) -> None:
    """Names, shapes, row order of q and k, and every value: == the safetensors folder of the same weights."""
    ours, folder = open_checkpoint(tiny_gguf(family)), open_checkpoint(tiny_checkpoint(family))
    assert set(ours.names()) == set(folder.names())
    for name in folder.names():
        assert ours.tensor(name).shape == ours.shape(name) == folder.shape(name)
        assert ours.tensor(name).dtype == "F32"
        np.testing.assert_array_equal(array(ours.tensor(name)), array(folder.tensor(name)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_is_the_folders(family: str, tiny_gguf: MakeModel) -> None:
    expected = tiny_config(family)
    config = open_checkpoint(tiny_gguf(family)).config
    for key in ("initializer_range", "use_sliding_window"):
        expected.pop(key, None)
    assert config["head_dim"] == head_dim(tiny_config(family))
    for key, value in expected.items():
        assert config[key] == value, key
    assert config["rope_scaling"] is None
    assert config["torch_dtype"] == "float32"
    assert config["attention_bias"] is (family == "qwen2")


@pytest.mark.parametrize(
    ("tensor_type", "dtype"),
    [("F16", "F16"), ("BF16", "BF16"), ("Q8_0", "F32"), ("Q4_1", "F32"), ("Q4_0", "F32"), ("Q5_1", "F32")],
)
def test_values_equal_the_gguf_package(tensor_type: str, dtype: str, tiny_gguf: MakeModel) -> None:
    path = tiny_gguf("qwen3", tensor_type=tensor_type, **WIDE)
    checkpoint = open_checkpoint(path)
    for tensor in gguf.GGUFReader(path).tensors:
        if not tensor.name.endswith(("ffn_up.weight", "attn_q.weight", "token_embd.weight")):
            continue
        names = {"ffn_up": "mlp.up_proj", "attn_q": "self_attn.q_proj"}
        part = tensor.name.split(".")
        name = (
            f"model.layers.{part[1]}.{names[part[2]]}.weight"
            if part[0] == "blk"
            else "model.embed_tokens.weight"
        )
        mine = checkpoint.tensor(name)
        assert mine.dtype == dtype
        np.testing.assert_array_equal(array(mine), gguf.dequantize(tensor.data, tensor.tensor_type))
        np.testing.assert_array_equal(array(mine.rows(3, 8)), array(mine)[3:8])
    assert checkpoint.config["torch_dtype"] == ("float16" if tensor_type == "F16" else "bfloat16")


def test_q_and_k_of_llama_are_restored_when_quantized_too(tiny_gguf: MakeModel) -> None:
    """Rows are permuted whole, so that restoring them after dequantization is exact."""
    path = tiny_gguf("llama", tensor_type="Q8_0", **WIDE)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for part, name, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        tensor = stored[f"blk.1.{part}.weight"]
        mine = array(open_checkpoint(path).tensor(f"model.layers.1.self_attn.{name}.weight"))
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(permute_rows(mine, heads), values)
        rows = open_checkpoint(path).tensor(f"model.layers.1.self_attn.{name}.weight").rows(5, 21)
        assert (rows.shape[0], rows.data.tobytes()) == (16, mine[5:21].tobytes())
        assert not np.array_equal(mine, values)


def test_biases_of_llama_are_restored_too(tiny_gguf: MakeModel) -> None:
    checkpoint = open_checkpoint(tiny_gguf("llama", attention_bias=True))
    expected = tiny_tensors(tiny_config("llama", attention_bias=True))
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.0.self_attn.{part}.bias"
        np.testing.assert_array_equal(array(checkpoint.tensor(name)), expected[name])
    assert checkpoint.config["attention_bias"] is True


@pytest.mark.parametrize("embedding", ["F32", "F16", "BF16", *QUANTIZED])
@pytest.mark.parametrize("head", ["F16", *QUANTIZED])
def test_a_head_that_is_the_embedding_again_is_tied_from_the_finer_copy(
    embedding: str, head: str, tiny_gguf: MakeModel
) -> None:
    path = tiny_gguf("qwen2", embedding_type=embedding, head_type=head, **WIDE)
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, GGUFCheckpoint)
    assert checkpoint.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in checkpoint.names()
    bits = {"F32": 32, "F16": 16, "BF16": 16, "Q8_0": 8.5, "Q5_1": 6, "Q5_0": 5.5, "Q4_1": 5, "Q4_0": 4.5}
    finer = bits[max(embedding, head, key=bits.__getitem__)]
    assert bits[checkpoint.kind("model.embed_tokens.weight")] == finer


@pytest.mark.parametrize("tensor_type", ["F32", "Q8_0", "Q4_0"])
def test_a_head_of_its_own_is_not_tied(tensor_type: str, tiny_gguf: MakeModel) -> None:
    checkpoint = open_checkpoint(
        tiny_gguf("qwen2", tensor_type=tensor_type, tie_word_embeddings=False, **WIDE)
    )
    assert checkpoint.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in checkpoint.names()


def test_a_head_trained_a_little_away_from_the_embedding_is_not_tied(
    tmp_path: Path, tiny_gguf: MakeModel
) -> None:
    config = {"tie_word_embeddings": False, **WIDE}
    tensors = tiny_tensors(tiny_config("qwen2", **config))
    noise = np.random.default_rng(1).standard_normal(tensors["lm_head.weight"].shape, dtype=np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + np.float32(0.03) * noise
    path = write_tiny_gguf(tmp_path / "x.gguf", "qwen2", tensors=tensors, tensor_type="F16", **config)
    assert open_checkpoint(path).config["tie_word_embeddings"] is False


def test_no_head_means_tied(tiny_gguf: MakeModel) -> None:
    checkpoint = open_checkpoint(tiny_gguf("llama", tie_word_embeddings=True))
    assert checkpoint.config["tie_word_embeddings"] is True


def test_eos_is_the_files_and_end_tokens_of_the_vocabulary_follow(tiny_gguf: MakeModel) -> None:
    checkpoint = open_checkpoint(tiny_gguf("llama", eos_token_id=1))
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [1, 2, 0], "pad_token_id": 0}
    named = open_checkpoint(tiny_gguf("llama", metadata={"tokenizer.ggml.eot_token_id": 7}))
    assert named.generation_config["eos_token_id"] == [2, 7, 0]


def test_generation_config_and_tokenizer_agree_on_the_ends(tiny_gguf: MakeModel) -> None:
    checkpoint = open_checkpoint(tiny_gguf("qwen2"))
    tokenizer = checkpoint.load_tokenizer()
    assert list(tokenizer.eos_token_ids) == checkpoint.generation_config["eos_token_id"]
    sentence = "The cat's 12 mats — żółw 🐢"
    assert tokenizer.decode(tokenizer.encode(sentence)) == sentence


ROPE: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "linear": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
        {"rope_type": "linear", "factor": 2.0},
    ),
    "old linear": ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "no effect": ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, None),
    "none": ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}, None),
    "yarn": (
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 128,
            "llama.rope.scaling.yarn_beta_fast": 24.0,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 24.0},
    ),
}


@pytest.mark.parametrize("case", ROPE)
def test_rope_scaling(case: str, tiny_gguf: MakeModel) -> None:
    metadata, expected = ROPE[case]
    assert open_checkpoint(tiny_gguf("llama", metadata=metadata)).config["rope_scaling"] == expected


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_other_rope_scaling_is_refused(kind: str, tiny_gguf: MakeModel) -> None:
    metadata = {"llama.rope.scaling.type": kind, "llama.rope.scaling.factor": 2.0}
    assert f"'{kind}' is not supported" in refused(tiny_gguf("llama", metadata=metadata))


def test_yarn_with_its_own_attention_factor_is_refused(tiny_gguf: MakeModel) -> None:
    metadata = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0,
        "llama.rope.scaling.attn_factor": 1.5,
    }
    assert "rope.scaling.attn_factor" in refused(tiny_gguf("llama", metadata=metadata))


def reference_llama3_divisors(theta: float, dim: int, factor: float, original: int) -> np.ndarray:
    """As llama.cpp's converter computes `rope_freqs.weight`, in its order of operations."""
    out = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * theta ** (i / dim)
        if wavelength < original / 4:
            out.append(1.0)
        elif wavelength > original / 1:
            out.append(factor)
        else:
            smooth = (original / wavelength - 1) / (4 - 1)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize(("factor", "theta"), [(8.0, 500_000.0), (32.0, 500_000.0)])
def test_llama3_scaling_is_found_from_the_stored_divisors(
    factor: float, theta: float, tmp_path: Path
) -> None:
    divisors = reference_llama3_divisors(theta, 64, factor, 8192)
    np.testing.assert_allclose(llama3_divisors(theta, 64, factor, 1.0, 4.0, 8192), divisors, rtol=1e-6)
    path = write_tiny_gguf(
        tmp_path / "x.gguf",
        "llama",
        extra_tensors={"rope_freqs.weight": divisors},
        rope_theta=theta,
        head_dim=64,
        max_position_embeddings=131_072,
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert not any("rope" in name for name in checkpoint.names())


@pytest.mark.parametrize("divisors", [np.linspace(1, 3, 8), np.full(8, np.nan), np.ones(5)])
def test_other_frequency_divisors_are_refused(divisors: np.ndarray, tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": divisors.astype(np.float32)}
    assert "rope_freqs.weight" in refused(write_tiny_gguf(tmp_path / "x.gguf", "llama", extra_tensors=extra))


@pytest.mark.parametrize("architecture", ["gemma3", "phi3"])
def test_an_unknown_architecture_is_refused_with_the_known_ones(architecture: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    message = refused(tmp_path / "x.gguf")
    assert f"architecture '{architecture}' is not supported" in message
    assert "qwen3" in message


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"metadata": {"llama.expert_count": 8}}, "mixture of experts"),
    "split": ({"metadata": {"split.count": 3}}, "one of 3 parts: join them with llama.cpp's"),
    "foreign tensor": (
        {"extra_tensors": {"blk.0.attn_sub_norm.weight": np.ones(4, np.float32)}},
        "blk.0.attn_sub_norm",
    ),
    "foreign top": ({"extra_tensors": {"cls.weight": np.ones(4, np.float32)}}, "tensor cls.weight"),
    "extra layer": (
        {"extra_tensors": {"blk.7.attn_norm.weight": np.ones(4, np.float32)}},
        "tensor blk.7.attn_norm",
    ),
    "value heads": ({"metadata": {"llama.attention.value_length": 8}}, "llama.attention.value_length: is 8"),
    "vocabulary": (
        {"tensors": {"model.embed_tokens.weight": np.ones((300, 48), np.float32)}},
        "320 tokens, but",
    ),
    "no embedding": (
        {"tensors": {"model.norm.weight": np.ones(48, np.float32)}},
        "has no tensor model.embed_tokens",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_compute_something_else_is_refused(case: str, tmp_path: Path) -> None:
    settings, message = REFUSED[case]
    assert message in refused(write_tiny_gguf(tmp_path / "x.gguf", "llama", **settings))


def test_a_missing_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config("llama"))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "x.gguf", "llama", tensors=tensors))
    with pytest.raises(
        CheckpointError, match=r"x\.gguf: has no tensor model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        checkpoint.tensor("model.layers.1.mlp.up_proj.weight")


def test_a_storage_type_without_decoder_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        raise NotImplementedError

    path = write_tiny_gguf(tmp_path / "x.gguf", "llama", tensor_type="Q5_0", **WIDE)
    checkpoint = open_checkpoint(path)
    monkeypatch.setattr("pagedcli.checkpoint.dequantize.dequantize", unknown)
    with pytest.raises(
        CheckpointError, match=r"x\.gguf: tensor blk\.0\.ffn_up\.weight: .* cannot dequantize Q5_0"
    ):
        checkpoint.tensor("model.layers.0.mlp.up_proj.weight")


def two_layers(source: Path, path: Path) -> Path:
    """The file's architecture keys and first two layers, byte for byte: readable in less than half a minute."""
    file = GGUFFile(source)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in file.metadata.items():
        if key.startswith("llama."):
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, tensor in file.tensors.items():
        if not name.startswith("blk.") or name.startswith(("blk.0.", "blk.1.")):
            data = file.data(tensor)
            rows = data.view("<f4") if tensor.kind.name == "F32" else data.reshape(tensor.shape[0], -1)
            writer.add_tensor(name, rows, raw_dtype=tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.model
def test_smollm2_config_and_tensors_equal_transformers(smollm2_gguf: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    checkpoint = open_checkpoint(smollm2_gguf)
    config = checkpoint.config
    with torch.device("meta"):  # transformers maps names by walking a model
        settings = transformers.LlamaConfig(**{**config, "num_hidden_layers": 2})
        skeleton = transformers.AutoModelForCausalLM.from_config(settings)
    small = two_layers(smollm2_gguf, tmp_path / "small.gguf")
    theirs = load_gguf_checkpoint(str(small), return_tensors=True, model_to_load=skeleton)
    same = {key: value for key, value in theirs["config"].items() if config.get(key) is not None}
    assert len(same) >= 12
    for key, value in same.items():
        if key not in ("architectures", "_model_name_or_path"):
            assert config[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
    names = [name for name in checkpoint.names() if "layers" not in name or ".0." in name or ".1." in name]
    assert len(names) == 2 + 2 * 9
    for name in names:
        np.testing.assert_array_equal(array(checkpoint.tensor(name)), theirs["tensors"][name].numpy())


@pytest.mark.model
def test_smollm2_is_tied_and_ends_where_its_file_says(smollm2_gguf: Path) -> None:
    checkpoint = open_checkpoint(smollm2_gguf)
    assert checkpoint.config["tie_word_embeddings"] is True
    assert checkpoint.config["torch_dtype"] == "bfloat16"
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}
    assert list(checkpoint.load_tokenizer().eos_token_ids) == [2, 0]
