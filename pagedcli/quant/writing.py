"""From the quantizer's results to the writer of folders. May import `checkpoint`; no torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from pagedcli.checkpoint.base import Checkpoint
from pagedcli.checkpoint.quant_tensor import QuantTensor
from pagedcli.checkpoint.quant_writer import DenseTensor, Target, WriteSettings, write_quantized
from pagedcli.checkpoint.written_size import folder_bytes
from pagedcli.quant.options import LayerResult, QuantizePlan
from pagedcli.quant.quality import CARD_FILE


def write_checkpoint(
    folder: Path, source: Checkpoint, plan: QuantizePlan, target: Target, results: Iterable[LayerResult]
) -> None:
    """Write the output folder but for its report; layers are written as they come.

    Raises:
        CheckpointError: A linear does not fit the format.
    """
    write_quantized(folder, source, _tensors(results), write_settings(plan, target))
    card = source.path / CARD_FILE
    if source.path.is_dir() and card.is_file():
        shutil.copyfile(card, folder / CARD_FILE)


def write_settings(plan: QuantizePlan, target: Target) -> WriteSettings:
    """What the folder says of itself."""
    options = plan.options
    return WriteSettings(
        target=target,
        bits=options.bits,
        group_size=plan.group_size,
        symmetric=options.symmetric,
        act_order=options.desc_act,
        kept=plan.kept,
        damp=options.damp if options.method == "gptq" else None,
    )


def output_bytes(source: Checkpoint, plan: QuantizePlan, target: Target) -> int:
    """What the output folder will take, about; nothing is read for it."""
    groups = {
        name: linear.group_size for linear in plan.linears if linear.kept is None for name in linear.names
    }
    return folder_bytes(source, groups, write_settings(plan, target))


def _tensors(results: Iterable[LayerResult]) -> Iterator[QuantTensor | DenseTensor]:
    for result in results:
        yield from result.tensors
        for name in sorted(result.dense):  # read back, they may come in another order
            yield DenseTensor(name, result.dense[name])
