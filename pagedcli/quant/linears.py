"""The hook between a running layer and the quantizers: one fused linear after the other, results by name.

Imports torch. Streams stay as they would be without scales (a folded scale cancels out), so that a layer computes the
same function whatever is folded; what is folded shows only in what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pagedcli.checkpoint.quant_tensor import QuantTensor
from pagedcli.errors import CheckpointError
from pagedcli.ops.weights import FusedLinear
from pagedcli.quant import awq, gptq
from pagedcli.quant.gram import InputStatistics, measure, output_error, rounded_products
from pagedcli.quant.grid import Grid, GridKind, full_grid
from pagedcli.quant.options import Floats, LinearRecord, PlannedLinear, QuantizeOptions
from pagedcli.quant.source import Source
from pagedcli.quant.stream import Origin
from pagedcli.quant.workers import Workers, row_blocks

_DENSE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_UNCLIPPED = ("q_proj", "k_proj")


@dataclass(frozen=True, slots=True)
class _Made:
    """A fused linear on its grid.

    Attributes:
        codes: [out, in] uint8.
        grid: [out, groups].
        g_idx: [in] int32 or None.
        divisor: [in] what the weights were multiplied by before rounding, or None.
        method: That made it.
        damp: Of GPTQ.
        note: For the record.
    """

    codes: Tensor
    grid: Grid
    g_idx: Tensor | None
    method: str
    divisor: Tensor | None = None
    damp: float | None = None
    note: str = ""


class LayerQuantizer:
    """Quantizes the linears of one layer as they come, and collects what is to be stored.

    Args:
        source: Weights.
        options: How.
        planned: By the name of the first part.
        workers: Compute.
        finished: Told of each linear: its parts, and the error of its output or None.
        products: What statistics multiply in, `stream.product_dtype`; they add in float32.
    """

    def __init__(
        self,
        source: Source,
        options: QuantizeOptions,
        planned: Mapping[str, PlannedLinear],
        workers: Workers,
        finished: Callable[[str, float | None], None],
        products: torch.dtype = torch.float32,
    ) -> None:
        self._source, self._options, self._planned = source, options, planned
        self._workers, self._finished, self._products = workers, finished, products
        self._kind = GridKind(options.bits, options.symmetric, options.scale_dtype)
        self.tensors: dict[str, QuantTensor] = {}
        self.dense: dict[str, Floats] = {}
        self.records: list[LinearRecord] = []

    def linear(
        self, weight: FusedLinear, inputs: list[Tensor], origin: Origin | None
    ) -> tuple[Tensor, Tensor | None]:
        """The `LinearHook`: the weight to go on with, and the bias."""
        plan = self._planned[weight.parts[0].name]
        parts = [self._source.tensor(f"{name}.weight") for name in plan.names]
        dense = torch.cat(parts) if len(parts) > 1 else parts[0]
        biases = [self._source.optional(f"{name}.bias") for name in plan.names]
        bias = torch.cat([part for part in biases if part is not None]) if biases[0] is not None else None
        if plan.kept is not None:
            self._keep(plan)
            return dense, bias
        statistics = self._measure(plan, inputs)
        if self._options.method == "awq":
            made = self._awq(plan, dense, statistics, origin)
        else:
            made = self._gptq(plan, dense, statistics)
        return self._store(plan, dense, made, statistics), bias

    def round_to_nearest(self, plan: PlannedLinear) -> None:
        """A linear without calibration."""
        if plan.kept is not None:
            self._keep(plan)
            return
        dense = torch.cat([self._source.tensor(f"{name}.weight") for name in plan.names])
        self._store(plan, dense, self._rtn(plan, dense, ""), None)

    def _keep(self, plan: PlannedLinear) -> None:
        for name in plan.names:
            self.records.append(LinearRecord(name, plan.layer, "kept", None, 0.0, note=plan.kept or ""))
        self._finished(" + ".join(plan.names), None)

    def _measure(self, plan: PlannedLinear, inputs: list[Tensor]) -> InputStatistics:
        with rounded_products(self._products):
            statistics = measure(inputs, self._workers)
        if not bool(torch.isfinite(statistics.gram.sum())):
            raise CheckpointError(
                f"{plan.names[0]}: its inputs on the calibration text are infinite or NaN: the model does not work "
                f"up to layer {plan.layer}; use a sound copy, or other calibration text"
            )
        return statistics

    # ---- methods

    def _rtn(self, plan: PlannedLinear, dense: Tensor, note: str) -> _Made:
        def part(rows: slice) -> tuple[Tensor, Grid]:
            return _encoded(dense[rows], plan.group_size, None, self._kind)

        codes, grid = _joined(self._workers.map(part, row_blocks(len(dense))))
        return _Made(codes, grid, None, "rtn", note=note)

    def _gptq(self, plan: PlannedLinear, dense: Tensor, statistics: InputStatistics) -> _Made:
        options = self._options
        factor = gptq.factorize(statistics.gram, options.damp, by_activation=True)
        if factor is None:
            return self._rtn(plan, dense, "the Hessian cannot be factored at any damping: rounded to nearest")
        groups = gptq.GroupPlan(plan.group_size, moving=options.desc_act, search=options.clip)

        def part(rows: slice) -> gptq.Rounded:
            return gptq.round_weights(dense[rows], factor, groups, self._kind)

        found = self._workers.map(part, row_blocks(len(dense)))
        codes, grid = _joined([(part.codes, part.grid) for part in found])
        note = "" if factor.damp == options.damp else f"damping raised to {factor.damp:g}"
        return _Made(codes, grid, found[0].g_idx, "gptq", damp=factor.damp, note=note)

    def _awq(
        self, plan: PlannedLinear, dense: Tensor, statistics: InputStatistics, origin: Origin | None
    ) -> _Made:
        divisor = self._fold(plan, dense, statistics, origin)
        scaled = dense if divisor is None else dense * divisor
        gram = statistics.gram if divisor is None else statistics.gram / torch.outer(divisor, divisor)
        clip = [
            self._options.clip and not name.endswith(_UNCLIPPED)
            for name, size in zip(plan.names, plan.sizes, strict=True)
            for _ in range(size)
        ]

        def part(rows: slice) -> tuple[Tensor, Grid]:
            block = scaled[rows]
            grid = awq.clipped_grid(block, gram, plan.group_size, self._kind, clip[rows])
            return _encoded(block, plan.group_size, grid, self._kind)

        codes, grid = _joined(self._workers.map(part, row_blocks(len(dense))))
        return _Made(codes, grid, None, "awq", divisor)

    # ---- folding

    def _fold(
        self, plan: PlannedLinear, dense: Tensor, statistics: InputStatistics, origin: Origin | None
    ) -> Tensor | None:
        """Scales for the input features, their inverses folded into what makes the input; None: not folded."""
        if origin is None or not _can_fold(origin, plan.in_features):
            return None
        found = awq.search_scales(dense, statistics, plan.group_size, self._kind, self._workers)
        if found.loss >= found.plain_loss:
            return None
        if origin.kind == "norm":
            return self._fold_norm(origin.name, found.scales)
        assert origin.linear is not None
        self._fold_rows(origin.linear.parts[-1].name, found.scales)
        return found.scales

    def _fold_norm(self, name: str, scales: Tensor) -> Tensor:
        """The norm is rounded as it will be stored; the scales are then what its rounding made of them."""
        norm = self._source.tensor(name)
        folded = self._as_stored(norm / scales)
        usable = (folded != 0) & torch.isfinite(folded)
        folded = torch.where(usable, folded, norm)
        self.dense[name] = folded.numpy()
        return torch.where(usable & (norm != 0), norm / folded, 1.0)

    def _fold_rows(self, name: str, scales: Tensor) -> None:
        """Divide a linear's outputs: the scales of its groups if it is quantized (its codes stay), else its rows."""
        made = self.tensors.get(name)
        if made is not None:
            divided = self._kind.round_scales(torch.from_numpy(made.scales) / scales.unsqueeze(1))
            self.tensors[name] = replace(made, scales=divided.numpy())
        else:
            weight = f"{name}.weight"
            self.dense[weight] = self._as_stored(self._source.tensor(weight) / scales.unsqueeze(1)).numpy()
        bias = self._source.optional(f"{name}.bias")
        if bias is not None:
            self.dense[f"{name}.bias"] = self._as_stored(bias / scales).numpy()

    def _as_stored(self, values: Tensor) -> Tensor:
        return values.to(_DENSE[self._options.dense_dtype or self._source.dense_dtype]).float()

    # ---- results

    def _store(
        self, plan: PlannedLinear, dense: Tensor, made: _Made, statistics: InputStatistics | None
    ) -> Tensor:
        """Note tensors and records; returns the weight that the layer goes on with."""
        effective = _decoded(made, plan.group_size)
        if not bool(torch.isfinite(effective.sum())):
            raise CheckpointError(
                f"{plan.names[0]}: weights up to {float(dense.abs().max()):g} need scales beyond "
                f"{self._kind.largest_scale:g}, the most that {self._kind.scale_dtype} holds: --keep {plan.names[0]}"
            )
        fused_error, fused_size, first = 0.0, 0.0, 0
        for name, size in zip(plan.names, plan.sizes, strict=True):
            rows = slice(first, first + size)
            first += size
            self.tensors[name] = _tensor(name, made, rows, plan.group_size, self._kind)
            difference = effective[rows] - dense[rows]
            error = None
            if statistics is not None:
                with rounded_products(self._products):
                    wrong = output_error(difference, statistics.gram, self._workers)
                    whole = output_error(dense[rows], statistics.gram, self._workers)
                fused_error, fused_size = fused_error + wrong, fused_size + whole
                error = _relative(wrong, whole)
            weight_error = _relative(_squares(difference), _squares(dense[rows]))
            self.records.append(
                LinearRecord(name, plan.layer, made.method, error, weight_error, made.damp, made.note)
            )
        shown = None if statistics is None else _relative(fused_error, fused_size)
        self._finished(" + ".join(plan.names), shown)
        return effective


def _can_fold(origin: Origin, in_features: int) -> bool:
    """Whether each input feature comes from a feature of its own, whose maker can be divided by the feature's scale.

    A norm's and an MLP's do. Values do where each query head has its own; those that several heads share could be
    divided by one scale for all that read them only, which is not searched for.
    """
    if origin.kind == "norm":
        return True
    assert origin.linear is not None
    return origin.linear.parts[-1].size == in_features


def _encoded(weights: Tensor, group_size: int, grid: Grid | None, kind: GridKind) -> tuple[Tensor, Grid]:
    """Codes [rows, in] uint8 and the grid [rows, groups]; without one, from minimum to maximum."""
    grouped = weights.view(len(weights), -1, group_size)
    wide = (
        full_grid(grouped, kind) if grid is None else Grid(grid.scales.unsqueeze(2), grid.zeros.unsqueeze(2))
    )
    codes = wide.encode(grouped, kind).to(torch.uint8).view(weights.shape)
    return codes, Grid(wide.scales.squeeze(2), wide.zeros.squeeze(2))


def _joined(parts: list[tuple[Tensor, Grid]]) -> tuple[Tensor, Grid]:
    grid = Grid(torch.cat([part.scales for _, part in parts]), torch.cat([part.zeros for _, part in parts]))
    return torch.cat([codes for codes, _ in parts]), grid


def _decoded(made: _Made, group_size: int) -> Tensor:
    """What the layer computes with: the weights of the codes, without the scales that are folded elsewhere."""
    weights = made.codes.float()
    if made.g_idx is None:
        grouped = weights.view(len(weights), -1, group_size)
        grouped.sub_(made.grid.zeros.unsqueeze(2)).mul_(made.grid.scales.unsqueeze(2))
    else:
        groups = made.g_idx.long()
        weights.sub_(made.grid.zeros[:, groups]).mul_(made.grid.scales[:, groups])
    return weights if made.divisor is None else weights.div_(made.divisor)


def _tensor(name: str, made: _Made, rows: slice, group_size: int, kind: GridKind) -> QuantTensor:
    return QuantTensor(
        name=name,
        bits=kind.bits,
        group_size=group_size,
        codes=np.ascontiguousarray(made.codes[rows].numpy()),
        scales=made.grid.scales[rows].numpy().astype(np.float32),
        zeros=made.grid.zeros[rows].numpy().astype(np.uint8),
        offsets=None,
        g_idx=None if made.g_idx is None else made.g_idx.numpy().astype(np.int32),
        method=made.method,
    )


def _squares(values: Tensor) -> float:
    return float(values.square().sum(1).sum(dtype=torch.float64))


def _relative(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
