"""The environment of a backend: made once in the cache from pinned requirements. Imports nothing heavy.

What the packages need (old transformers, torch of one version) cannot live beside what paged needs, so they never do.
An environment counts when its marker is there, which is written last; one process makes it and the others wait.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pagedcli.checkpoint.sources import cache_folder
from pagedcli.config_file import show_bytes
from pagedcli.errors import MissingDependencyError
from pagedcli.quant.request import Watcher

if sys.platform != "win32":
    import fcntl

_MARKER = "complete"


@dataclass(frozen=True, slots=True)
class Backend:
    """A package that quantizes.

    Attributes:
        name: As in --backend.
        package: With its version, for people.
        disk_bytes: What its environment takes, about, with a CPU build of torch.
        last_python: Newest (major, minor) version of Python that it has wheels for; None: any.
        script: In the folder `scripts`.
    """

    name: str
    package: str
    disk_bytes: int
    last_python: tuple[int, int] | None
    script: str

    @property
    def requirements(self) -> Path:
        """Its pinned requirements: configs/backends of the repository, which the wheel carries beside this file."""
        here = Path(__file__).parent
        installed = here / "requirements" / f"{self.name}.txt"
        return (
            installed
            if installed.is_file()
            else here.parents[2] / "configs" / "backends" / f"{self.name}.txt"
        )


BACKENDS = {
    "autoawq": Backend("autoawq", "AutoAWQ 0.2.9", 2_500_000_000, None, "run_autoawq.py"),
    "auto-gptq": Backend("auto-gptq", "AutoGPTQ 0.7.1", 2_000_000_000, (3, 11), "run_auto_gptq.py"),
}


def check_python(backend: Backend, version: tuple[int, int] | None = None) -> None:
    """MissingDependencyError if there is no wheel of the backend for this Python."""
    version = version or (sys.version_info.major, sys.version_info.minor)
    if backend.last_python is not None and version > backend.last_python:
        last = ".".join(map(str, backend.last_python))
        raise MissingDependencyError(
            f"--backend {backend.name}: {backend.package} has wheels for Python up to {last}, this is "
            f"{version[0]}.{version[1]}: run paged with Python {last}, or use --backend native"
        )


def python_of(backend: Backend, watcher: Watcher) -> Path:
    """The Python of the backend's environment, which is made if it is not there yet.

    Raises:
        MissingDependencyError: The disk is too small, or pip cannot install it; the reason in one line.
    """
    check_python(backend)
    requirements = backend.requirements.read_bytes()
    key = hashlib.sha256(requirements + sys.version.encode()).hexdigest()[:12]
    folder = cache_folder() / "backends" / f"{backend.name}-{key}"
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    with _locked(folder.parent, backend.name):
        if not (folder / _MARKER).is_file():
            _check_disk(backend, folder.parent)
            watcher.say(
                f"{backend.package} gets an environment of its own in {folder}: about {show_bytes(backend.disk_bytes)} "
                "with a CPU build of torch, fetched once with pip"
            )
            with watcher.phase(f"install {backend.package}"):
                _make(backend, folder, python)
    return python


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("a") as file:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_disk(backend: Backend, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < backend.disk_bytes:
        raise MissingDependencyError(
            f"--backend {backend.name}: its environment takes about {show_bytes(backend.disk_bytes)}, "
            f"{show_bytes(free)} is free in {folder}: set PAGED_CACHE to a folder with more room"
        )


def _make(backend: Backend, folder: Path, python: Path) -> None:
    """Anew from nothing: what a killed run left is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        venv.create(folder, with_pip=True)
    except subprocess.CalledProcessError as error:
        raise MissingDependencyError(
            f"--backend {backend.name}: Python cannot make an environment with pip (ensurepip is missing): install it, "
            "on Debian and Ubuntu with apt-get install python3-venv"
        ) from error
    options = ["--quiet", "--disable-pip-version-check", "--no-input"]
    command = [str(python), "-m", "pip", "install", *options, "-r", str(backend.requirements)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=clean_environment(),
        check=False,
    )
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"pip ended with {done.returncode}"]
        wrong = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise MissingDependencyError(
            f"--backend {backend.name}: {backend.package} cannot be installed: {wrong.strip()}"
        )
    (folder / _MARKER).write_text(f"{backend.package}\n")


def clean_environment() -> dict[str, str]:
    """Ours without what would let our packages be seen by another Python."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
