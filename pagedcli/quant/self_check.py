"""Reads a written checkpoint back and compares it with what the quantizer made. May import `checkpoint`; no torch.

A difference is our fault, not the user's: it ends the run before anything is called finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from pagedcli.checkpoint.base import Checkpoint
from pagedcli.checkpoint.quant_tensor import QuantTensor
from pagedcli.errors import PagedError
from pagedcli.quant.options import LayerResult, QuantizePlan

# Scales are rounded once to the format's dtype before codes are chosen, so nothing but this is lost in the file.
_SCALE_ERROR = 1e-6


class SelfCheckError(PagedError):
    """What was written is not what was made; names the folder and the tensor."""


def check_written(written: Checkpoint, plan: QuantizePlan, results: Iterable[LayerResult]) -> dict[str, str]:
    """Compare the files with the quantizer's results, layer by layer.

    Args:
        written: The output folder, opened as any other.
        plan: Of the run.
        results: Of the quantizer, read back from the work folder.

    Returns:
        How each linear was quantized, by name.

    Raises:
        SelfCheckError: They differ.
    """
    methods: dict[str, str] = {}
    for result in results:
        for tensor in result.tensors:
            _check_linear(written, tensor)
        methods |= {record.name: record.method for record in result.records}
    for name in plan.kept:
        methods.setdefault(name, "kept")
        if written.quantized(name) is not None:
            raise _wrong(written, name, "was to be kept and is quantized")
    _check_size(written, plan)
    return methods


def check_codes_there(written: Checkpoint, names: Iterable[str], method: str) -> dict[str, str]:
    """For a checkpoint that another package made: which linears are quantized; at least one must be."""
    methods: Mapping[str, str] = {
        name: "kept" if written.quantized(name) is None else method for name in names
    }
    if all(value == "kept" for value in methods.values()):
        raise SelfCheckError(f"{written.path}: no layer of it is quantized")
    return dict(methods)


def _check_linear(written: Checkpoint, made: QuantTensor) -> None:
    found = written.quantized(made.name)
    if found is None:
        raise _wrong(written, made.name, "was quantized and its codes are not there")
    if (found.bits, found.group_size) != (made.bits, made.group_size):
        raise _wrong(written, made.name, f"reads back as {found.bits} bits in groups of {found.group_size}")
    read, codes = found.all_codes(), made.all_codes()
    if not np.array_equal(read, codes):
        raise _wrong(written, made.name, f"{int((read != codes).sum())} codes read back differently")
    if not np.array_equal(found.groups(), made.groups()):
        raise _wrong(written, made.name, "the groups of its inputs read back differently")
    if not np.allclose(found.scales, made.scales, rtol=_SCALE_ERROR, atol=0):
        raise _wrong(written, made.name, "its scales read back differently")
    if found.zeros is None or made.zeros is None or not np.array_equal(found.zeros, made.zeros):
        raise _wrong(written, made.name, "its zero points read back differently")


def _check_size(written: Checkpoint, plan: QuantizePlan) -> None:
    """The codes must take the bits that were asked for; a file of dense weights does not pass for a quantized one."""
    found = written.quantization
    if found is None:
        raise SelfCheckError(f"{written.path}: nothing in it is quantized")
    weights = sum(linear.weights for linear in plan.linears if linear.kept is None)
    if found.num_weights != weights:
        raise SelfCheckError(f"{written.path}: {found.num_weights:,} weights are quantized, not {weights:,}")
    if found.bits_per_weight > 2 * plan.options.bits:
        raise SelfCheckError(
            f"{written.path}: takes {found.bits_per_weight:.1f} bits a quantized weight, not {plan.options.bits}"
        )


def _wrong(written: Checkpoint, name: str, what: str) -> SelfCheckError:
    return SelfCheckError(f"{written.path}: {name} {what}: please report this")
