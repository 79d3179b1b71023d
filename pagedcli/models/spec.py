"""`ModelSpec`: what a `config.json` says, read and checked once. Imports nothing of a backend.

Families fill in what they differ in (their own files); what they share is read here. A key that changes the numbers
and is not understood is an error, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedcli.errors import CheckpointError
from pagedcli.models.rope import RopeSpec, is_number, is_whole, read_rope, shown
from pagedcli.ops.protocol import Activation

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Layers are made one by one before their weights are looked for.
MAX_LAYERS = 4096
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder of the Llama kind.

    Attributes:
        architecture: As in the config, such as "LlamaForCausalLM".
        dtype: Of the stored weights: "float32", "bfloat16" or "float16".
        vocab_size: Rows of the embedding and of the head.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the gated MLP.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key-value heads, a divisor of num_heads.
        head_dim: Even; num_heads * head_dim need not be hidden_size.
        max_position: Longest sequence that the model was made for.
        norm_eps: Of every RMS norm.
        activation: Of the MLP's gate.
        rope: Rotary settings.
        windows: Sliding window of each layer in tokens, None for full attention.
        tied_head: Whether the head is the embedding.
        qkv_bias: Whether q, k and v have biases.
        output_bias: Whether attention's output projection has one.
        mlp_bias: Whether gate, up and down have them.
        head_norms: Whether single heads of q and k are normed (Qwen3).
    """

    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    activation: Activation
    rope: RopeSpec
    windows: tuple[int | None, ...]
    tied_head: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str = "config.json") -> ModelSpec:
        """Read a Hugging Face config; `source` names it in errors.

        Raises:
            CheckpointError: Unknown architecture, or a key that is missing or cannot be served.
        """
        from pagedcli.models.registry import find_family  # the registry's families import this module

        family = find_family(config, source)
        named = {**config, "architectures": [family.architecture]}  # may have been found by its model_type
        return family.read_spec(ConfigReader(named, source))

    @property
    def q_size(self) -> int:
        """Features of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Features of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    def kv_elements_per_token(self) -> int:
        """Numbers that one token keeps in the KV cache, all layers; times the bytes of the run's dtype."""
        return 2 * self.num_layers * self.kv_size


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Typed access to a config, with errors that name the file, the key and the value."""

    config: Mapping[str, Any]
    source: str

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigReader:
        """The same config over transformers' defaults for its family."""
        return ConfigReader({**defaults, **self.config}, self.source)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; a missing key or null gives `default`, or is an error without one."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise CheckpointError(f"{self.source}: {key} is missing")
        if not is_whole(value):
            raise CheckpointError(f"{self.source}: {key} is {shown(value)}: it must be a positive integer")
        return int(value)

    def number(self, key: str, default: float) -> float:
        """A number from 0; null is an error."""
        value = self.config.get(key, default)
        if not is_number(value) or value < 0:
            raise CheckpointError(f"{self.source}: {key} is {shown(value)}: it must be a number from 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; null gives the default."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.source}: {key} is {shown(value)}: it must be true or false")
        return value


def read_common(reader: ConfigReader) -> ModelSpec:
    """What all families read the same way: sizes, norm, activation, rope, head; full attention, no biases."""
    num_heads = reader.integer("num_attention_heads")
    hidden_size = reader.integer("hidden_size")
    max_position = reader.integer("max_position_embeddings")
    num_layers = reader.integer("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise CheckpointError(
            f"{reader.source}: num_hidden_layers is {num_layers}: it can be at most {MAX_LAYERS}"
        )
    spec = ModelSpec(
        architecture=reader.config["architectures"][0],
        dtype=_stored_dtype(reader),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=reader.integer("num_key_value_heads", num_heads),
        head_dim=reader.integer("head_dim", max(1, hidden_size // num_heads)),
        max_position=max_position,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        activation=_activation(reader),
        rope=read_rope(reader.config, max_position, reader.source),
        windows=(None,) * num_layers,
        tied_head=reader.flag("tie_word_embeddings"),
    )
    _check(spec, reader.source)
    return spec


def read_layer_windows(reader: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Windows of the Qwen families: `use_sliding_window`, `max_window_layers` and, over them, `layer_types`."""
    window = reader.integer("sliding_window") if _uses_window(reader) else None
    first = _first_windowed(reader)
    types = reader.config.get("layer_types")
    if types is None:
        return tuple(window if index >= first else None for index in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers:
        raise CheckpointError(f"{reader.source}: layer_types must list {num_layers} layers, one type each")
    return tuple(_layer_window(reader, str(kind), window) for kind in types)


def _first_windowed(reader: ConfigReader) -> int:
    value = reader.config.get("max_window_layers", 0)
    if value is None:
        return 0
    if value != 0 and not is_whole(value):
        raise CheckpointError(
            f"{reader.source}: max_window_layers is {shown(value)}: it must be a whole number from 0"
        )
    return int(value)


def _uses_window(reader: ConfigReader) -> bool:
    return reader.flag("use_sliding_window") and reader.config.get("sliding_window") is not None


def _layer_window(reader: ConfigReader, kind: str, window: int | None) -> int | None:
    if kind == "full_attention":
        return None
    if kind != "sliding_attention":
        raise CheckpointError(
            f"{reader.source}: layer type {kind!r} is not known; known: full_attention, sliding_attention"
        )
    if window is None:
        raise CheckpointError(
            f"{reader.source}: layer_types names sliding_attention, but use_sliding_window and sliding_window do not "
            "give a window"
        )
    return window


def _stored_dtype(reader: ConfigReader) -> str:
    value = reader.config.get("dtype") or reader.config.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"{reader.source}: dtype is {name!r}: known are {', '.join(DTYPES)}")
    return name


def _activation(reader: ConfigReader) -> Activation:
    name = str(reader.config.get("hidden_act", "silu"))
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"{reader.source}: hidden_act {name!r} is not known; known: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _check(spec: ModelSpec, source: str) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"{source}: num_attention_heads {spec.num_heads} is not a multiple of num_key_value_heads "
            f"{spec.num_kv_heads}"
        )
    if spec.head_dim % 2:
        raise CheckpointError(f"{source}: head_dim {spec.head_dim} is odd, so that heads cannot be rotated")
