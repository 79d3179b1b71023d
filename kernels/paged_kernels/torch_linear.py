"""Linear on torch with the same bits for a row whatever rows share its batch. Imports torch and the reference.

A matrix library picks its kernel, and with it the order of the sum over K, by the number of rows: one row alone and
the same row among many differ in the last bits. So rows go through in tiles of one fixed size, the last one padded
with zeros: every call has the same shape, and with it the same kernel.

Measured (2 cores with AVX-512 and AMX, torch 2.13, one and two threads): equal bits for any neighbours and any place
in a tile at 8, 16, 32 and 64 rows, in float32 and bfloat16. 32 is the compromise: against 16 a decode of one row loses
about a tenth in bfloat16 and a half in float32, against 64 a prefill loses a quarter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from paged_kernels.reference import check_linear

ROW_TILE = 32


def tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Linear (x @ weight.T + bias) in tiles of `ROW_TILE` rows.

    Args:
        x: [rows, in_features].
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """
    check_linear(x, weight, bias)
    rows = x.shape[0]
    tiles = torch.split(pad_rows(x, ROW_TILE), ROW_TILE)
    if len(tiles) == 1:
        return functional.linear(tiles[0], weight, bias)[:rows]
    out = x.new_empty((len(tiles) * ROW_TILE, weight.shape[0]))
    for index, tile in enumerate(tiles):
        out[index * ROW_TILE : (index + 1) * ROW_TILE] = functional.linear(tile, weight, bias)
    return out[:rows]


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """`x` with rows of zeros up to a multiple, contiguous."""
    missing = -x.shape[0] % multiple
    if not missing:
        return x.contiguous()
    return torch.cat((x, x.new_zeros((missing, x.shape[1]))))
