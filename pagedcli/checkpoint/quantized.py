"""The quantized part of a safetensors folder: settings and layers brought together, and what is said of them.

Imports numpy and `errors`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pagedcli.checkpoint.base import RawTensor
from pagedcli.checkpoint.quant_layers import (
    LayerFinder,
    QuantLayer,
    infer_version,
    packed_names,
    settle_groups,
    unpack_layer,
)
from pagedcli.checkpoint.quant_settings import OWN_FILES, QuantSettings
from pagedcli.checkpoint.quant_tensor import Quantization, QuantTensor
from pagedcli.errors import CheckpointError


class QuantizedLinears:
    """The quantized linears of a folder.

    Args:
        path: The folder.
        names: All tensors of the files.
        tensor: One of them.
        settings: What files say; None: nothing does.

    Attributes:
        layers: By name, without ".weight".
        settings: As found or inferred.
        notes: What was inferred.
    """

    def __init__(
        self,
        path: Path,
        names: Iterable[str],
        tensor: Callable[[str], RawTensor],
        settings: QuantSettings | None,
    ) -> None:
        self._path, self._tensor = path, tensor
        packed = packed_names(names)
        if not packed:
            assert settings is not None
            raise CheckpointError(
                f"{settings.source}: says that the weights are quantized ({settings.method}), but no tensor holds "
                "codes: the file belongs to other weights; remove what it says, or download the weights again"
            )
        finder = LayerFinder(path, tensor, settings)
        found = {linear: finder.find(linear, leaves) for linear, leaves in packed.items()}
        self.layers = settle_groups(path, found)
        self.settings = settings or QuantSettings()
        self.method = self._one_method()
        self.version = self._version()
        self.notes = self._notes()

    def quantized(self, linear: str) -> QuantTensor | None:
        """Unpacked; None for a linear that has no codes."""
        layer = self.layers.get(linear)
        if layer is None:
            return None
        return unpack_layer(self._path, layer, self._tensor, self.settings, self.version)

    def describe(self) -> Quantization:
        """For whoever chooses and shows."""
        widths = Counter(layer.bits for layer in self.layers.values())
        return Quantization(
            method=self.method,
            widths=tuple(sorted(widths.items())),
            num_weights=sum(layer.shape[0] * layer.shape[1] for layer in self.layers.values()),
            num_bytes=sum(self._layer_bytes(layer) for layer in self.layers.values()),
            detail=self._detail(),
            notes=self.notes,
        )

    def settings_to_write(self) -> dict[str, Any] | None:
        """quantize_config.json for a folder without settings; None where a file has them or one cannot say it."""
        if self.settings.source is not None or self.method == "compressed-tensors":
            return None
        values = {
            "quant_method": self.method,
            "bits": self._common("bits"),
            "group_size": self._common_group(),
        }
        if self.method == "awq":
            return {**values, "zero_point": True, "version": "gemm"}
        order = any(self._in_order(layer) is False for layer in self.layers.values())
        symmetric = all(self._is_symmetric(name) for name in self.layers)
        layout = "gptq" if self.version == 1 else "gptq_v2"
        return {**values, "desc_act": order, "sym": symmetric, "checkpoint_format": layout}

    def _one_method(self) -> str:
        methods = {layer.method: layer.name for layer in self.layers.values()}
        if len(methods) > 1:
            (a, one), (b, other), *_ = methods.items()
            raise CheckpointError(
                f"{self._path}: {one} is stored as {a} and {other} as {b}: tensors of two models are mixed: "
                "download it again"
            )
        return next(iter(methods))

    def _version(self) -> int:
        if self.method != "gptq":
            return 0
        return self.settings.version or infer_version(self._path, self.layers.values(), self._tensor)

    def _notes(self) -> tuple[str, ...]:
        if self.settings.source is not None and self.settings.group_size is not None:
            return ()
        if self.method == "compressed-tensors" and self.settings.source is not None:
            return ()
        missing = (
            "no file says how the weights are quantized"
            if self.settings.source is None
            else (f"{self.settings.source.name} does not say all")
        )
        hint = f": paged doctor {self._path} writes {OWN_FILES[0]}" if self.settings.source is None else ""
        return (f"{missing}; read off the tensors: {self._detail()}{hint}",)

    def _detail(self) -> str:
        names = {"awq": "AWQ gemm", "gptq": f"GPTQ version {self.version}"}
        bits = _listed(sorted({layer.bits for layer in self.layers.values()}))
        groups = "whole rows" if self._common_group() == -1 else f"groups of {self._groups_text()}"
        return f"{names.get(self.method, self.method)}, {bits} bits, {groups}, {len(self.layers)} linears"

    def _groups_text(self) -> str:
        return _listed(sorted({layer.group_size for layer in self.layers.values()}))

    def _common(self, field: str) -> int:
        values = Counter(getattr(layer, field) for layer in self.layers.values())
        return int(values.most_common(1)[0][0])

    def _common_group(self) -> int:
        if all(layer.groups == 1 for layer in self.layers.values()):
            return -1
        return max(layer.group_size for layer in self.layers.values())

    def _in_order(self, layer: QuantLayer) -> bool | None:
        if "g_idx" not in layer.leaves:
            return None
        found = self.quantized(layer.name)
        return found is not None and found.g_idx is None

    def _is_symmetric(self, name: str) -> bool:
        found = self.quantized(name)
        assert found is not None
        return found.zeros is not None and bool((found.zeros == 1 << (found.bits - 1)).all())

    def _layer_bytes(self, layer: QuantLayer) -> int:
        return sum(self._tensor(f"{layer.name}.{leaf}").data.nbytes for leaf in layer.leaves)


def _listed(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))
