"""What a folder says of its quantization: config.json, quantize_config.json or quant_config.json, read into one form.

Imports numpy through `base`, and `errors`. Nothing here looks at tensors. What cannot be read is refused by name; files
that contradict each other are refused with file, key and both values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagedcli.checkpoint.base import read_json_object
from pagedcli.errors import CheckpointError

OWN_FILES = ("quantize_config.json", "quant_config.json")
SETTINGS_KEYS = ("quantization_config", "compression_config")
"""Keys of config.json that hold settings; the second is the older name."""
METHODS = ("awq", "gptq", "compressed-tensors")
GPTQ_BITS = (2, 3, 4, 8)
COMPRESSED_BITS = (4, 8)
_OLD_NAMES = {
    "w_bit": "bits",
    "q_group_size": "group_size",
    "format": "checkpoint_format",
    "method": "quant_method",
}
_COMPARED = (
    "quant_method",
    "bits",
    "group_size",
    "desc_act",
    "sym",
    "zero_point",
    "checkpoint_format",
    "version",
)
_LAYOUTS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
_VERSIONS = {"gptq": 1, "gptq_v2": 2}
# Keys that change what a layer computes; unset in what is read here.
_CHANGES_NUMBERS = ("adapter", "rotation")


@dataclass(frozen=True, slots=True)
class QuantSettings:
    """What files say; None where they do not say it.

    Attributes:
        method: "awq", "gptq" or "compressed-tensors"; None: the tensors tell awq from gptq.
        source: File that says it, for messages; None: no file does.
        bits: Width of a code.
        group_size: Input features that share a scale, -1 for all of them.
        symmetric: Whether every zero point is the middle.
        act_order: Whether the groups may be out of order.
        version: Of GPTQ, 1 or 2.
        choices: compressed-tensors: (bits, group size) of every group of layers that its file describes.
        overrides: GPTQModel's `dynamic`: settings by pattern of layer names.
    """

    method: str | None = None
    source: Path | None = None
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    act_order: bool | None = None
    version: int | None = None
    choices: tuple[tuple[int, int], ...] = ()
    overrides: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    def of_layer(self, name: str) -> QuantSettings:
        """With what `dynamic` says of one layer."""
        for pattern, own in self.overrides:
            if re.match(pattern, name):
                return replace(
                    self,
                    bits=own.get("bits", self.bits),
                    group_size=own.get("group_size", self.group_size),
                    symmetric=own.get("sym", self.symmetric),
                    act_order=own.get("desc_act", self.act_order),
                )
        return self


def read_settings(folder: Path, config: Mapping[str, Any]) -> QuantSettings | None:
    """The settings of a folder; None if no file has any.

    Raises:
        CheckpointError: A file cannot be read, is of a kind that is not supported, or contradicts another.
    """
    found = _all_settings(folder, config)
    if not found:
        return None
    merged: dict[str, Any] = {}
    for file, values in found:
        for key, value in values.items():
            if key in _COMPARED and key in merged and merged[key] != value:
                first = next(path for path, other in found if key in other)
                raise CheckpointError(
                    f"{file}: {key} is {value!r}, but {first.name} says {merged[key]!r}: correct the one that is "
                    "wrong, or remove it"
                )
            merged.setdefault(key, value)
    return _Reader(found[0][0], merged).settings()


def _all_settings(folder: Path, config: Mapping[str, Any]) -> list[tuple[Path, dict[str, Any]]]:
    """(file, settings) of every file that has some, config.json first."""
    found = []
    inside = next((config[key] for key in SETTINGS_KEYS if config.get(key) is not None), None)
    if inside is not None and not isinstance(inside, Mapping):
        raise CheckpointError(
            f"{folder / 'config.json'}: quantization_config is {str(inside)[:60]!r}, not an object"
        )
    if inside:
        found.append((folder / "config.json", _current_names(inside)))
    for name in OWN_FILES:
        if (folder / name).is_file():
            found.append((folder / name, _current_names(read_json_object(folder / name))))
    return found


def _current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Older names of keys replaced, and texts in lower case where readers do not care."""
    renamed = {key: value for key, value in values.items() if key not in _OLD_NAMES}
    if "config_groups" in values:
        return dict(values)
    for old, name in _OLD_NAMES.items():
        if values.get(old) is not None:
            renamed.setdefault(name, values[old])
    for key in ("version", "quant_method", "checkpoint_format"):
        if isinstance(renamed.get(key), str):
            renamed[key] = renamed[key].lower()
    return {key: value for key, value in renamed.items() if value is not None}


@dataclass(frozen=True, slots=True)
class _Reader:
    """Merged settings, and the file that messages name."""

    source: Path
    values: Mapping[str, Any]

    def settings(self) -> QuantSettings:
        method = self.values.get("quant_method")
        if method is None and "config_groups" in self.values:
            method = "compressed-tensors"
        if method is not None and method not in METHODS:
            raise self.unsupported("quant_method", method, "AWQ, GPTQ and compressed-tensors")
        if method == "compressed-tensors":
            return self._compressed()
        if "bits" in self.values:
            self._check_bits(method)
        self._check_layout(method)
        return QuantSettings(
            method=method,
            source=self.source,
            bits=self.values.get("bits"),
            group_size=self._group_size(self.values.get("group_size")),
            symmetric=self._symmetric(),
            act_order=self._flag("desc_act"),
            version=self._version(method),
            overrides=self._overrides(),
        )

    def unsupported(self, key: str, value: Any, known: str) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: {key} is {_shown(value)}, which is not supported ({known} are read): use the model's "
            "unquantized folder, a GGUF file, or another quantization of it"
        )

    def _check_bits(self, method: str | None) -> None:
        bits, known = self.values["bits"], (4,) if method == "awq" else GPTQ_BITS
        if type(bits) is not int or bits not in known:
            raise self.unsupported("bits", bits, ", ".join(map(str, known)) + f" bits of {method or 'GPTQ'}")

    def _check_layout(self, method: str | None) -> None:
        version = self.values.get("version")
        if method != "gptq" and version not in (None, "gemm"):
            raise self.unsupported("version", version, "AWQ files of version gemm")
        if self.values.get("is_marlin_format"):
            raise self.unsupported("is_marlin_format", True, "the formats gptq and gptq_v2")
        layout = self.values.get("checkpoint_format")
        known = (
            ("gptq", "gptq_v2")
            if method == "gptq"
            else ("gemm",)
            if method == "awq"
            else ("gptq", "gptq_v2", "gemm")
        )
        if layout is not None and layout not in known:
            raise self.unsupported("checkpoint_format", layout, "the formats " + " and ".join(known))
        if self.values.get("pack_dtype", "int32") != "int32":
            raise self.unsupported("pack_dtype", self.values["pack_dtype"], "words of int32")
        for key in _CHANGES_NUMBERS:
            if self.values.get(key):
                raise self.unsupported(key, self.values[key], "checkpoints without it")

    def _version(self, method: str | None) -> int | None:
        """AutoGPTQ, which knows one version only, does not name it."""
        layout = self.values.get("checkpoint_format")
        return _VERSIONS.get(str(layout), 1 if method == "gptq" and layout is None else None)

    def _group_size(self, value: Any) -> int | None:
        if value is None or (type(value) is int and (value == -1 or value >= 1)):
            return value
        raise CheckpointError(
            f"{self.source}: group_size is {_shown(value)}: it must be -1 or a positive integer"
        )

    def _flag(self, key: str) -> bool | None:
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise CheckpointError(f"{self.source}: {key} is {_shown(value)}: it must be true or false")

    def _symmetric(self) -> bool | None:
        """AWQ's `zero_point` is the reverse; but its files have zero points in either case, and readers use them."""
        self._flag("zero_point")
        return self._flag("sym")

    def _overrides(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """Patterns that begin with "-:" leave layers unquantized, which their tensors show."""
        dynamic = self.values.get("dynamic") or {}
        if not isinstance(dynamic, Mapping) or not all(isinstance(own, Mapping) for own in dynamic.values()):
            raise CheckpointError(
                f"{self.source}: dynamic is {_shown(dynamic)}: it must map patterns to settings"
            )
        found = []
        for pattern, own in dynamic.items():
            if pattern.startswith("-:"):
                continue
            text = pattern.removeprefix("+:")
            try:
                re.compile(text)
            except re.error as error:
                raise CheckpointError(f"{self.source}: dynamic: {text!r} is no pattern ({error})") from error
            found.append((text, _Reader(self.source, _current_names(own)).checked_override()))
        return tuple(found)

    def checked_override(self) -> Mapping[str, Any]:
        if "bits" in self.values:
            self._check_bits("gptq")
        self._group_size(self.values.get("group_size"))
        self._flag("sym")
        self._flag("desc_act")
        return self.values

    def _compressed(self) -> QuantSettings:
        layout = self.values.get("format")
        if layout not in (None, "pack-quantized", "mixed-precision"):
            raise self.unsupported("format", layout, "compressed-tensors of format pack-quantized")
        groups = self.values.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise CheckpointError(
                f"{self.source}: config_groups is {_shown(groups)}: it must say how layers are stored"
            )
        for key in ("kv_cache_scheme", "transform_config"):
            if self.values.get(key):
                raise self.unsupported(
                    key, self.values[key], "compressed-tensors with quantized weights alone"
                )
        sparsity = self.values.get("sparsity_config") or {}
        if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
            raise self.unsupported("sparsity_config", sparsity, "dense compressed-tensors")
        choices = tuple(self._scheme(f"config_groups.{name}", group) for name, group in groups.items())
        return QuantSettings("compressed-tensors", self.source, choices=choices)

    def _scheme(self, key: str, group: Any) -> tuple[int, int]:
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise CheckpointError(f"{self.source}: {key}.weights is {_shown(weights)}, not an object")
        if group.get("format") not in (None, "pack-quantized"):
            raise self.unsupported(
                f"{key}.format", group["format"], "compressed-tensors of format pack-quantized"
            )
        if group.get("input_activations") or group.get("output_activations"):
            raise self.unsupported(
                f"{key}.input_activations", "set", "compressed-tensors with quantized weights alone"
            )
        if weights.get("type", "int") != "int":
            raise self.unsupported(f"{key}.weights.type", weights["type"], "whole numbers (int)")
        bits, strategy = weights.get("num_bits"), weights.get("strategy") or "group"
        if type(bits) is not int or bits not in COMPRESSED_BITS:
            raise self.unsupported(f"{key}.weights.num_bits", bits, "4 and 8 bits")
        if strategy not in ("group", "channel", "tensor"):
            raise self.unsupported(f"{key}.weights.strategy", strategy, "group, channel and tensor")
        size = self._group_size(weights.get("group_size")) if strategy == "group" else -1
        return bits, -1 if size is None else size


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
