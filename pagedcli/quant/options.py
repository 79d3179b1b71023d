"""What a quantizer is asked to do and what it hands back. May import `checkpoint` and `errors`; no torch.

Everything here is a plain value, so that the command line, the writer and the quality report need no quantizer to
talk about one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pagedcli.checkpoint.quant_tensor import QuantTensor
from pagedcli.errors import ConfigError

Method = Literal["awq", "gptq", "rtn"]
METHODS: tuple[Method, ...] = ("awq", "gptq", "rtn")
ScaleDtype = Literal["float16", "bfloat16"]
DenseDtype = Literal["float32", "float16", "bfloat16"]
Floats = np.ndarray[Any, np.dtype[np.float32]]

GROUP_SIZES = (-1, 32, 64, 128)
DEFAULT_GROUP_SIZES = (128, 64, 32)
_BITS: dict[Method, tuple[int, ...]] = {"awq": (4,), "gptq": (4, 8), "rtn": (4, 8)}


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """How to quantize. All of it decides the bytes; what does not (threads, display) is passed beside it.

    Attributes:
        method: "awq", "gptq" or "rtn" (round to nearest).
        bits: 4, or 8 for gptq and rtn.
        group_size: Input features that share a scale: 32, 64, 128, or -1 for a whole row; None: the largest of 128,
            64, 32 that divides every layer.
        sym: Zero in the middle of the codes; None: asymmetric for awq, symmetric for the others.
        desc_act: GPTQ alone: groups are made of features in the order of their activations, so that the file needs
            `g_idx`. Without it GPTQ still visits features in that order, but keeps the groups in place.
        damp: GPTQ alone: added to the Hessian's diagonal, as a part of its mean.
        clip: AWQ and GPTQ search smaller ranges than minimum to maximum.
        keep: Linears to leave as they are: shell patterns for the name or its end ("*.down_proj", "lm_head",
            "model.layers.0.*"). Linears that share their input stay together.
        scale_dtype: Scales are rounded to it before codes are chosen: what the format stores.
        dense_dtype: What tensors that are not quantized are stored in, "float32", "float16" or "bfloat16"; None: as
            the checkpoint's config says. Folded scales are chosen so that the norms they change are exact in it.
    """

    method: Method
    bits: int = 4
    group_size: int | None = None
    sym: bool | None = None
    desc_act: bool = False
    damp: float = 0.01
    clip: bool = True
    keep: tuple[str, ...] = ()
    scale_dtype: ScaleDtype = "float16"
    dense_dtype: DenseDtype | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method is {self.method!r}: choose one of {', '.join(METHODS)}")
        if self.bits not in _BITS[self.method]:
            known = " or ".join(map(str, _BITS[self.method]))
            raise ConfigError(f"{self.method} with {self.bits} bits is not made: use --bits {known}")
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise ConfigError(f"--group-size is {self.group_size}: use -1 (a whole row), 32, 64 or 128")
        if self.desc_act and self.method != "gptq":
            raise ConfigError(f"--desc-act is for --gptq: leave it out with --{self.method}")
        if not 0 <= self.damp < 1:
            raise ConfigError(f"--damp is {self.damp:g}: it must be from 0 to below 1, such as 0.01")

    @property
    def symmetric(self) -> bool:
        """`sym` with its default filled in."""
        return self.method != "awq" if self.sym is None else self.sym


@dataclass(frozen=True, slots=True)
class PlannedLinear:
    """One fused linear: linears that share their input and are quantized together.

    Attributes:
        layer: Decoder layer.
        names: The checkpoint's, without ".weight".
        sizes: Output features of each.
        in_features: Input features.
        group_size: Resolved; a whole row's number for -1.
        kept: Why it is left as it is; None: it is quantized.
    """

    layer: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    in_features: int
    group_size: int
    kept: str | None

    @property
    def out_features(self) -> int:
        """Of all parts."""
        return sum(self.sizes)

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.out_features * self.in_features


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """What will be done, before anything is.

    Attributes:
        options: As asked for.
        group_size: As a format says it: -1 for a whole row.
        linears: In the order of work; the kept ones too. The head is none of them: it is never quantized.
        num_layers: Decoder layers.
        peak_bytes: Memory at the peak, weights of one layer and activations.
        work_bytes: Room that the work folder takes at most.
        notes: A line each that the user should hear: defaults that were chosen, what is left out and why.
    """

    options: QuantizeOptions
    group_size: int
    linears: tuple[PlannedLinear, ...]
    num_layers: int
    peak_bytes: int
    work_bytes: int
    notes: tuple[str, ...]

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the linears in decoder layers that are left as they are."""
        return tuple(name for linear in self.linears if linear.kept is not None for name in linear.names)


@dataclass(frozen=True, slots=True)
class LinearRecord:
    """What became of one linear.

    Attributes:
        name: The checkpoint's, without ".weight".
        layer: Decoder layer.
        method: "awq", "gptq", "rtn" (also what GPTQ falls back to) or "kept".
        error: Relative squared error of its output on the calibration text, None without one (rtn, kept).
        weight_error: Relative squared error of the weights, folded scales taken out.
        damp: GPTQ alone: the damping that worked.
        note: What a user should hear of it, else "".
    """

    name: str
    layer: int
    method: str
    error: float | None
    weight_error: float
    damp: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class LayerResult:
    """One finished decoder layer.

    Attributes:
        layer: Index.
        tensors: The quantized linears.
        dense: Tensors that changed and are not quantized (norms with folded scales, biases), float32 by full name;
            the values are exact in `dense_dtype`. All else is as in the checkpoint.
        records: One for each linear of the layer.
        resumed: Read back from the work folder of an earlier run.
    """

    layer: int
    tensors: tuple[QuantTensor, ...]
    dense: Mapping[str, Floats]
    records: tuple[LinearRecord, ...]
    resumed: bool


@dataclass(frozen=True, slots=True)
class QuantizeEvent:
    """Something a display shows.

    Attributes:
        phase: "check" (weights are looked through), "resume" (layers are read back), "linear" (one is finished),
            "layer" (one is finished and safe on disk).
        layer: Index of the layer.
        num_layers: In all.
        linear: Of "linear": names of the parts, joined by " + "; else "".
        error: Of "linear": relative squared error of the output; else None.
        seconds: Since the start of this run.
        memory_bytes: Resident memory of the process.
    """

    phase: Literal["check", "resume", "linear", "layer"]
    layer: int
    num_layers: int
    linear: str
    error: float | None
    seconds: float
    memory_bytes: int


Progress = Callable[[QuantizeEvent], None]
