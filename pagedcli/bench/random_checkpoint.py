"""A checkpoint of random weights in memory: the shape of a model for timing, without its file. Numpy, `checkpoint`."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from pagedcli.checkpoint.base import RawTensor
from pagedcli.models.load import expected_tensors
from pagedcli.models.spec import ModelSpec

QWEN2_5_0_5B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_POOL = 1 << 20


class RandomCheckpoint:
    """What `load_model` needs of a checkpoint; the values of a tensor are drawn when it is asked for.

    Args:
        config: In Hugging Face terms.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.path = Path("random weights")
        self.config = config
        self._shapes = expected_tensors(ModelSpec.from_config(config))
        normal = np.random.default_rng(0).standard_normal(_POOL).astype(np.float32) * np.float32(0.02)
        self._pool = (normal.view(np.uint32) >> 16).astype(np.uint16)

    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return self._shapes[name]

    def quantized(self, linear: str) -> None:
        """Nothing is stored as codes."""

    def tensor(self, name: str) -> RawTensor:
        """Bfloat16 numbers of a normal distribution of 0.02; norms are ones."""
        shape = self._shapes[name]
        count = math.prod(shape)
        values = np.full(count, 0x3F80, np.uint16) if len(shape) == 1 else np.resize(self._pool, count)
        return RawTensor(name, "BF16", shape, values.view(np.uint8))
