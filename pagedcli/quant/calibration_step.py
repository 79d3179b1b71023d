"""Getting the calibration text of a run, and keeping it so that a run that goes on has the same. May import `text`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pagedcli.quant.calibration import Calibration, calibration_by_model, calibration_from_file
from pagedcli.quant.request import Engines, QuantizeRequest, Watcher
from pagedcli.text.tokenizer import Tokenizer

NOT_NEEDED = "(none: round to nearest needs none)"


def read_calibration(request: QuantizeRequest, tokenizer: Tokenizer, watcher: Watcher) -> Calibration | None:
    """From a file or data set, or empty for rtn; None if the model is to write the text.

    Raises:
        ConfigError: There is too little text, or it cannot be read.
    """
    if request.options.method == "rtn":
        return Calibration(np.zeros((0, request.seq_len), np.int64), NOT_NEEDED, request.seed)
    if request.calibration is None:
        return None
    with watcher.phase("read calibration text"):
        return calibration_from_file(request.calibration, tokenizer, **_sizes(request))


def write_calibration(
    request: QuantizeRequest,
    model: Path,
    tokenizer: Tokenizer,
    work: Path,
    engines: Engines,
    watcher: Watcher,
) -> Calibration:
    """Let the model write it, or take what it wrote in an earlier run from the work folder.

    Raises:
        ConfigError: The model writes too little.
    """
    kept, sizes = work / "calibration.json", _sizes(request)
    if (found := _read(kept, sizes)) is not None:
        return found
    with watcher.phase("let the model write calibration text"), engines.open(model) as session:
        made = calibration_by_model(
            session.write,
            tokenizer,
            **sizes,
            progress=lambda done, total: watcher.progress(done, total, f"{done:,} of {total:,} tokens"),
        )
    _write(kept, made, sizes)
    return made


def _sizes(request: QuantizeRequest) -> dict[str, int]:
    return {"samples": request.samples, "seq_len": request.seq_len, "seed": request.seed}


def _read(file: Path, sizes: dict[str, int]) -> Calibration | None:
    """What an earlier run kept, if it was asked for the same."""
    if not file.is_file():
        return None
    value: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if value["sizes"] != sizes:
        return None
    samples = np.asarray(value["samples"], np.int64)
    return Calibration(samples, value["source"], value["seed"], tuple(value["notes"]))


def _write(file: Path, made: Calibration, sizes: dict[str, int]) -> None:
    value = {
        "sizes": sizes,
        "source": made.source,
        "seed": made.seed,
        "notes": list(made.notes),
        "samples": made.samples.tolist(),
    }
    new = file.with_suffix(".new")
    new.write_text(json.dumps(value), encoding="utf-8")
    new.replace(file)
