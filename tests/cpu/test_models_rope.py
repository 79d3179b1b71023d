"""Rotary frequencies and tables against transformers' own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagedcli.models.rope import RopeSpec, inverse_frequencies, read_rope, rope_tables

YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-without-original": {"rope_type": "yarn", "factor": 2.0},
    "yarn-mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
    "yarn-whole": {**YARN, "truncate": False, "beta_fast": 24, "beta_slow": 3},
}


def llama(head_dim: int, theta: float, **settings: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=32_768,
        rope_parameters={"rope_theta": theta, **settings},
    )


def read(config: LlamaConfig) -> RopeSpec:
    return read_rope(config.to_dict(), config.max_position_embeddings, "config.json")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10_000.0), (96, 130_000.0), (128, 500_000.0)])
def test_frequencies_are_those_of_transformers(kind: str, head_dim: int, theta: float) -> None:
    config = llama(head_dim, theta, **KINDS[kind])
    expected, attention_factor = ROPE_INIT_FUNCTIONS[KINDS[kind]["rope_type"]](config)
    spec = read(config)
    np.testing.assert_allclose(inverse_frequencies(spec, head_dim), expected.numpy(), rtol=3e-7)
    assert spec.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10_000.0), (80, 1e6), (128, 500_000.0), (256, 1e7)])
def test_plain_frequencies_differ_in_the_last_digit_at_most(head_dim: int, theta: float) -> None:
    config = llama(head_dim, theta, rope_type="default")
    expected = LlamaRotaryEmbedding(config).inv_freq.numpy()
    mine = inverse_frequencies(read(config), head_dim)
    assert (mine == expected).mean() > 0.95
    np.testing.assert_array_max_ulp(mine, expected, maxulp=1)


def test_tables_are_those_of_transformers() -> None:
    config = llama(64, 10_000.0, **YARN)
    positions = torch.arange(2048)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    mine = rope_tables(read(config), 64, 2048)
    np.testing.assert_allclose(mine[0], cos[0, :, :32].numpy(), atol=2e-4)
    np.testing.assert_allclose(mine[1], sin[0, :, :32].numpy(), atol=2e-4)
    assert mine[0].dtype == np.float32
