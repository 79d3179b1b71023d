"""`QuantTensor`: one quantized linear as codes, scales and zero points, whatever format it is stored in.

Imports numpy and `code_rows`. Every reader makes these, every writer takes them, and kernels are packed from them, so
that a format is known in one place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pagedcli.checkpoint.code_rows import CodeRows

BITS = (2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """w[o, i] = scales[o, g(i)] * codes[o, i] + offsets[o, g(i)], with g(i) = g_idx[i], or i // group_size.

    Attributes:
        name: The linear's, without ".weight".
        bits: Width of a code: 2, 3, 4, 6 or 8.
        group_size: Input features that share a scale, resolved (a whole row's number where a format says -1).
        codes: [out, in] uint8, 0 to 2**bits - 1; readers of files give `CodeRows`, unpacked where they are sliced.
        scales: [out, groups] float32.
        zeros: [out, groups] whole numbers (uint8 or int16) that stand for 0: offsets = -scales * zeros. AWQ, GPTQ,
            compressed-tensors, Q4_0 (8), Q8_0 (128), Q6_K (32).
        offsets: [out, groups] float32, for formats whose least value is no multiple of the scale (Q4_1, Q4_K).
            Exactly one of `zeros` and `offsets` is there.
        g_idx: [in] int32, the group of each input feature; None: in order.
        method: "awq", "gptq", "rtn", "compressed-tensors" or "gguf".
    """

    name: str
    bits: int
    group_size: int
    codes: np.ndarray | CodeRows
    scales: np.ndarray
    zeros: np.ndarray | None
    offsets: np.ndarray | None
    g_idx: np.ndarray | None
    method: str

    def __post_init__(self) -> None:
        assert self.bits in BITS, self.bits
        assert self.codes.dtype == np.uint8, self.name
        assert self.codes.ndim == 2, self.name
        assert self.scales.dtype == np.float32, self.name
        assert self.scales.shape == (self.out_features, self.num_groups), self.name
        assert (self.zeros is None) != (self.offsets is None), self.name
        minimum = self.offsets if self.zeros is None else self.zeros
        assert minimum is not None
        assert minimum.shape == self.scales.shape, self.name
        assert self.g_idx is None or self.g_idx.shape == (self.in_features,), self.name

    @property
    def out_features(self) -> int:
        """Rows."""
        return int(self.codes.shape[0])

    @property
    def in_features(self) -> int:
        """Columns."""
        return int(self.codes.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in), as of the dense weight."""
        return self.out_features, self.in_features

    @property
    def num_groups(self) -> int:
        """Scales of a row; the last group may be short."""
        return -(-self.in_features // self.group_size)

    def all_codes(self) -> np.ndarray:
        """The codes as one array."""
        return np.asarray(self.codes)

    def groups(self) -> np.ndarray:
        """The group of each input feature, [in] int32."""
        if self.g_idx is not None:
            return self.g_idx
        return np.arange(self.in_features, dtype=np.int32) // np.int32(self.group_size)

    def dequantize(self) -> np.ndarray:
        """The weight, [out, in] float32: (code - zero) * scale, rounded once, or scale * code + offset."""
        groups = self.groups()
        codes, scales = self.all_codes().astype(np.float32), self.scales[:, groups]
        if self.zeros is not None:
            codes -= self.zeros.astype(np.float32)[:, groups]
            return np.asarray(codes * scales)
        assert self.offsets is not None
        return np.asarray(codes * scales + self.offsets[:, groups])

    def rows(self, first: int, last: int) -> QuantTensor:
        """Output features `first` to `last` - 1; their codes are unpacked, all else are views."""
        zeros = None if self.zeros is None else self.zeros[first:last]
        offsets = None if self.offsets is None else self.offsets[first:last]
        codes, scales = self.codes[first:last], self.scales[first:last]
        return replace(self, codes=codes, scales=scales, zeros=zeros, offsets=offsets)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a checkpoint are quantized, for whoever chooses and shows.

    Attributes:
        method: "awq", "gptq", "compressed-tensors" or "gguf".
        widths: Bits of a code, each with the number of linears that have it.
        num_weights: Weights that are stored as codes.
        num_bytes: Bytes of codes, scales and zero points of these.
        detail: For people, such as "AWQ gemm, 4 bits, groups of 64".
        notes: What had to be inferred, one line each.
    """

    method: str
    widths: tuple[tuple[int, int], ...]
    num_weights: int
    num_bytes: int
    detail: str
    notes: tuple[str, ...] = ()

    @property
    def bits_per_weight(self) -> float:
        """Of the quantized weights, scales and zero points counted."""
        return 8 * self.num_bytes / self.num_weights

    @property
    def num_linears(self) -> int:
        """Quantized ones."""
        return sum(count for _, count in self.widths)
