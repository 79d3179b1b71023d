"""Rotary positions: reading a config's rope settings, and the frequencies and tables that follow. numpy only.

Frequencies are computed in float32 step by step as transformers does, because a position of 100,000 multiplies any
difference. Kinds whose frequencies depend on the length of the sequence are refused: keys already in the cache would
have been written under other frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pagedcli.errors import CheckpointError

RopeKind = Literal["default", "linear", "llama3", "yarn"]
Floats = npt.NDArray[np.float32]

DEFAULT_THETA = 10_000.0
# No real model comes near; beyond, float32 tables would not be finite.
MOST_NUMBER = 1e15
MOST_INTEGER = 2**31 - 1
KNOWN_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rope settings in transformers' terms; what a kind does not use keeps its default.

    Attributes:
        kind: default, linear, llama3 or yarn.
        theta: Base of the frequencies.
        factor: How far the context was stretched.
        original_max_position: Longest sequence before stretching (llama3, yarn).
        low_freq_factor: llama3.
        high_freq_factor: llama3.
        beta_fast: yarn.
        beta_slow: yarn.
        truncate: yarn, whole numbers for the corrected range.
        attention_factor: Multiplies cosines and sines (yarn).
    """

    kind: RopeKind = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def read_rope(config: Mapping[str, Any], max_position: int, source: str) -> RopeSpec:
    """Rope settings of a config, `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (before).

    Raises:
        CheckpointError: A kind that cannot be served, or a setting that is missing.
    """
    settings = _rope_settings(config, source)
    kind = str(settings.get("rope_type") or settings.get("type") or "default")
    _refuse_unknown(kind, settings, config, source)
    theta = settings.get("rope_theta", config.get("rope_theta"))
    reader = _Reader(settings, kind, source)
    base = RopeSpec(theta=_read_theta(theta, source))
    if kind == "linear":
        return RopeSpec("linear", base.theta, factor=reader.number("factor"))
    original = _original_positions(config, settings, source) or max_position
    if kind == "llama3":
        return _read_llama3(reader, base.theta, original)
    if kind == "yarn":
        return _read_yarn(reader, base.theta, original, max_position)
    return base


def is_number(value: object) -> bool:
    """Whether a config's value is a number that float32 arithmetic can take."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST_NUMBER


def is_whole(value: object) -> bool:
    """Whether a config's value can be a size."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_INTEGER


def shown(value: object) -> str:
    """A config's value for a message: whatever it is, a few words of it."""
    if isinstance(value, int) and abs(value) > MOST_NUMBER:
        return "a number of very many digits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _original_positions(config: Mapping[str, Any], settings: Mapping[str, Any], source: str) -> int | None:
    key = "original_max_position_embeddings"
    value = config.get(key) or settings.get(key)
    if value is None or value == 0:
        return None
    if not is_whole(value):
        raise CheckpointError(f"{source}: {key} is {shown(value)}: it must be a positive integer")
    return int(value)


def _read_theta(theta: Any, source: str) -> float:
    if theta is None:
        return DEFAULT_THETA
    if not is_number(theta) or theta <= 1:
        raise CheckpointError(
            f"{source}: rope_theta is {shown(theta)}: it must be a number above 1, at most {MOST_NUMBER:g}"
        )
    return float(theta)


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Floats:
    """[head_dim / 2] float32, as transformers computes them."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power in float64, then rounded: numpy's own float32 power is a last digit off in one of five.
    powers = np.power(spec.theta, exponent.astype(np.float64)).astype(np.float32)
    plain: Floats = np.float32(1.0) / powers
    if spec.kind == "linear":
        return (plain / np.float32(spec.factor)).astype(np.float32)
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        return _yarn(spec, head_dim, powers)
    return plain


def rope_tables(spec: RopeSpec, head_dim: int, num_positions: int) -> tuple[Floats, Floats]:
    """Cosines and sines, [num_positions, head_dim / 2] float32 each, times the attention factor.

    The angle is rounded to float32 as transformers rounds it; its cosine is then taken in float64.
    """
    positions = np.arange(num_positions, dtype=np.float32)
    angles = np.outer(positions, inverse_frequencies(spec, head_dim)).astype(np.float64)
    factor = spec.attention_factor
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def _rope_settings(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    settings = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{source}: rope_scaling is {shown(settings)}: it must be an object or null")
    nested = [key for key, value in settings.items() if isinstance(value, Mapping)]
    if nested:
        raise CheckpointError(
            f"{source}: rope_parameters differ by layer type ({', '.join(nested)}), which no known family uses"
        )
    return settings


def _refuse_unknown(kind: str, settings: Mapping[str, Any], config: Mapping[str, Any], source: str) -> None:
    if kind == "dynamic":
        raise CheckpointError(
            f"{source}: rope scaling 'dynamic' is not served: its keys depend on how long the sequence was when they "
            "were written to the cache; set rope_scaling to null (short contexts) or to yarn"
        )
    if kind not in KNOWN_KINDS:
        raise CheckpointError(
            f"{source}: rope scaling {kind!r} is not known; known: {', '.join(KNOWN_KINDS)}"
        )
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is not None and partial != 1.0:
        raise CheckpointError(
            f"{source}: partial_rotary_factor {shown(partial)} is not served; only whole heads are rotated"
        )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Numbers of one rope object, with errors that name it."""

    settings: Mapping[str, Any]
    kind: str
    source: str

    def number(self, key: str) -> float:
        value = self.optional(key)
        if value is None:
            raise CheckpointError(f"{self.source}: rope scaling {self.kind!r} needs {key}, which is missing")
        if value == 0.0:
            raise CheckpointError(f"{self.source}: rope setting {key} is 0: it must be above 0")
        return value

    def optional(self, key: str) -> float | None:
        value = self.settings.get(key)
        if value is None:
            return None
        if not is_number(value) or value < 0:
            raise CheckpointError(
                f"{self.source}: rope setting {key} is {shown(value)}: it must be a number from 0 to {MOST_NUMBER:g}"
            )
        return float(value)


def _read_llama3(reader: _Reader, theta: float, original: int) -> RopeSpec:
    low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
    if low >= high:
        raise CheckpointError(
            f"{reader.source}: low_freq_factor {low:g} must be below high_freq_factor {high:g}"
        )
    return RopeSpec(
        "llama3",
        theta,
        factor=reader.number("factor"),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _read_yarn(reader: _Reader, theta: float, original: int, max_position: int) -> RopeSpec:
    factor = reader.optional("factor")
    factor = factor or max_position / original
    attention = reader.optional("attention_factor")
    if attention is None:
        mscale, mscale_all = reader.optional("mscale"), reader.optional("mscale_all_dim")
        attention = _yarn_mscale(factor, 1.0)
        if mscale and mscale_all:
            attention = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all)
    return RopeSpec(
        "yarn",
        theta,
        factor=factor,
        original_max_position=original,
        beta_fast=reader.optional("beta_fast") or 32.0,
        beta_slow=reader.optional("beta_slow") or 1.0,
        truncate=bool(reader.settings.get("truncate", True)),
        attention_factor=attention,
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(spec: RopeSpec, plain: Floats) -> Floats:
    """Long waves are stretched by the factor, short ones kept, those between blended.

    Divisions of a number by an array are products with the reciprocal, as in torch.
    """
    one, original = np.float32(1.0), spec.original_max_position
    low, high, factor = (
        np.float32(spec.low_freq_factor),
        np.float32(spec.high_freq_factor),
        np.float32(spec.factor),
    )
    wavelength = one / plain * np.float32(2 * math.pi)
    stretched = np.where(wavelength > original / low, plain / factor, plain)
    smooth = (one / wavelength * np.float32(original) - low) / (high - low)
    blended = (one - smooth) * stretched / factor + smooth * stretched
    medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return np.where(medium, blended, stretched).astype(np.float32)


def _yarn(spec: RopeSpec, head_dim: int, powers: Floats) -> Floats:
    """A ramp over the dimensions, from the plain frequencies to the stretched ones."""
    low, high = _yarn_range(spec, head_dim)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    plain_share = 1 - np.clip(ramp, 0, 1)
    stretched = np.float32(1.0) / (np.float32(spec.factor) * powers)
    blended: Floats = stretched * (1 - plain_share) + (np.float32(1.0) / powers) * plain_share
    return blended


def _yarn_range(spec: RopeSpec, head_dim: int) -> tuple[float, float]:
    def dimension(rotations: float) -> float:
        ratio = spec.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high
