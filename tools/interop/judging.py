"""The interop table: a package reads a folder in its own environment, and what it made of it is judged and kept."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
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
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    python = python_of(package, config.pop("quantization_config")["quant_method"])
    command = [
        python,
        str(ROOT / "tools" / "interop" / "peer.py"),
        package,
        str(folder.resolve()),
        str(out.resolve()),
    ]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=their_environment(1),
        cwd=out.parent,  # some leave logs where they are
        check=False,
    )
    if not out.exists():
        said = (run.stderr + run.stdout).splitlines()
        lines = [line for line in said if "Error" in line or "error" in line]
        return package, "refused: " + (lines[-1].strip()[:160] if lines else f"exit code {run.returncode}")
    found = dict(np.load(out))
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
        # Engines that compute in bfloat16 are off by up to 2%; a wrong code or zero point by tens.
        return f"close ({worst:.1e})" if worst < 4e-2 else f"WRONG ({worst:.1e})"
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    worst = float(np.abs(found["logprobs"] - logprobs[np.arange(len(IDS) - 1), IDS[1:]]).max())
    return f"close ({worst:.1e} nats)" if worst < 0.1 else f"WRONG ({worst:.1e} nats)"


class Cells:
    """The table in its file, written as each cell is known.

    Args:
        file: JSON, a list of {"reader", "read", "outcome"}.
        resume: Cells that it has are not tried again.
    """

    def __init__(self, file: Path, resume: bool) -> None:
        self._file = file
        kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
        self._outcomes: dict[tuple[str, str], dict[str, str]] = {(c["reader"], c["read"]): c for c in kept}
        self._known = set(self._outcomes) if resume else set()

    def fill(self, reader: str, read: str, attempt: Callable[[], tuple[str, str]]) -> None:
        """Try a cell, unless it is to be kept; print and keep its outcome.

        Args:
            reader: A package.
            read: What it reads.
            attempt: (version, outcome).
        """
        if (reader, read) not in self._known:
            version, outcome = attempt()
            self._outcomes[reader, read] = {
                "reader": reader,
                "read": read,
                "version": version,
                "outcome": outcome,
            }
            self._file.parent.mkdir(parents=True, exist_ok=True)
            found = [self._outcomes[cell] for cell in sorted(self._outcomes)]
            self._file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        cell = self._outcomes[reader, read]
        print(f"{cell['version']:28} {read:44} {cell['outcome']}", flush=True)

    def wrong(self) -> bool:
        """Whether any cell is."""
        return any("WRONG" in cell["outcome"] for cell in self._outcomes.values())
