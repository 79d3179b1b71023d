"""A Hugging Face folder: config.json, safetensors in one file or in shards, and the tokenizer's files.

Imports numpy, `text` and `errors`. What cannot be used (pickles, adapters) is refused by name, with the way out.
Quantized linears appear under the names and shapes of their dense weights, so that only who wants codes need know.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pagedcli.checkpoint.base import FLOAT_DTYPES, RawTensor, StoredTensor, read_json_object
from pagedcli.checkpoint.computed import ComputedTensor
from pagedcli.checkpoint.quant_layers import LEAVES, packed_names
from pagedcli.checkpoint.quant_settings import SETTINGS_KEYS, read_settings
from pagedcli.checkpoint.quant_tensor import Quantization, QuantTensor
from pagedcli.checkpoint.quantized import QuantizedLinears
from pagedcli.checkpoint.refusals import refuse_adapter, refuse_without_weights
from pagedcli.checkpoint.safetensors_file import SafetensorsFile
from pagedcli.errors import CheckpointError

if TYPE_CHECKING:
    from pagedcli.text.tokenizer import Tokenizer

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """A model folder with safetensors weights; see `Checkpoint`.

    Args:
        path: The folder. All headers are read and checked at once.
    """

    format: Literal["safetensors"] = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_adapter(path)
        self.config = read_config(path)
        settings = read_settings(path, self.config)
        for key in SETTINGS_KEYS:
            self.config.pop(key, None)  # from here on `quantization` says it
        self._files = open_weights(path)
        self.quantized_linears: QuantizedLinears | None = None
        if settings is not None or packed_names(self._files):
            self.quantized_linears = QuantizedLinears(path, self._files, self._stored, settings)
        self._names = self._dense_names()
        self.generation_config = self._generation_config()
        self._settle_dtype()

    @property
    def quantization(self) -> Quantization | None:
        """How linears are quantized; None: none is."""
        return None if self.quantized_linears is None else self.quantized_linears.describe()

    def names(self) -> Collection[str]:
        """Names of all tensors, those of quantized linears as if they were dense."""
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        return self._layer_of(name) or self._file(name).shape(name)

    def tensor(self, name: str) -> StoredTensor:
        """One tensor: a view of its file, or dequantized to float32 when it is read."""
        shape = self._layer_of(name)
        return self._stored(name) if shape is None else self._dequantized(name, shape)

    def quantized(self, linear: str) -> QuantTensor | None:
        """The codes of a linear; None if it is dense."""
        return None if self.quantized_linears is None else self.quantized_linears.quantized(linear)

    def stored_bytes(self) -> int:
        """Bytes that the tensors take in the files."""
        return sum(file.num_bytes(name) for name, file in self._files.items())

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder."""
        from pagedcli.text.tokenizer import Tokenizer  # costs an import that reading weights does not need

        return Tokenizer.from_folder(self.path)

    def _dense_names(self) -> dict[str, None]:
        """Names with "X.weight" in place of X.qweight and its companions."""
        if self.quantized_linears is None:
            return dict.fromkeys(self._files)
        layers = self.quantized_linears.layers
        for linear in layers:
            if f"{linear}.weight" in self._files:
                raise CheckpointError(
                    f"{self.path}: tensor {linear}.weight: is there beside {linear}'s codes: two models are mixed"
                )
        names = (
            f"{name.rpartition('.')[0]}.weight" if self._is_packed(name) else name for name in self._files
        )
        return dict.fromkeys(names)

    def _is_packed(self, name: str) -> bool:
        linear, _, leaf = name.rpartition(".")
        return (
            leaf in LEAVES and self.quantized_linears is not None and linear in self.quantized_linears.layers
        )

    def _layer_of(self, name: str) -> tuple[int, int] | None:
        """Shape of a quantized linear, by the name of its dense weight."""
        if self.quantized_linears is None or not name.endswith(".weight"):
            return None
        layer = self.quantized_linears.layers.get(name.removesuffix(".weight"))
        return None if layer is None else layer.shape

    def _stored(self, name: str) -> RawTensor:
        return self._file(name).tensor(name)

    def _dequantized(self, name: str, shape: tuple[int, int]) -> StoredTensor:
        found: list[QuantTensor] = []  # unpacked once, however many pieces are asked for

        def read(rows: slice) -> np.ndarray:
            if not found:
                tensor = self.quantized(name.removesuffix(".weight"))
                assert tensor is not None
                found.append(tensor)
            first, last, _ = rows.indices(shape[0])
            return found[0].rows(first, last).dequantize()

        return ComputedTensor(name, "F32", shape, read, np.zeros(0, np.uint8))

    def _file(self, name: str) -> SafetensorsFile:
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(
                f"{self.path}: has no tensor {name}: the weights do not belong to this config.json, or a file "
                "is missing: download the model again"
            )
        return file

    def _generation_config(self) -> dict[str, Any]:
        file = self.path / "generation_config.json"
        found = read_json_object(file) if file.is_file() else {}
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if found.get(key) is None and self.config.get(key) is not None:
                found[key] = self.config[key]
        return found

    def _settle_dtype(self) -> None:
        """`torch_dtype` says what most weights are stored as; what config.json says is often something else."""
        self.config.pop("dtype", None)  # the same under its newer name
        sizes: dict[str, int] = {}
        for name, file in self._files.items():
            kind = FLOAT_DTYPES.get(file.dtype(name))
            if kind is not None and not self._is_packed(name):
                sizes[kind] = sizes.get(kind, 0) + file.num_bytes(name)
        if sizes:
            self.config["torch_dtype"] = max(sizes, key=lambda kind: sizes[kind])


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; CheckpointError when there is none."""
    file = folder / "config.json"
    if not file.is_file():
        refuse_without_weights(folder)
        raise CheckpointError(f"{folder}: has no config.json: it is not a complete Hugging Face model folder")
    return read_json_object(file)


def open_weights(folder: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> the open file that holds it."""
    if (folder / SINGLE).is_file():
        return _names_of(SafetensorsFile(folder / SINGLE))
    if (folder / INDEX).is_file():
        return _open_shards(folder)
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return _names_of(SafetensorsFile(others[0]))
    if others:
        raise CheckpointError(
            f"{folder}: has {len(others)} safetensors files but no {INDEX} that says which tensor is where: "
            "download that file too"
        )
    refuse_without_weights(folder)
    raise CheckpointError(f"{folder}: holds no weights ({SINGLE} or {INDEX}): download the whole model")


def _names_of(file: SafetensorsFile) -> dict[str, SafetensorsFile]:
    return dict.fromkeys(file.names(), file)


def _open_shards(folder: Path) -> dict[str, SafetensorsFile]:
    index = folder / INDEX
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map: download it again")
    shards: dict[str, SafetensorsFile] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(f"{index}: tensor {name} is in {file_name!r}, which is not a file name")
        if file_name not in shards:
            if not (folder / file_name).is_file():
                raise CheckpointError(f"{folder}: shard {file_name} is missing (tensor {name}): download it")
            shards[file_name] = SafetensorsFile(folder / file_name)
        if name not in shards[file_name].names():
            raise CheckpointError(
                f"{folder / file_name}: tensor {name} is missing, though {INDEX} puts it there"
            )
    return {name: shards[file_name] for name, file_name in weight_map.items()}
