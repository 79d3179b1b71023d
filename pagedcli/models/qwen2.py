"""Qwen2 and Qwen2.5: biases on q, k and v; a sliding window on the upper layers where the config uses it."""

from __future__ import annotations

from dataclasses import replace

from pagedcli.models.family import Family
from pagedcli.models.layers import decoder
from pagedcli.models.spec import ConfigReader, ModelSpec, read_common, read_layer_windows

DEFAULTS = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def read_spec(reader: ConfigReader) -> ModelSpec:
    """The biases are part of the architecture: no key turns them off."""
    reader = reader.with_defaults(DEFAULTS)
    spec = read_common(reader)
    return replace(spec, qkv_bias=True, windows=read_layer_windows(reader, spec.num_layers))


FAMILY = Family("Qwen2ForCausalLM", "qwen2", read_spec, decoder)
