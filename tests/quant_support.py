"""Quantized checkpoints for tests, written and read by code that shares nothing with `pagedcli`.

Codes go into words one at a time, as Python integers, straight from the formats' descriptions. Slow and plain.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.fixtures_checkpoints import bfloat16_bits, tiny_config, tiny_tensors, write_tokenizer

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LINEAR_ENDINGS = ("_proj.weight",)


@dataclass
class Grid:
    """A weight rounded to codes: w[o, i] = (codes - zeros[:, g]) * scales[:, g], g = g_idx[i]."""

    bits: int
    group: int  # resolved
    codes: np.ndarray  # [out, in] int
    scales: np.ndarray  # [out, groups] float16
    zeros: np.ndarray  # [out, groups] int
    g_idx: np.ndarray  # [in] int

    def weight(self) -> np.ndarray:
        """float64 [out, in]."""
        difference = self.codes.astype(np.float64) - self.zeros[:, self.g_idx]
        return difference * self.scales.astype(np.float64)[:, self.g_idx]


def quantize(
    weight: np.ndarray, bits: int, group: int, *, symmetric: bool, order: np.ndarray | None = None
) -> Grid:
    """Round to nearest in groups; `order` is a permutation of the inputs by which they are grouped."""
    out, inputs = weight.shape
    size = inputs if group == -1 else min(group, inputs)
    groups = -(-inputs // size)
    g_idx = np.empty(inputs, np.int64)
    g_idx[np.arange(inputs) if order is None else order] = np.arange(inputs) // size
    most = (1 << bits) - 1
    scales, zeros = np.empty((out, groups), np.float16), np.empty((out, groups), np.int64)
    for g in range(groups):
        part = weight[:, g_idx == g]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            scales[:, g] = np.maximum(np.maximum(-low, high) * 2 / most, 1e-4)
            zeros[:, g] = 1 << (bits - 1)
        else:
            scales[:, g] = np.maximum((high - low) / most, 1e-4)
            zeros[:, g] = np.clip(np.rint(-low / scales[:, g].astype(np.float64)), 0, most)
    steps = np.rint(weight / scales.astype(np.float64)[:, g_idx]) + zeros[:, g_idx]
    return Grid(bits, size, np.clip(steps, 0, most).astype(np.int64), scales, zeros, g_idx)


def stream(codes: list[int], bits: int) -> list[int]:
    """A stream of bits, lowest first, cut into signed 32-bit words."""
    number = 0
    for i, code in enumerate(codes):
        number |= int(code) << (i * bits)
    words = -(-len(codes) * bits // 32)
    return [int(np.uint32((number >> (32 * w)) & 0xFFFFFFFF).astype(np.int32)) for w in range(words)]


def rows_of_words(matrix: np.ndarray, bits: int) -> np.ndarray:
    """[n, codes] to [n, words] int32."""
    return np.array([stream(row.tolist(), bits) for row in matrix], np.int32)


def awq_words(matrix: np.ndarray) -> np.ndarray:
    """[n, codes] to [n, codes / 8] int32 in AutoAWQ's order."""
    lanes = matrix.reshape(matrix.shape[0], -1, 8)[:, :, list(AWQ_ORDER)]
    return rows_of_words(lanes.reshape(matrix.shape[0], -1), 4)


def awq_leaves(grid: Grid) -> dict[str, np.ndarray]:
    """AutoAWQ gemm."""
    return {
        "qweight": awq_words(grid.codes.T),
        "qzeros": awq_words(grid.zeros.T),
        "scales": np.ascontiguousarray(grid.scales.T),
    }


def gptq_leaves(grid: Grid, version: int, *, g_idx: bool = True, bias: bool = False) -> dict[str, np.ndarray]:
    """AutoGPTQ; version 1 has 1 taken from all zero points of a word at once, so that a 0 borrows from the next."""
    qzeros = rows_of_words(grid.zeros.T, grid.bits)
    if version == 1 and grid.bits == 3:
        qzeros = rows_of_words((grid.zeros.T - 1) % 8, 3)
    elif version == 1:
        ones = rows_of_words(np.ones_like(grid.zeros.T), grid.bits)
        qzeros = ((qzeros.astype(np.int64) - ones) % (1 << 32)).astype(np.uint32).view(np.int32)
    leaves = {
        "qweight": np.ascontiguousarray(rows_of_words(grid.codes, grid.bits).T),
        "qzeros": qzeros,
        "scales": np.ascontiguousarray(grid.scales.T),
    }
    if g_idx:
        leaves["g_idx"] = grid.g_idx.astype(np.int32)
    if bias:
        leaves["bias"] = np.zeros(grid.codes.shape[0], np.float16)
    return leaves


def compressed_leaves(grid: Grid, *, symmetric: bool) -> dict[str, np.ndarray]:
    """compressed-tensors, pack-quantized."""
    leaves = {
        "weight_packed": rows_of_words(grid.codes, grid.bits),
        "weight_scale": grid.scales,
        "weight_shape": np.array(grid.codes.shape, np.int64),
    }
    if not symmetric:
        leaves["weight_zero_point"] = np.ascontiguousarray(rows_of_words(grid.zeros.T, grid.bits).T)
    if not np.array_equal(grid.g_idx, np.arange(len(grid.g_idx)) // grid.group):
        leaves["weight_g_idx"] = grid.g_idx.astype(np.int32)
    return leaves


_CODES = {"float16": "F16", "float32": "F32", "int32": "I32", "int64": "I64", "int8": "I8", "uint16": "BF16"}


def safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    """A safetensors file; uint16 stands for bfloat16."""
    header: dict[str, Any] = {}
    body = bytearray()
    for name, values in tensors.items():
        data = np.ascontiguousarray(values).tobytes()
        place = [len(body), len(body) + len(data)]
        header[name] = {
            "dtype": _CODES[values.dtype.name],
            "shape": list(values.shape),
            "data_offsets": place,
        }
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(body)


@dataclass
class Written:
    """A folder, and what every linear in it means."""

    folder: Path
    grids: dict[str, Grid]
    config: dict[str, Any]
    dense: dict[str, np.ndarray]  # float32: the whole model dequantized

    def tensors(self) -> dict[str, np.ndarray]:
        """float32, by the names of the dense model."""
        made = {f"{name}.weight": grid.weight().astype(np.float32) for name, grid in self.grids.items()}
        return {**self.dense, **made}


def write_quantized_model(
    folder: Path,
    kind: str,
    *,
    family: str = "llama",
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    act_order: bool = False,
    g_idx: bool = True,
    zero_bias: bool = False,
    kept: tuple[str, ...] = (),
    file: str = "model.safetensors",
    settings_in: tuple[str, ...] = ("config.json",),
    settings: dict[str, Any] | None = None,
    seed: int = 0,
    dtype: str = "float32",
    never_negative: bool = False,
    **overrides: Any,
) -> Written:
    """A tiny model of `kind` awq, gptq, gptq_v2 or compressed-tensors.

    Args:
        folder: Where to write.
        kind: Of the format.
        family: As in `tiny_config`.
        bits: Of a code.
        group: Size, -1: whole rows.
        symmetric: Zero points in the middle.
        act_order: GPTQ: inputs grouped by a random order.
        g_idx: GPTQ: whether the array is there.
        zero_bias: GPTQ: whether every layer has a bias of zeros.
        kept: Linears (by what their names contain) that stay dense.
        file: Name of the weights' file.
        settings_in: Files that say how it is quantized.
        settings: Instead of the usual ones.
        seed: Of the weights.
        dtype: Of everything that is not quantized: float32, float16 or bfloat16.
        never_negative: Every third output of a linear has no negative weight, so that its zero points are 0.
        **overrides: Of config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(
        family,
        **{
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            **overrides,
        },
    )
    random = np.random.default_rng(seed)
    stored: dict[str, np.ndarray] = {}
    grids: dict[str, Grid] = {}
    dense: dict[str, np.ndarray] = {}
    for name, values in tiny_tensors(config, seed).items():
        linear = name.removesuffix(".weight")
        if not name.endswith(LINEAR_ENDINGS) or any(part in name for part in kept):
            data, dense[name] = _rounded(values, dtype)
            stored[name] = data
            continue
        if never_negative:
            values[::3] = np.abs(values[::3])
        order = random.permutation(values.shape[1]) if act_order else None
        grid = grids[linear] = quantize(values, bits, group, symmetric=symmetric, order=order)
        if kind == "awq":
            leaves = awq_leaves(grid)
        elif kind == "compressed-tensors":
            leaves = compressed_leaves(grid, symmetric=symmetric)
        else:
            leaves = gptq_leaves(grid, 2 if kind == "gptq_v2" else 1, g_idx=g_idx, bias=zero_bias)
        stored |= {f"{linear}.{leaf}": array for leaf, array in leaves.items()}
    (folder / file).write_bytes(safetensors(stored))
    said = settings or usual_settings(kind, bits, group, symmetric, act_order)
    own = {**config, "torch_dtype": dtype}
    (folder / "config.json").write_text(
        json.dumps(own | ({"quantization_config": said} if "config.json" in settings_in else {}))
    )
    for name in settings_in:
        if name != "config.json":
            (folder / name).write_text(json.dumps(said))
    write_tokenizer(folder)
    return Written(folder, grids, own, dense)


def _rounded(values: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """As stored, and what that means in float32."""
    if dtype == "bfloat16":
        bits = bfloat16_bits(values)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32)
    stored = values.astype(dtype)
    return stored, stored.astype(np.float32)


def usual_settings(kind: str, bits: int, group: int, symmetric: bool, act_order: bool) -> dict[str, Any]:
    """As the packages write them."""
    if kind == "awq":
        return {
            "quant_method": "awq",
            "bits": bits,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        }
    if kind == "compressed-tensors":
        weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
        weights |= {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
        scheme = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": scheme},
            "ignore": ["lm_head"],
            "quantization_status": "compressed",
        }
    said = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": act_order,
        "sym": symmetric,
        "damp_percent": 0.01,
        "true_sequential": True,
    }
    return said | ({"checkpoint_format": "gptq_v2"} if kind == "gptq_v2" else {})


def unpack_independently(folder: Path) -> dict[str, np.ndarray]:
    """Every quantized linear of a folder, float64 [out, in], from the formats' descriptions alone."""
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            for name in handle.keys():  # noqa: SIM118 - no mapping
                tensor = handle.get_tensor(name)
                stored[name] = (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    method, made = config["quant_method"], {}
    for name in stored:
        linear, _, leaf = name.rpartition(".")
        if leaf in ("qweight", "weight_packed"):
            leaves = {
                key.rpartition(".")[2]: value for key, value in stored.items() if key.startswith(linear + ".")
            }
            made[f"{linear}.weight"] = _unpack(method, config, leaves)
    return made


def dense_weights(folder: Path) -> dict[str, np.ndarray]:
    """All weights of a folder that are stored as numbers, float32, but the copy of a tied head."""
    from safetensors.torch import load_file

    tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    return {
        name: tensor.float().numpy()
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
        if name.endswith(".weight") and not (tied and name == "lm_head.weight")
    }


def _unpack(method: str, config: dict[str, Any], leaves: dict[str, np.ndarray]) -> np.ndarray:
    if method == "compressed-tensors":
        scheme = config["config_groups"]["group_0"]["weights"]
        bits, (out, inputs) = scheme["num_bits"], leaves["weight_shape"]
        codes = codes_of(leaves["weight_packed"], bits)[:, :inputs]
        scales = leaves["weight_scale"]
        zeros = np.full(scales.shape, 1 << (bits - 1))
        if "weight_zero_point" in leaves:
            zeros = codes_of(leaves["weight_zero_point"].T, bits).T[:out]
        g_idx = leaves.get("weight_g_idx", np.arange(inputs) * scales.shape[1] // inputs)
        return (codes - zeros[:, g_idx]) * scales[:, g_idx]
    bits, scales = config["bits"], leaves["scales"]
    if method == "awq":
        place = [AWQ_ORDER.index(i) for i in range(8)]
        unpacked = [codes_of(leaves[leaf], 4) for leaf in ("qweight", "qzeros")]
        codes, zeros = (x.reshape(x.shape[0], -1, 8)[:, :, place].reshape(x.shape) for x in unpacked)
    else:
        codes, zeros = codes_of(leaves["qweight"].T, bits).T, codes_of(leaves["qzeros"], bits)
        zeros = zeros + (1 if config.get("checkpoint_format", "gptq") == "gptq" else 0)
    g_idx = leaves.get("g_idx", np.arange(codes.shape[0]) * scales.shape[0] // codes.shape[0])
    return ((codes - zeros[g_idx]) * scales[g_idx]).T


def codes_of(words: np.ndarray, bits: int) -> np.ndarray:
    """[n, words] to [n, codes] for widths that divide 32."""
    unsigned = words.astype(np.int64) & 0xFFFFFFFF
    lanes = [(unsigned >> (bits * i)) & ((1 << bits) - 1) for i in range(32 // bits)]
    return np.stack(lanes, axis=-1).reshape(words.shape[0], -1)
