"""Llama 2, 3 and 3.x, and what has the same architecture (SmolLM2): optional biases everywhere, no window."""

from __future__ import annotations

from dataclasses import replace

from pagedcli.models.family import Family
from pagedcli.models.layers import decoder
from pagedcli.models.spec import ConfigReader, ModelSpec, read_common

DEFAULTS = {"max_position_embeddings": 2048}


def read_spec(reader: ConfigReader) -> ModelSpec:
    """`attention_bias` covers q, k, v and the output projection."""
    reader = reader.with_defaults(DEFAULTS)
    attention_bias = reader.flag("attention_bias")
    return replace(
        read_common(reader),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=reader.flag("mlp_bias"),
    )


FAMILY = Family("LlamaForCausalLM", "llama", read_spec, decoder)
