"""Writes a quantized Hugging Face folder that other packages read: AutoAWQ gemm, GPTQ v1 and v2, compressed-tensors.

Imports numpy, `text` (a GGUF source's tokenizer) and `errors`. Tensors come one by one; what they do not replace is
taken from the source as it is. config.json comes last, so that a folder that has it is whole.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pagedcli.checkpoint import awq, compressed_tensors, gptq
from pagedcli.checkpoint.base import Checkpoint, StoredTensor
from pagedcli.checkpoint.quant_settings import OWN_FILES, SETTINGS_KEYS
from pagedcli.checkpoint.quant_tensor import QuantTensor
from pagedcli.checkpoint.safetensors_writer import (
    SHARD_BYTES,
    SafetensorsWriter,
    as_stored,
    write_json,
    write_text,
)
from pagedcli.errors import CheckpointError

Target = Literal["autoawq", "gptq", "gptq_v2", "compressed-tensors"]
TARGETS: tuple[Target, ...] = ("autoawq", "gptq", "gptq_v2", "compressed-tensors")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_PIECE_ELEMENTS = 1 << 22
_GGUF_COMPANION_BYTES = 16 << 20
_NOT_COPIED = (*OWN_FILES, "config.json", "README.md", "quality.json", "adapter_config.json")
_WEIGHT_SUFFIXES = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".pkl",
    ".h5",
    ".msgpack",
    ".onnx",
    ".gguf",
    ".part",
}


@dataclass(frozen=True, slots=True)
class WriteSettings:
    """What a folder says of itself.

    Attributes:
        target: The format.
        bits: Of a code, of every quantized linear.
        group_size: As a format says it: -1 for whole rows.
        symmetric: Whether every zero point is the middle.
        act_order: GPTQ: whether groups may be out of order.
        kept: Linears of decoder layers that stay dense, without ".weight".
        dtype: Of all that is not quantized: "float32", "float16" or "bfloat16"; None: the source's.
        damp: GPTQ: as it was asked for; None: not said.
    """

    target: Target
    bits: int
    group_size: int
    symmetric: bool
    act_order: bool = False
    kept: tuple[str, ...] = ()
    dtype: str | None = None
    damp: float | None = None


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A tensor that replaces one of the source: float32 values under its full name."""

    name: str
    values: np.ndarray


def why_not(target: Target, shape: tuple[int, int], bits: int, group_size: int) -> str | None:
    """Why a linear (out, in) cannot be stored in a format; None if it can. `group_size` may be -1."""
    outputs, inputs = shape
    size = inputs if group_size == -1 else group_size
    if inputs % size:
        return f"{inputs} inputs do not divide into groups of {size}"
    if target == "autoawq" and bits != awq.BITS:
        return f"AWQ has 4 bits, not {bits}"
    if target == "autoawq" and outputs % awq.LANES:
        return f"{outputs} outputs are no multiple of {awq.LANES}"
    lanes = 32 // bits
    if target in ("gptq", "gptq_v2") and (outputs % lanes or inputs % lanes):
        return f"{outputs} outputs or {inputs} inputs are no multiple of {lanes}"
    return None


def write_quantized(
    folder: Path,
    source: Checkpoint,
    tensors: Iterable[QuantTensor | DenseTensor],
    settings: WriteSettings,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the whole folder.

    Args:
        folder: Made if missing; other files in it stay.
        source: What was quantized: all tensors that `tensors` does not replace, configuration, tokenizer.
        tensors: Quantized linears, and dense tensors that changed; in any order, held one at a time.
        settings: As above; scales are rounded to float16.
        shard_bytes: Largest weights' file.

    Raises:
        CheckpointError: A linear does not fit the format, or a number its dtype; nothing is renamed into place then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    dtype = settings.dtype or str(source.config.get("torch_dtype", "float32"))
    with SafetensorsWriter(folder, shard_bytes=shard_bytes) as writer:
        quantized = _write_tensors(writer, source, tensors, settings, _CODES[dtype])
        writer.finish()
    copy_companions(folder, source)
    quantization = quantization_config(settings, quantized)
    write_json(folder / "quantize_config.json", _own_file(quantization))
    write_json(folder / "config.json", _config(source, dtype, quantization))


def _write_tensors(
    writer: SafetensorsWriter,
    source: Checkpoint,
    tensors: Iterable[QuantTensor | DenseTensor],
    settings: WriteSettings,
    dtype: str,
) -> list[str]:
    """Write them all; names of the quantized linears, without ".weight"."""
    quantized = set()
    embedding: np.ndarray | None = None
    for tensor in tensors:
        if isinstance(tensor, QuantTensor):
            _write_linear(writer, tensor, settings)
            quantized.add(f"{tensor.name}.weight")
            continue
        if tensor.name == EMBEDDING:
            embedding = tensor.values
        shape = tensor.values.shape
        writer.add(
            tensor.name, dtype, shape, [as_stored(tensor.name, tensor.values.astype(np.float32), dtype)]
        )
    tied = bool(source.config.get("tie_word_embeddings"))
    for name in source.names():
        if name not in writer.names and name not in quantized and not (tied and name == HEAD):
            _copy(writer, name, source.tensor(name), dtype)
    if tied and settings.target in ("gptq", "gptq_v2") and HEAD not in writer.names:
        # AutoGPTQ does not tie: without this tensor its head is random.
        if embedding is not None:
            writer.add(HEAD, dtype, embedding.shape, [as_stored(HEAD, embedding.astype(np.float32), dtype)])
        else:
            _copy(writer, HEAD, source.tensor(EMBEDDING), dtype)
    return sorted(name.removesuffix(".weight") for name in quantized)


def _write_linear(writer: SafetensorsWriter, tensor: QuantTensor, settings: WriteSettings) -> None:
    reason = why_not(settings.target, tensor.shape, tensor.bits, tensor.group_size)
    if tensor.zeros is None:
        reason = "its least values are no multiples of its scales"
    elif settings.target == "autoawq" and tensor.g_idx is not None:
        reason = "AWQ has no groups out of order"
    elif settings.target == "gptq" and int(tensor.zeros.min()) < 1:
        reason = "a zero point of 0 has no room in GPTQ's first version: use gptq_v2"
    if reason is None and not _are_halves(tensor.scales):
        reason = "a scale is no number of float16"
    if reason is not None:
        raise CheckpointError(f"linear {tensor.name} cannot be stored as {settings.target}: {reason}")
    for leaf, array in _packed(tensor, settings.target).items():
        writer.add_array(f"{tensor.name}.{leaf}", array)


def _are_halves(scales: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(scales.astype(np.float16)).all())


def _packed(tensor: QuantTensor, target: Target) -> dict[str, np.ndarray]:
    if target == "autoawq":
        return awq.pack(tensor)
    if target == "compressed-tensors":
        return compressed_tensors.pack(tensor)
    return gptq.pack(tensor, version=1 if target == "gptq" else 2)


def _copy(writer: SafetensorsWriter, name: str, tensor: StoredTensor, dtype: str) -> None:
    """One of the source's tensors, in pieces of rows, in the dtype that the folder has."""
    if tensor.dtype == dtype or tensor.dtype not in ("F32", "F16", "BF16", "F64"):
        writer.add(name, tensor.dtype, tensor.shape, [tensor.data.tobytes()])
    else:
        writer.add(name, dtype, tensor.shape, _pieces(name, tensor, dtype))
    tensor.release()


def _pieces(name: str, tensor: StoredTensor, dtype: str) -> Iterator[bytes]:
    rows = tensor.shape[0]
    step = max(1, _PIECE_ELEMENTS // max(1, int(np.prod(tensor.shape[1:]))))
    for first in range(0, rows, step):
        part = tensor.rows(first, min(first + step, rows))
        yield as_stored(name, _floats(part.data, tensor.dtype), dtype)


def _floats(data: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (np.ascontiguousarray(data).view("<u2").astype(np.uint32) << 16).view(np.float32)
    kind = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]
    return np.ascontiguousarray(data).view(kind).astype(np.float32)


# ---- what the folder says


def quantization_config(settings: WriteSettings, quantized: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of config.json; `quantized` are names of linears."""
    if settings.target == "compressed-tensors":
        return _compressed_config(settings)
    patterns: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in settings.kept}
    dynamic = {"dynamic": patterns} if patterns else {}
    if settings.target == "autoawq":
        said: dict[str, Any] = {
            "quant_method": "awq",
            "version": "gemm",
            "checkpoint_format": "gemm",
            "bits": settings.bits,
            "group_size": settings.group_size,
            "zero_point": True,
            "modules_to_not_convert": list(settings.kept) or None,
        }
        return said | dynamic  # GPTQModel knows `dynamic` alone
    said = {
        "quant_method": "gptq",
        "checkpoint_format": settings.target,
        "bits": settings.bits,
        "group_size": settings.group_size,
        "desc_act": settings.act_order,
        "static_groups": False,
        "sym": settings.symmetric,
        "true_sequential": True,
        "lm_head": False,
        "pack_dtype": "int32",
    }
    said |= {} if settings.damp is None else {"damp_percent": settings.damp}
    # optimum, by which transformers reads GPTQ, does not know `dynamic`: all linears are quantized but by this key.
    return said | dynamic | ({"modules_in_block_to_quantize": [list(quantized)]} if patterns else {})


def _compressed_config(settings: WriteSettings) -> dict[str, Any]:
    weights: dict[str, Any] = {
        "num_bits": settings.bits,
        "type": "int",
        "symmetric": settings.symmetric,
        "strategy": "channel" if settings.group_size == -1 else "group",
        "group_size": None if settings.group_size == -1 else settings.group_size,
        "actorder": "group" if settings.act_order else None,
        "block_structure": None,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head", *settings.kept],
        "kv_cache_scheme": None,
    }


def _own_file(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """quantize_config.json: the same, with `checkpoint_format` in any case."""
    return {"checkpoint_format": quantization.get("format"), **quantization}


def _config(source: Checkpoint, dtype: str, quantization: Mapping[str, Any]) -> dict[str, Any]:
    """The source's, without what says where it lay."""
    dropped = {"_name_or_path", "dtype", *SETTINGS_KEYS}
    own = {key: value for key, value in source.config.items() if key not in dropped}
    return {**own, "torch_dtype": dtype, "quantization_config": dict(quantization)}


def copy_companions(folder: Path, source: Checkpoint) -> None:
    """Tokenizer, chat template, generation settings and the like: as they are, or made from a GGUF file's metadata."""
    if source.format == "gguf":
        from pagedcli.checkpoint.gguf_checkpoint import GGUFCheckpoint
        from pagedcli.text.gguf_files import tokenizer_files

        assert isinstance(source, GGUFCheckpoint)
        for name, text in tokenizer_files(
            source.metadata, source.config.get("max_position_embeddings")
        ).items():
            write_text(folder / name, text)
        write_json(folder / "generation_config.json", source.generation_config)
        return
    for path in sorted(source.path.iterdir()):
        if _is_companion(path):
            shutil.copyfile(path, folder / path.name)


def companion_bytes(source: Checkpoint) -> int:
    """What `copy_companions` writes; a round number for a GGUF file, whose metadata they are made from."""
    if source.format == "gguf":
        return _GGUF_COMPANION_BYTES
    return sum(path.stat().st_size for path in source.path.iterdir() if _is_companion(path))


def _is_companion(path: Path) -> bool:
    if not path.is_file() or path.name.startswith(".") or path.name in _NOT_COPIED:
        return False
    return path.suffix not in _WEIGHT_SUFFIXES and not path.name.endswith(".index.json")
