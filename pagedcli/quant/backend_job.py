"""A run whose quantizer is another package: the same text, files, checks, measurements and report around it.

May import everything below and torch. Unlike the native one it cannot go on in the middle: the packages keep nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from pagedcli.checkpoint.base import Checkpoint
from pagedcli.models.spec import ModelSpec
from pagedcli.quant.backends.clean import clean_output
from pagedcli.quant.backends.environment import BACKENDS, Backend, python_of
from pagedcli.quant.backends.process import run_backend
from pagedcli.quant.calibration import Calibration
from pagedcli.quant.dense_folder import write_dense
from pagedcli.quant.options import QuantizePlan
from pagedcli.quant.plan import decoder_linears
from pagedcli.quant.request import QuantizeRequest, Watcher


def backend_of(request: QuantizeRequest) -> Backend | None:
    """The package of a request; None for the native quantizers."""
    return BACKENDS.get(request.backend)


def quantize_by_package(
    backend: Backend,
    request: QuantizeRequest,
    original: Checkpoint,
    plan: QuantizePlan,
    calibration: Calibration,
    folder: Path,
    work: Path,
    watcher: Watcher,
) -> str:
    """Let the package do it, and make what it wrote into what everybody reads.

    Returns:
        The package and its version.

    Raises:
        MissingDependencyError: It cannot be installed.
        BackendError: It failed.
    """
    python = python_of(backend, watcher)
    source, made = work / "source", work / "made"
    for old in (source, made):
        shutil.rmtree(old, ignore_errors=True)
    with watcher.phase(f"write the model for {backend.package}"):
        write_dense(source, original)
    task = _task(request, plan, calibration, source, made)
    with watcher.phase(f"quantize {plan.num_layers} layers with {backend.package}"):
        version = run_backend(backend, python, task, work, watcher)
    clean_output(made, source, folder)
    return version


def _task(
    request: QuantizeRequest, plan: QuantizePlan, calibration: Calibration, source: Path, made: Path
) -> dict[str, Any]:
    options = request.options
    return {
        "source": str(source),
        "output": str(made),
        "bits": options.bits,
        "group_size": plan.group_size,
        "sym": options.symmetric,
        "desc_act": options.desc_act,
        "damp": options.damp,
        "threads": request.threads,
        "samples": calibration.samples.tolist(),
    }


def linear_names(checkpoint: Checkpoint) -> list[str]:
    """All linears of the decoder layers."""
    spec = ModelSpec.from_config(checkpoint.config, f"{checkpoint.path}: config")
    return [part.name for linear in decoder_linears(spec) for part in linear.parts]
