"""GGUF metadata and tensor names in Hugging Face terms.

Imports numpy, `text` and `errors`. Supported architectures: llama (Llama, Mistral, SmolLM2), qwen2, qwen3. Whatever a
file asks for that could not be computed faithfully is refused; nothing is ignored in silence.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from pagedcli.errors import CheckpointError
from pagedcli.text.gguf_tokenizer import CONTROL, END_TOKENS

ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
ROPE_FACTORS = "rope_freqs.weight"

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str | None:
    """Hugging Face name of a GGUF tensor, or None when these families have no such tensor."""
    layer = re.fullmatch(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _LAYER:
        return f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.{layer[3]}"
    top = re.fullmatch(r"(\w+)\.(weight|bias)", name)
    if top and top[1] in _TOP:
        return f"{_TOP[top[1]]}.{top[2]}"
    return None


class _Fields:
    """Typed access to the metadata of one architecture; errors name file and key."""

    def __init__(self, path: Path, metadata: dict[str, Any], architecture: str) -> None:
        self.path, self.metadata, self.architecture = path, metadata, architecture

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value, of the type asked for (an int will do for a float), or the default when it is not there."""
        full = f"{self.architecture}.{key}"
        value = self.metadata.get(full, default)
        if isinstance(value, list) and value and all(x == value[0] for x in value):
            value = value[0]  # one value for each layer, all the same
        if value is default or type(value) is kind or (kind is float and type(value) is int):
            return value
        raise CheckpointError(
            f"{self.path}: metadata {full}: is {str(value)[:60]}, not one {kind.__name__}: this model is not supported"
        )

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer that must be there unless there is a default."""
        value = self.get(key, int, default)
        if value is None or value < 1:
            reason = "is missing" if value is None else f"is {value}"
            raise CheckpointError(
                f"{self.path}: metadata {self.architecture}.{key}: {reason}: the file is incomplete or corrupt"
            )
        return int(value)


def hf_config(
    path: Path, metadata: dict[str, Any], vocab_size: int, *, biased: bool, factors: np.ndarray | None
) -> dict[str, Any]:
    """config.json in Hugging Face terms.

    Args:
        path: The file, for messages.
        metadata: All fields of the file.
        vocab_size: Rows of the embedding, which is what counts.
        biased: Whether q, k and v have biases (always so in qwen2).
        factors: `rope_freqs.weight`, [head_dim / 2] float32, or None.
    """
    architecture = _architecture(path, metadata)
    fields = _Fields(path, metadata, architecture)
    model_type, class_name = ARCHITECTURES[architecture]
    hidden, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    head_dim = fields.size("attention.key_length", max(1, hidden // heads))
    _check_same(fields, "attention.value_length", head_dim)
    _check_same(fields, "rope.dimension_count", head_dim)
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [class_name],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": fields.size("feed_forward_length"),
        "num_hidden_layers": fields.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.size("context_length"),
        "rms_norm_eps": float(fields.get("attention.layer_norm_rms_epsilon", float, 1e-6)),
        "rope_theta": float(fields.get("rope.freq_base", float, 10000.0)),
        "rope_scaling": _rope_scaling(fields, factors, head_dim),
        "hidden_act": "silu",
        "attention_bias": biased,
    }
    _add_window(config, fields)
    for name in ("bos", "eos", "padding"):
        config[f"{'pad' if name == 'padding' else name}_token_id"] = metadata.get(
            f"tokenizer.ggml.{name}_token_id"
        )
    return config


def _architecture(path: Path, metadata: dict[str, Any]) -> str:
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: GGUF architecture {architecture!r} is not supported; known are llama (Llama, Mistral, SmolLM2), "
            "qwen2, qwen3"
        )
    if metadata.get(f"{architecture}.expert_count"):
        raise CheckpointError(f"{path}: is a mixture of experts ({architecture}), which is not supported")
    if metadata.get("split.count", 1) != 1:
        raise CheckpointError(
            f"{path}: is one of {metadata['split.count']} parts: join them with llama.cpp's `llama-gguf-split --merge`"
        )
    return architecture


def _check_same(fields: _Fields, key: str, head_dim: int) -> None:
    value = fields.size(key, head_dim)
    if value != head_dim:
        raise CheckpointError(
            f"{fields.path}: metadata {fields.architecture}.{key}: is {value} where heads have {head_dim} dimensions, "
            "which is not supported"
        )


def _add_window(config: dict[str, Any], fields: _Fields) -> None:
    """A llama file with a sliding window is a Mistral; qwen2 and qwen3 files name one that is not in use."""
    window = fields.get("attention.sliding_window", int)
    if fields.architecture != "llama":
        config["use_sliding_window"] = False
    elif window:
        config.update(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=window)


def _rope_scaling(fields: _Fields, factors: np.ndarray | None, head_dim: int) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type", str, "linear")  # llama.cpp's default, without effect at factor 1
    factor = fields.get("rope.scaling.factor", float) or fields.get("rope.scale_linear", float)
    original = fields.get("rope.scaling.original_context_length", int)
    if factors is not None:
        if kind not in ("none", "linear") or factor not in (None, 0, 1):
            raise CheckpointError(
                f"{fields.path}: has both {ROPE_FACTORS} and rope scaling {kind}: not supported"
            )
        return _llama3(fields, factors, head_dim)
    if not factor or factor == 1 or kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": float(factor)}
        return scaling | ({"original_max_position_embeddings": original} if original else {}) | _yarn(fields)
    raise CheckpointError(
        f"{fields.path}: metadata {fields.architecture}.rope.scaling.type: {kind!r} is not supported; "
        "known are none, linear, yarn"
    )


def _yarn(fields: _Fields) -> dict[str, float]:
    """The optional parts of yarn, under their Hugging Face names."""
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    found = {hf: fields.get(f"rope.scaling.{name}", float) for name, hf in names.items()}
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
        if fields.get(key, float) not in (None, 1):
            raise CheckpointError(f"{fields.path}: metadata {fields.architecture}.{key}: is not supported")
    return {name: float(value) for name, value in found.items() if value is not None}


def _llama3(fields: _Fields, factors: np.ndarray, head_dim: int) -> dict[str, Any] | None:
    """The llama3 scaling whose result the file stores as one divisor per frequency, found by trying them.

    llama.cpp's converter computes the divisors and drops the parameters. `factor` is the largest divisor; the
    others are those of every Llama 3.x, or the file is refused.
    """
    if factors.shape != (head_dim // 2,) or not np.all(np.isfinite(factors)):
        raise CheckpointError(
            f"{fields.path}: tensor {ROPE_FACTORS}: shape {list(factors.shape)} or values are wrong"
        )
    factor = float(str(np.float32(factors.max())))
    if factor == 1 and factors.min() == 1:
        return None
    theta = fields.get("rope.freq_base", float, 10000.0)
    context = fields.size("context_length")
    for original in dict.fromkeys((8192, int(context / factor), 4096)):
        made = llama3_divisors(theta, head_dim, factor, 1.0, 4.0, original)
        if np.allclose(made, factors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise CheckpointError(
        f"{fields.path}: tensor {ROPE_FACTORS}: holds frequencies that are not those of a Llama 3 model (largest "
        f"factor {factor:g}), which is not supported"
    )


def llama3_divisors(
    theta: float, head_dim: int, factor: float, low: float, high: float, original: int
) -> np.ndarray:
    """Divisor of each rotary frequency under llama3 scaling, [head_dim / 2] float64."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = original * frequencies / (2 * np.pi)  # how often it goes round within the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


def end_token_ids(metadata: dict[str, Any]) -> list[int]:
    """Every id that ends a turn: the file's eos first (it is the truth), then eot and eom, then known names."""
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [CONTROL] * len(tokens)
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    index = {token: i for i, token in enumerate(tokens)}
    for name in END_TOKENS:
        i = index.get(name)
        if i is not None and types[i] == CONTROL:
            ends.append(i)
    return list(dict.fromkeys(i for i in ends if isinstance(i, int)))
