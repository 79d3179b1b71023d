"""Runs a backend's script in its environment and listens to it. Standard library and this package."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedcli.errors import PagedError
from pagedcli.quant.backends.environment import Backend, clean_environment
from pagedcli.quant.request import Watcher

_LOG_LINES = 400


class BackendError(PagedError):
    """The package failed: the last line that it said, and where the rest is."""


def run_backend(backend: Backend, python: Path, task: Mapping[str, Any], work: Path, watcher: Watcher) -> str:
    """Do one task.

    Args:
        backend: Whose script is run.
        python: Of its environment.
        task: What the script gets, as JSON.
        work: Folder for the task and the log.
        watcher: Told how many layers are done.

    Returns:
        The package with its version, as it is installed.

    Raises:
        BackendError: It failed; its log stays in `work`.
    """
    file, log = work / "task.json", work / f"{backend.name}.log"
    file.write_text(json.dumps(task), encoding="utf-8")
    script = Path(__file__).parent / "scripts" / backend.script
    environment = clean_environment() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(task["threads"])}
    version = backend.package
    command = [str(python), "-I", str(script), str(file)]
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                version = _heard(line, watcher) or version
        except BaseException:  # KeyboardInterrupt too: the package must not go on without us
            process.terminate()
            raise
        code = process.wait()
    if code != 0:
        raise BackendError(f"{backend.package} failed: {_last_line(log, code)} (all of it is in {log})")
    return version


def _heard(line: str, watcher: Watcher) -> str | None:
    """Pass progress on; the version if it is told. Other lines are the package's own talk."""
    if not line.startswith("{"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    if "total" in value:
        watcher.progress(value["done"], value["total"], f"layer {value['done']} of {value['total']}")
    version: str | None = value.get("version")
    return version


def _last_line(log: Path, code: int) -> str:
    lines = [
        line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    ]
    said = [line for line in lines if line]
    return said[-1] if said else f"exit code {code}"
