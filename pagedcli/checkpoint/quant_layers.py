"""The quantized linears of a safetensors folder: found by their tensors, checked against the settings, unpacked.

Imports numpy and `errors`. Shapes alone tell width, group size and kind of a layer; settings must agree with them, and
are inferred where no file has any. Invariant: after `find_layers` every layer's arrays have the dtypes and shapes that
its format asks for, so that unpacking cannot fail but for group numbers and zero points, which are checked then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedcli.checkpoint import awq, compressed_tensors, gptq
from pagedcli.checkpoint.base import RawTensor
from pagedcli.checkpoint.bit_packing import words_for
from pagedcli.checkpoint.quant_settings import COMPRESSED_BITS, GPTQ_BITS, QuantSettings
from pagedcli.checkpoint.quant_tensor import QuantTensor
from pagedcli.errors import CheckpointError

CODES_LEAVES = {"qweight": "gptq", "weight_packed": "compressed-tensors"}
LEAVES = (
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
)
USUAL_GROUPS = (16, 32, 64, 128, 256, 512, 1024)
_FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class QuantLayer:
    """One quantized linear as its headers describe it.

    Attributes:
        name: Without ".weight".
        method: "awq", "gptq" or "compressed-tensors".
        shape: (out, in).
        bits: Width of a code.
        groups: Scales of a row.
        group_size: Resolved; 0 while it is not known.
        leaves: Its tensors, by the last part of their names.
    """

    name: str
    method: str
    shape: tuple[int, int]
    bits: int
    groups: int
    group_size: int
    leaves: tuple[str, ...]


def packed_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Linear -> the last parts of its tensors' names, for every linear that has codes."""
    found: dict[str, list[str]] = {}
    for name in names:
        linear, _, leaf = name.rpartition(".")
        if leaf in LEAVES:
            found.setdefault(linear, []).append(leaf)
    return {linear: sorted(leaves) for linear, leaves in found.items() if set(leaves) & set(CODES_LEAVES)}


class LayerFinder:
    """Reads headers into `QuantLayer`s.

    Args:
        path: The folder, for messages.
        tensor: One tensor by its name.
        settings: What files say; None: nothing.
    """

    def __init__(
        self, path: Path, tensor: Callable[[str], RawTensor], settings: QuantSettings | None
    ) -> None:
        self._path, self._tensor = path, tensor
        self._settings = settings or QuantSettings()

    def find(self, linear: str, leaves: list[str]) -> QuantLayer:
        """One layer, its group size as the settings say or as the shapes leave no choice."""
        read = self._compressed if "weight_packed" in leaves else self._gptq_or_awq
        layer = read(linear, leaves)
        self._check_method(layer)
        return self._with_group_size(layer)

    def _fail(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: tensor {name}: {what}")

    # ---- shapes

    def _header(
        self, linear: str, leaf: str, leaves: list[str], dtypes: tuple[str, ...], rank: int
    ) -> RawTensor:
        name = f"{linear}.{leaf}"
        if leaf not in leaves:
            raise self._fail(name, f"is missing beside {linear}.{leaves[-1]}: download the model again")
        tensor = self._tensor(name)
        if tensor.dtype not in dtypes:
            raise self._fail(
                name, f"is stored as {tensor.dtype}, a quantized layer has {' or '.join(dtypes)} here"
            )
        if len(tensor.shape) != rank or 0 in tensor.shape:
            raise self._fail(name, f"has shape {list(tensor.shape)}, a quantized layer has {rank} sizes here")
        return tensor

    def _gptq_or_awq(self, linear: str, leaves: list[str]) -> QuantLayer:
        qweight = self._header(linear, "qweight", leaves, ("I32",), 2).shape
        qzeros = self._header(linear, "qzeros", leaves, ("I32",), 2).shape
        scales = self._header(linear, "scales", leaves, _FLOATS, 2).shape
        groups, outputs = scales
        if qzeros[0] != groups:
            raise self._fail(f"{linear}.qzeros", f"has {qzeros[0]} groups, {linear}.scales has {groups}")
        if qweight[1] * awq.LANES == outputs and qzeros[1] * awq.LANES == outputs:
            return QuantLayer(linear, "awq", (outputs, qweight[0]), awq.BITS, groups, 0, tuple(leaves))
        if qweight[1] != outputs:
            raise self._fail(
                f"{linear}.qweight",
                f"has shape {list(qweight)}, which is neither AWQ gemm nor GPTQ for the {outputs} outputs of "
                f"{linear}.scales: other layouts (gemv, marlin) are not read",
            )
        bits = self._gptq_bits(linear, qzeros[1], outputs)
        inputs = qweight[0] * 32 // bits
        if words_for(inputs, bits) != qweight[0]:
            raise self._fail(
                f"{linear}.qweight", f"has {qweight[0]} rows of words, no whole number of {bits}-bit codes"
            )
        if "g_idx" in leaves:
            self._check_g_idx(f"{linear}.g_idx", inputs)
        return QuantLayer(linear, "gptq", (outputs, inputs), bits, groups, 0, tuple(leaves))

    def _gptq_bits(self, linear: str, words: int, outputs: int) -> int:
        said = self._settings.of_layer(linear).bits  # few outputs may leave a choice
        for bits in sorted(GPTQ_BITS, key=lambda bits: bits != said):
            if words_for(outputs, bits) == words:
                return bits
        raise self._fail(
            f"{linear}.qzeros",
            f"has {words} words for {outputs} outputs: that is none of {', '.join(map(str, GPTQ_BITS))} bits",
        )

    def _check_g_idx(self, name: str, inputs: int) -> None:
        tensor = self._tensor(name)
        if tensor.dtype not in ("I32", "I64"):
            raise self._fail(name, f"is stored as {tensor.dtype}, not I32")
        if tensor.shape not in ((inputs,), (0,)):
            raise self._fail(name, f"has shape {list(tensor.shape)}, not [{inputs}]")

    def _compressed(self, linear: str, leaves: list[str]) -> QuantLayer:
        packed = self._header(linear, "weight_packed", leaves, ("I32",), 2).shape
        scale = self._tensor(f"{linear}.weight_scale") if "weight_scale" in leaves else None
        if scale is None or scale.dtype not in _FLOATS:
            raise self._fail(
                f"{linear}.weight_scale", "is missing, or no float tensor: download the model again"
            )
        outputs, inputs = packed[0], self._stored_inputs(linear, leaves, packed)
        widths = [bits for bits in COMPRESSED_BITS if words_for(inputs, bits) == packed[1]]
        if not widths:
            raise self._fail(
                f"{linear}.weight_packed", f"has {packed[1]} words for {inputs} inputs: neither 4 nor 8 bits"
            )
        groups = 1 if scale.shape in ((), (1,)) else scale.shape[-1]
        if scale.shape not in ((), (1,), (outputs, groups)):
            raise self._fail(f"{linear}.weight_scale", f"has shape {list(scale.shape)} for {outputs} outputs")
        self._check_zero_points(linear, leaves, widths[0], outputs, groups)
        if "weight_g_idx" in leaves:
            self._check_g_idx(f"{linear}.weight_g_idx", inputs)
        return QuantLayer(
            linear, "compressed-tensors", (outputs, inputs), widths[0], groups, 0, tuple(leaves)
        )

    def _stored_inputs(self, linear: str, leaves: list[str], packed: tuple[int, ...]) -> int:
        name = f"{linear}.weight_shape"
        tensor = self._header(linear, "weight_shape", leaves, ("I64", "I32"), 1)
        shape = array_of(tensor).tolist()
        if len(shape) != 2 or shape[0] != packed[0] or not 1 <= shape[1] <= packed[1] * 8:
            raise self._fail(name, f"says {shape}, which does not fit {linear}.weight_packed {list(packed)}")
        return int(shape[1])

    def _check_zero_points(
        self, linear: str, leaves: list[str], bits: int, outputs: int, groups: int
    ) -> None:
        if "weight_zero_point" not in leaves:
            return
        tensor = self._tensor(f"{linear}.weight_zero_point")
        packed = (words_for(outputs, bits), groups)
        plain = ((outputs, groups), (1,), ())
        if not (
            (tensor.dtype == "I32" and tensor.shape == packed)
            or (tensor.dtype == "I8" and tensor.shape in plain)
        ):
            raise self._fail(
                f"{linear}.weight_zero_point",
                f"is {tensor.dtype} {list(tensor.shape)}, not I32 {list(packed)} or I8 {[outputs, groups]}",
            )

    # ---- settings

    def _check_method(self, layer: QuantLayer) -> None:
        """What the files say must be what is there."""
        settings = self._settings.of_layer(layer.name)
        if settings.method not in (None, layer.method):
            raise self._contradiction(
                "quant_method", settings.method, f"{layer.name} is stored as {layer.method}"
            )
        widths: set[int | None] = {bits for bits, _ in settings.choices} or {settings.bits}
        if widths != {None} and layer.bits not in widths:
            said: Any = settings.bits or sorted(x for x in widths if x)
            raise self._contradiction("bits", said, f"the tensors of {layer.name} hold {layer.bits} bits")

    def _contradiction(self, key: str, said: Any, found: str) -> CheckpointError:
        return CheckpointError(
            f"{self._settings.source}: {key} is {said!r}, but {found}: the file belongs to other weights; correct it, "
            "or remove it to have the settings read off the tensors"
        )

    def _with_group_size(self, layer: QuantLayer) -> QuantLayer:
        inputs, settings = layer.shape[1], self._settings.of_layer(layer.name)
        own: set[int | None] = {size for bits, size in settings.choices if bits == layer.bits}
        sizes = own or {settings.group_size}
        if sizes == {None}:
            return layer
        fitting = sorted(
            {inputs if size == -1 else min(size or 1, inputs) for size in sizes if size is not None}
        )
        fitting = [size for size in fitting if -(-inputs // size) == layer.groups]
        if not fitting:
            said: Any = settings.group_size or sorted(x for x in sizes if x)
            found = f"{layer.name} has {layer.groups} groups for {inputs} inputs"
            raise self._contradiction("group_size", said, found)
        return _replace_group(layer, fitting[0])


def _replace_group(layer: QuantLayer, size: int) -> QuantLayer:
    return QuantLayer(layer.name, layer.method, layer.shape, layer.bits, layer.groups, size, layer.leaves)


def settle_groups(path: Path, layers: Mapping[str, QuantLayer]) -> dict[str, QuantLayer]:
    """Group sizes of layers whose settings are missing: one usual size that fits them all, else exact shares.

    Raises:
        CheckpointError: The tensors leave it open.
    """
    open_ones = [layer for layer in layers.values() if layer.group_size == 0]
    common = [size for size in USUAL_GROUPS if all(_fits(layer, size) for layer in open_ones)]
    settled = dict(layers)
    for layer in open_ones:
        inputs = layer.shape[1]
        if common:
            size = min(common[0], inputs)
        elif inputs % layer.groups == 0:
            size = inputs // layer.groups
        else:
            raise CheckpointError(
                f"{path}: tensor {layer.name}.scales: {layer.groups} groups of {inputs} inputs leave the group size "
                "open, and no file says it: add quantize_config.json with group_size"
            )
        settled[layer.name] = _replace_group(layer, size)
    return settled


def _fits(layer: QuantLayer, size: int) -> bool:
    return -(-layer.shape[1] // min(size, layer.shape[1])) == layer.groups


def array_of(tensor: RawTensor) -> np.ndarray:
    """A stored tensor as a numpy array; BF16 becomes float32."""
    kinds = {"I32": "<i4", "I64": "<i8", "I8": "i1", "F16": "<f2", "F32": "<f4", "BF16": "<u2"}
    values = np.ascontiguousarray(tensor.data).view(kinds[tensor.dtype]).reshape(tensor.shape)
    if tensor.dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def unpack_layer(
    path: Path, layer: QuantLayer, tensor: Callable[[str], RawTensor], settings: QuantSettings, version: int
) -> QuantTensor:
    """Codes, scales and zero points of a layer.

    Raises:
        CheckpointError: Group numbers are out of range, or zero points and order are not what the settings say.
    """
    arrays = {leaf: array_of(tensor(f"{layer.name}.{leaf}")) for leaf in layer.leaves}
    for leaf in ("g_idx", "weight_g_idx"):
        if arrays.get(leaf, np.zeros(0)).size:
            _check_groups(path, f"{layer.name}.{leaf}", arrays[leaf], layer)
    found = _unpack(layer, arrays, version)
    own = settings.of_layer(layer.name)
    if layer.method == "gptq" and own.symmetric and np.any(found.zeros != 1 << (layer.bits - 1)):
        raise CheckpointError(
            f"{own.source}: sym is True, but {layer.name}.qzeros holds zero points other than "
            f"{1 << (layer.bits - 1)} (stored as version {version}): correct sym or checkpoint_format"
        )
    if layer.method == "gptq" and own.act_order is False and found.g_idx is not None:
        raise CheckpointError(
            f"{own.source}: desc_act is False, but the groups of {layer.name}.g_idx are not in order: correct desc_act"
        )
    return found


def _check_groups(path: Path, name: str, g_idx: np.ndarray, layer: QuantLayer) -> None:
    """Each group must have the inputs that its size gives it, whatever their order."""
    inputs = layer.shape[1]
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= layer.groups:
        raise CheckpointError(
            f"{path}: tensor {name}: holds group {int(g_idx.max() if g_idx.min() >= 0 else g_idx.min())}, there are "
            f"{layer.groups} groups: the file is corrupt: download it again"
        )
    wanted = np.bincount(np.arange(inputs) // layer.group_size, minlength=layer.groups)
    counts = np.bincount(g_idx, minlength=layer.groups)
    if not np.array_equal(wanted, counts):
        wrong = int(np.flatnonzero(wanted != counts)[0])
        raise CheckpointError(
            f"{path}: tensor {name}: group {wrong} has {counts[wrong]} inputs, not {wanted[wrong]} (group_size "
            f"{layer.group_size}): the file is corrupt or its group_size is another"
        )


def _unpack(layer: QuantLayer, arrays: dict[str, np.ndarray], version: int) -> QuantTensor:
    if layer.method == "awq":
        return awq.unpack(layer.name, arrays["qweight"], arrays["qzeros"], arrays["scales"], layer.group_size)
    if layer.method == "gptq":
        return gptq.unpack(
            layer.name,
            arrays,
            bits=layer.bits,
            group_size=layer.group_size,
            in_features=layer.shape[1],
            version=version,
        )
    return compressed_tensors.unpack(
        layer.name, arrays, bits=layer.bits, group_size=layer.group_size, shape=layer.shape
    )


def infer_version(path: Path, layers: Iterable[QuantLayer], tensor: Callable[[str], RawTensor]) -> int:
    """Which version of GPTQ stores zero points as these tensors do.

    Symmetric weights show it at once: the middle, or one less. Else by what every quantizer aims at: weights whose
    mean is near 0. Read as the wrong version, all of them are off by one whole step.

    Raises:
        CheckpointError: The tensors leave it open.
    """
    for layer in layers:
        found = unpack_layer(path, layer, tensor, QuantSettings(), version=2)
        assert found.zeros is not None
        middle = 1 << (layer.bits - 1)
        if np.all(found.zeros == middle):
            return 2
        if np.all(found.zeros == middle - 1):
            return 1
        steps = found.all_codes().astype(np.float32) - found.zeros[:, found.groups()]
        mean = float(steps.mean())
        if abs(mean) < 0.25:
            return 2
        if abs(mean - 1) < 0.25:
            return 1
    raise CheckpointError(
        f"{path}: no file says how zero points are stored, and the tensors leave it open: add quantize_config.json "
        'with checkpoint_format "gptq" or "gptq_v2"'
    )
