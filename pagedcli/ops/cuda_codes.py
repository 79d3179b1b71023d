"""4-bit weights for the CUDA kernels: which linears they take, and what they hold of one. Imports torch and numpy.

A fused linear is taken whole or not at all: all parts 4 bits with whole zero points and sizes as
`paged_kernels.cuda_pack.fits` wants them; `why_not` says what is in the way. Neighbours of one group size and one order
of inputs are one `CudaCodes`, others are products of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import torch
from paged_kernels import cuda_abi, cuda_pack
from torch import Tensor

from pagedcli.ops.weights import QuantizedPart, StoredPart, is_quantized

BITS = 4


@dataclass(frozen=True, slots=True)
class CudaCodes:
    """Parts of a fused linear as codes, on the device.

    Attributes:
        codes: int32 [in / 64, out / 16, 32, 4], packed by `cuda_pack`.
        scales: [in / group_size, out] of the run's dtype.
        zeros: As `scales`: zero points plus `cuda_pack.ZERO_BIAS`.
        bias: [out] of the run's dtype, or None.
        order: int32 [in]: input i of the codes is input order[i] of the layer; None: as they are.
        group_size: Inputs that share a scale.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bias: Tensor | None
    order: Tensor | None
    group_size: int

    @property
    def out_features(self) -> int:
        """Of all parts."""
        return self.scales.shape[1]

    @property
    def in_features(self) -> int:
        """Of each part."""
        return self.codes.shape[0] * cuda_pack.BLOCK_INPUTS

    @property
    def num_bytes(self) -> int:
        """Memory of it all but the bias."""
        held = (self.codes, self.scales, self.zeros, self.order)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def abi(self, dtype: int) -> cuda_abi.PagedCodes:
        """For the kernels; `dtype` as in `cuda_abi.DTYPES`."""
        bias = None if self.bias is None else self.bias.data_ptr()
        addresses = (self.codes.data_ptr(), self.scales.data_ptr(), self.zeros.data_ptr(), bias)
        return cuda_abi.PagedCodes(*addresses, self.out_features, self.in_features, self.group_size, dtype)


def all_quantized(parts: Sequence[StoredPart]) -> TypeGuard[Sequence[QuantizedPart]]:
    """Whether every part comes as codes."""
    return all(is_quantized(part) for part in parts)


def is_codes(weight: object) -> TypeGuard[tuple[CudaCodes, ...]]:
    """Whether a fused linear's weight is what `make_codes` gave, run by run."""
    return isinstance(weight, tuple)


def why_not(parts: Sequence[StoredPart]) -> str | None:
    """Why the 4-bit kernels do not take this fused linear; None: they do."""
    if not all_quantized(parts):
        return "a part is not quantized"
    if any(part.bits != BITS for part in parts):
        return f"{max(part.bits for part in parts)} bits"
    if any(part.zeros is None for part in parts):
        return "minima that are no multiple of the scale"
    if not all(cuda_pack.fits(*part.shape, part.group_size) for part in parts):
        sizes = ", ".join(f"{part.shape} in groups of {part.group_size}" for part in parts)
        return f"sizes {sizes}"
    return None


def alike(parts: Sequence[QuantizedPart]) -> list[list[QuantizedPart]]:
    """Neighbours that one `CudaCodes` can hold."""
    runs: list[list[QuantizedPart]] = []
    for part in parts:
        before = runs[-1][0] if runs else None
        if (
            before is not None
            and before.group_size == part.group_size
            and _same_order(before.g_idx, part.g_idx)
        ):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _same_order(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return (one is None and other is None) or (
        one is not None and other is not None and np.array_equal(one, other)
    )


def pack_codes(codes: Tensor) -> Tensor:
    """As `cuda_pack.pack_codes`, on the device of the codes: a model has billions of them.

    Args:
        codes: uint8 [out, in], 0 to 15.

    Returns:
        int32 [in / 64, out / 16, 32, 4], the bits of the words.
    """
    outputs, inputs = codes.shape
    tiles, steps = outputs // cuda_pack.BLOCK_OUTPUTS, inputs // cuda_pack.BLOCK_INPUTS
    parts = codes.reshape(tiles, cuda_pack.BLOCK_OUTPUTS, steps, 4, 4, 4)
    packed = torch.zeros((steps, tiles, 8, 4, 4), dtype=torch.int32, device=codes.device)
    for nibble, (output, at) in enumerate(cuda_pack.NIBBLES):
        half = parts[:, output : output + 8, :, :, :, at].permute(2, 0, 1, 3, 4)
        packed |= half.to(torch.int32) << (4 * nibble)
    return packed.reshape(steps, tiles, 32, 4)


def make_codes(
    parts: Sequence[QuantizedPart], bias: Tensor | None, dtype: str, device: torch.device
) -> CudaCodes:
    """Pack parts that are alike and that `why_not` has nothing against.

    Args:
        parts: [part, in_features] each.
        bias: [out] of all of them, or None.
        dtype: "bfloat16" or "float16".
        device: Where the kernels run.
    """
    kind: torch.dtype = getattr(torch, dtype)
    order = None if parts[0].g_idx is None else np.argsort(parts[0].g_idx, kind="stable").astype(np.int32)

    def along_outputs(arrays: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).T.astype(np.float32).copy()).to(device, kind)

    codes = torch.from_numpy(np.concatenate([np.asarray(part.codes) for part in parts])).to(device)
    if order is not None:
        codes = codes[:, torch.from_numpy(order).to(device)]
    packed = pack_codes(codes)
    zeros = along_outputs(
        [np.asarray(part.zeros, dtype=np.float32) + cuda_pack.ZERO_BIAS[dtype] for part in parts]
    )
    return CudaCodes(
        codes=packed,
        scales=along_outputs([part.scales for part in parts]),
        zeros=zeros,
        bias=bias,
        order=None if order is None else torch.from_numpy(order).to(device),
        group_size=parts[0].group_size,
    )
