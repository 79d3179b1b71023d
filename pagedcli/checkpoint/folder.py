"""A Hugging Face folder: config.json, safetensors in one file or in shards, and the tokenizer's files.

Imports numpy, `text` and `errors`. What cannot be used (pickles, adapters, quantized weights) is refused by name,
with the way out.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pagedcli.checkpoint.base import FLOAT_DTYPES, RawTensor, read_json_object
from pagedcli.checkpoint.refusals import (
    refuse_adapter,
    refuse_quantized,
    refuse_quantized_names,
    refuse_without_weights,
)
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
        refuse_quantized(path, self.config)
        self._files = open_weights(path)
        refuse_quantized_names(path, self._files)
        self.generation_config = self._generation_config()
        self._settle_dtype()

    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        return self._file(name).shape(name)

    def tensor(self, name: str) -> RawTensor:
        """One tensor, a view of its file."""
        return self._file(name).tensor(name)

    def stored_bytes(self) -> int:
        """Bytes that the tensors take in the files."""
        return sum(file.num_bytes(name) for name, file in self._files.items())

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder."""
        from pagedcli.text.tokenizer import Tokenizer  # costs an import that reading weights does not need

        return Tokenizer.from_folder(self.path)

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
            if kind is not None:
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
