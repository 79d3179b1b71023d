"""Mistral: Llama with one sliding window for all layers."""

from __future__ import annotations

from dataclasses import replace

from pagedcli.models.family import Family
from pagedcli.models.layers import decoder
from pagedcli.models.spec import ConfigReader, ModelSpec, read_common

DEFAULTS = {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096}


def read_spec(reader: ConfigReader) -> ModelSpec:
    """`sliding_window` null means full attention."""
    reader = reader.with_defaults(DEFAULTS)
    spec = read_common(reader)
    windowed = reader.config["sliding_window"] is not None
    window = reader.integer("sliding_window") if windowed else None
    return replace(spec, windows=(window,) * spec.num_layers)


FAMILY = Family("MistralForCausalLM", "mistral", read_spec, decoder)
