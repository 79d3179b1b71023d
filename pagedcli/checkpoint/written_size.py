"""How many bytes a quantized folder will take, from shapes alone: what `quant_writer` writes. No tensor is read.

Imports `errors` through `base`. It must follow `quant_writer` and the formats' `pack`; tests hold it to the byte.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pagedcli.checkpoint.base import FLOAT_DTYPES, ITEM_SIZES, Checkpoint
from pagedcli.checkpoint.bit_packing import words_for
from pagedcli.checkpoint.quant_writer import EMBEDDING, HEAD, WriteSettings, companion_bytes

_HEADER_BYTES = 256
"""Of a tensor's entry in a file's header and in the index, at most, with names as models have them."""
_CODES = {name: code for code, name in FLOAT_DTYPES.items()}


def written_bytes(source: Checkpoint, groups: Mapping[str, int], settings: WriteSettings) -> int:
    """Of the tensors that `write_quantized` writes.

    Args:
        source: What is quantized.
        groups: Group size, resolved, of each linear that is quantized, by its name without ".weight".
        settings: As they will be written with.
    """
    code = _CODES[settings.dtype or str(source.config.get("torch_dtype", "float32"))]
    tied = bool(source.config.get("tie_word_embeddings"))
    total = 0
    for name in source.names():
        linear = name.removesuffix(".weight")
        if linear in groups:
            outputs, inputs = source.shape(name)
            total += linear_bytes((outputs, inputs), groups[linear], settings)
        elif not (tied and name == HEAD):
            total += _dense_bytes(source, name, code)
    if tied and settings.target in ("gptq", "gptq_v2"):
        total += _dense_bytes(source, EMBEDDING, code)
    return total


def folder_bytes(source: Checkpoint, groups: Mapping[str, int], settings: WriteSettings) -> int:
    """Of the whole folder, about: headers and what is copied beside the weights are counted, too."""
    leaves = len(source.names()) + 4 * len(groups)
    return written_bytes(source, groups, settings) + leaves * _HEADER_BYTES + companion_bytes(source)


def linear_bytes(shape: tuple[int, int], group_size: int, settings: WriteSettings) -> int:
    """Of one quantized linear (out, in): codes, scales, zero points, order."""
    outputs, inputs = shape
    groups, bits = -(-inputs // group_size), settings.bits
    scales = 2 * outputs * groups
    if settings.target == "compressed-tensors":
        zeros = 0 if settings.symmetric else 4 * words_for(outputs, bits) * groups
        order = 4 * inputs if settings.act_order else 0
        return 4 * outputs * words_for(inputs, bits) + scales + zeros + order + 16
    codes, zeros = outputs * inputs * bits // 8, 4 * words_for(outputs, bits) * groups
    return codes + scales + zeros + (0 if settings.target == "autoawq" else 4 * inputs)


def _dense_bytes(source: Checkpoint, name: str, code: str) -> int:
    stored = source.tensor(name).dtype
    return math.prod(source.shape(name)) * ITEM_SIZES[code if stored in FLOAT_DTYPES else stored]
