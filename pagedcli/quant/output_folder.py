"""The folder that a run writes: its name, what may lie in the way, room for it. May import `runtime`, `work`, `errors`.

An unfinished run is known by its work folder, which is removed as the last act; a finished one by its quality.json.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pagedcli.config_file import show_bytes
from pagedcli.errors import ConfigError
from pagedcli.quant.options import QuantizePlan
from pagedcli.quant.quality import QUALITY_FILE
from pagedcli.quant.request import QuantizeRequest
from pagedcli.quant.work import locked
from pagedcli.runtime.memory import free_memory

WORK_FOLDER = "quantize-work"
DEFAULT_NAME = "SmolLM2-135M-Instruct"


def default_output(request: QuantizeRequest, group_size: int) -> Path:
    """`MODEL_NAME-awq-4bit-g128` in the current folder."""
    options = request.options
    return Path(f"{model_name(request.model)}-{options.method}-{options.bits}bit-g{group_size}")


def model_name(model: str | None) -> str:
    """Last part of a folder, file or hub id, without what is no name."""
    if model is None:
        return DEFAULT_NAME
    name = model.partition(":")[0] if not Path(model).exists() else Path(model).resolve().name
    name = name.rstrip("/").rsplit("/", 1)[-1]
    return name.removesuffix(".gguf") or DEFAULT_NAME


def refuse_output(folder: Path, source: Path, *, overwrite: bool) -> None:
    """As `prepare_output`, without touching anything."""
    if folder.exists() and folder.resolve() == source.resolve():
        raise ConfigError(f"-o {folder} is the model itself: give another folder")
    if overwrite and source.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"-o {folder} holds the model {source}, which --overwrite would remove: give another folder"
        )
    if not overwrite:
        _check_free(folder, folder / WORK_FOLDER)
    elif folder.exists() and not (folder.is_dir() and _is_ours(folder)):
        raise ConfigError(
            f"{folder}: was not written by paged quantize (it has no {QUALITY_FILE}), so --overwrite does not "
            "remove it: give another -o"
        )


def prepare_output(folder: Path, source: Path, *, overwrite: bool) -> Path:
    """Make the folder, or go on in it; the work folder inside it.

    Args:
        folder: To write.
        source: The model, which must not be it.
        overwrite: Remove what an earlier run left.

    Raises:
        ConfigError: It is finished or something else, another process works in it, or it cannot be made.
    """
    refuse_output(folder, source, overwrite=overwrite)
    work = folder / WORK_FOLDER
    if overwrite and work.is_dir():
        with locked(work):
            pass
    try:
        if overwrite and folder.exists():
            shutil.rmtree(folder)
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error.strerror or error}): give another -o"
        ) from error
    return work


def _is_ours(folder: Path) -> bool:
    return (folder / QUALITY_FILE).is_file() or (folder / WORK_FOLDER).is_dir() or not any(folder.iterdir())


def _check_free(folder: Path, work: Path) -> None:
    if not folder.exists() or work.is_dir():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is a file: give another -o")
    if (folder / QUALITY_FILE).is_file():
        raise ConfigError(f"{folder}: is finished already: give --overwrite to make it anew, or another -o")
    if any(folder.iterdir()):
        raise ConfigError(f"{folder}: holds other files: give another -o")


def finish_output(folder: Path) -> None:
    """The last act: without its work folder the output is finished."""
    shutil.rmtree(folder / WORK_FOLDER)


def check_room(
    plan: QuantizePlan, folder: Path, output_bytes: int, *, running: int = 0, may_repeat: bool = False
) -> str:
    """What the run will take, for the user; refused if it is not there.

    Args:
        plan: Of the run.
        folder: Where it writes; its nearest parent that exists is asked.
        running: Memory while the models run and are compared.
        output_bytes: What it takes in the end; a file is there twice while it is put together, or replaced.
        may_repeat: Whether quality is demanded, so that more rounds may follow, each with work of its own.

    Raises:
        ConfigError: Memory or disk is too small, with the numbers.
    """
    memory, needed = free_memory(), max(plan.peak_bytes, running)
    if needed > memory:
        remedy = "a smaller model" if running > plan.peak_bytes else "fewer --samples or a smaller --seq-len"
        raise ConfigError(
            f"quantizing takes about {show_bytes(needed)} of memory, {show_bytes(memory)} is free: use {remedy}"
        )
    # What an earlier run left there is gone on with, or replaced: its room counts as free.
    disk = shutil.disk_usage(_existing(folder)).free + _bytes_in(folder)
    wanted = plan.work_bytes + 2 * output_bytes
    if wanted > disk:
        raise ConfigError(
            f"{folder}: the run takes up to {show_bytes(wanted)} of disk ({show_bytes(output_bytes)} in the end), "
            f"{show_bytes(disk)} is free: use fewer --samples, or another -o"
        )
    more = f", {show_bytes(plan.work_bytes)} more for each round that the demand takes" if may_repeat else ""
    disk_text = f"up to {show_bytes(wanted)} of disk, {show_bytes(output_bytes)} in the end{more}"
    return f"takes about {show_bytes(needed)} of memory and {disk_text}"


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.resolve().parents) if path.exists())
