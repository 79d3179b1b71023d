"""Which weights run as codes, and what their inputs are rounded to. Pure functions, as in `resolve`.

May import `config`, `checkpoint.quant_tensor` and `errors`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pagedcli.checkpoint.quant_tensor import Quantization
from pagedcli.config import ModelConfig
from pagedcli.errors import ConfigError

ACTIVATIONS = {"float32": "float32", "bfloat16": "bf16", "float16": "float16"}
"""Of the run's dtype, where nothing is quantized."""
NARROW_BITS = 4
"""Weights of so many bits, or fewer, are worth rounding activations to int8 for."""


@dataclass(frozen=True, slots=True)
class WeightsChoice:
    """How the linears' weights and inputs are represented.

    Attributes:
        as_codes: Whether quantized linears run as they are stored.
        quantization: "awq", "gptq", "compressed-tensors", "gguf"; None: nothing runs as codes.
        activation: Of the inputs of quantized linears: "int8", "bf16" or "float32"; else the dtype's own.
        notes: What a user might not expect.
    """

    as_codes: bool
    quantization: str | None
    activation: str
    notes: tuple[str, ...] = ()


def check_method(wanted: str | None, found: Quantization | None, path: Path) -> None:
    """`--quantization` against what is there.

    Raises:
        ConfigError: It is another.
    """
    if wanted is None or (found is not None and found.method == wanted):
        return
    there = "its weights are not quantized" if found is None else f"its weights are {found.detail}"
    raise ConfigError(
        f"model.quantization is {wanted}, and {path} is another: {there}: leave --quantization out"
    )


def choose_weights(
    config: ModelConfig,
    found: Quantization | None,
    *,
    dtype: str,
    backend: str,
    int8_dot: Callable[[], bool],
) -> WeightsChoice:
    """Resolve `model.activation`.

    Args:
        config: Settings.
        found: How the checkpoint is quantized.
        dtype: As resolved.
        backend: As resolved.
        int8_dot: Whether the kernels multiply int8 in one instruction here; asked only where it matters.

    Raises:
        ConfigError: What was asked for cannot be.
    """
    as_codes = found is not None and not (found.method == "gguf" and config.dtype != "auto")
    if found is None or not as_codes:
        return WeightsChoice(False, None, _dense_activation(config, dtype))
    if backend != "native":
        return WeightsChoice(True, found.method, _dense_activation(config, dtype), found.notes)
    activation: str = config.activation
    if activation == "auto":
        activation = ACTIVATIONS[dtype]
        if dtype != "float32" and min(bits for bits, _ in found.widths) <= NARROW_BITS and int8_dot():
            activation = "int8"
    return WeightsChoice(True, found.method, activation, found.notes)


def _dense_activation(config: ModelConfig, dtype: str) -> str:
    """Products with dense weights, or with torch, have inputs of the dtype."""
    own = ACTIVATIONS[dtype]
    if config.activation in ("auto", own):
        return own
    if config.activation == "int8":
        raise ConfigError(
            "model.activation is int8, which needs quantized weights run by the native CPU engine: leave it out"
        )
    wide = next(name for name, short in ACTIVATIONS.items() if short == config.activation)
    raise ConfigError(
        f"model.activation is {config.activation}, and these weights run in {dtype}, which activations follow: "
        f"--dtype {wide}"
    )
