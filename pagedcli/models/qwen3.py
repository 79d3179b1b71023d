"""Qwen3: norms on single heads of q and k, heads wider than hidden_size / num_heads, biases only where asked for."""

from __future__ import annotations

from dataclasses import replace

from pagedcli.models.family import Family
from pagedcli.models.layers import decoder
from pagedcli.models.spec import ConfigReader, ModelSpec, read_common, read_layer_windows

DEFAULTS = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def read_spec(reader: ConfigReader) -> ModelSpec:
    """`attention_bias` covers q, k, v and the output projection."""
    reader = reader.with_defaults(DEFAULTS)
    spec = read_common(reader)
    attention_bias = reader.flag("attention_bias")
    return replace(
        spec,
        head_norms=True,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        windows=read_layer_windows(reader, spec.num_layers),
    )


FAMILY = Family("Qwen3ForCausalLM", "qwen3", read_spec, decoder)
