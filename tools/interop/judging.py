"""One cell of the interop table: a package reads a folder in its own environment, and what it made of it is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from environments import ROOT, python_of, their_environment

sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from tests.quant_logits import IDS, reference_logits  # noqa: E402

TIMEOUT_S = 900


def try_package(
    package: str, folder: Path, out: Path, meant: dict[str, np.ndarray], timeout_s: int = TIMEOUT_S
) -> tuple[str, str]:
    """(version, outcome) of one package on one folder.

    Args:
        package: Of peer.py.
        folder: That paged wrote.
        out: File for what the package finds.
        meant: The weights that the folder means, by name.
        timeout_s: For the package.
    """
    command = [
        python_of(package),
        str(ROOT / "tools" / "interop" / "peer.py"),
        package,
        str(folder),
        str(out),
    ]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, env=their_environment(1), check=False
    )
    if not out.exists():
        said = (run.stderr + run.stdout).splitlines()
        lines = [line for line in said if "Error" in line or "error" in line]
        return package, "refused: " + (lines[-1].strip()[:160] if lines else f"exit code {run.returncode}")
    found = dict(np.load(out))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config")
    return str(found.pop("version")), judge(found, config, meant)


def judge(found: dict[str, np.ndarray], config: dict[str, Any], meant: dict[str, np.ndarray]) -> str:
    """Whether what was found is "equal", "close" or "WRONG", with the worst difference."""
    if "logits" not in found and "logprobs" not in found:
        wanted = {name for name in meant if name.endswith("_proj.weight")} & set(found)
        worst = max(
            float(np.abs(found[name] - meant[name]).max() / np.abs(meant[name]).max()) for name in wanted
        )
        return "equal" if worst < 1e-6 else f"close ({worst:.1e})" if worst < 2e-3 else f"WRONG ({worst:.1e})"
    logits = reference_logits(config, meant)
    if "logits" in found:
        worst = float(np.abs(found["logits"] - logits).max() / np.abs(logits).max())
        return f"close ({worst:.1e})" if worst < 2e-2 else f"WRONG ({worst:.1e})"
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    worst = float(np.abs(found["logprobs"] - logprobs[np.arange(len(IDS) - 1), IDS[1:]]).max())
    return f"close ({worst:.1e} nats)" if worst < 0.1 else f"WRONG ({worst:.1e} nats)"
