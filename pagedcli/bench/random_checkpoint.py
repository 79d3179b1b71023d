"""A checkpoint of random weights in memory: the shape of a model for timing, without its file. Numpy, `checkpoint`."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True, slots=True)
class RandomCodes:
    """A linear of random 4-bit codes: what ops need of a quantized part (`ops.weights.QuantizedPart`)."""

    name: str
    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8]
    group_size: int
    bits: int = 4
    offsets: None = None
    g_idx: None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> NDArray[np.float32]:
        """[out, in]."""
        group = np.arange(self.shape[1]) // self.group_size
        values: NDArray[np.float32] = (self.codes - self.zeros[:, group].astype(np.float32)) * self.scales[
            :, group
        ]
        return values

    def rows(self, first: int, last: int) -> RandomCodes:
        """Some outputs."""
        part = slice(first, last)
        return replace(self, codes=self.codes[part], scales=self.scales[part], zeros=self.zeros[part])


class RandomCheckpoint:
    """What `load_model` needs of a checkpoint; the values of a tensor are drawn when it is asked for.

    Args:
        config: In Hugging Face terms.
        group_size: Of 4-bit codes, which all linears but the head are then; None: all are bfloat16.
    """

    def __init__(self, config: dict[str, Any], group_size: int | None = None) -> None:
        self.path = Path("random weights")
        self.config = config
        self._group_size = group_size
        self._shapes = expected_tensors(ModelSpec.from_config(config))
        normal = np.random.default_rng(0).standard_normal(_POOL).astype(np.float32) * np.float32(0.02)
        self._pool = (normal.view(np.uint32) >> 16).astype(np.uint16)
        self._codes = (self._pool & 15).astype(np.uint8)

    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return self._shapes[name]

    def quantized(self, linear: str) -> RandomCodes | None:
        """Codes of about the values that `tensor` draws; None for the head, or if there are none."""
        shape = self._shapes[f"{linear}.weight"]
        if self._group_size is None or linear == "lm_head":
            return None
        outputs, inputs = shape
        codes = np.resize(self._codes, outputs * inputs).reshape(outputs, inputs)
        groups = (outputs, inputs // self._group_size)
        return RandomCodes(
            linear,
            codes,
            np.full(groups, 2.0**-8, np.float32),
            np.full(groups, 8, np.uint8),
            self._group_size,
        )

    def tensor(self, name: str) -> RawTensor:
        """Bfloat16 numbers of a normal distribution of 0.02; norms are ones."""
        shape = self._shapes[name]
        count = math.prod(shape)
        values = np.full(count, 0x3F80, np.uint16) if len(shape) == 1 else np.resize(self._pool, count)
        return RawTensor(name, "BF16", shape, values.view(np.uint8))
