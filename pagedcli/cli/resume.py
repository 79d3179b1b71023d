"""Decides whether an output is new, goes on, is complete, or must not be touched. May import this package.

The order of removals matters: the rows go before the manifest that vouches for them, so that a kill in between never
leaves rows under a manifest that they were not made from.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pagedcli.cli.manifest import Manifest, changes, load_manifest, manifest_path, save_manifest
from pagedcli.cli.recovery import (
    forget_errors_ordered,
    forget_errors_unordered,
    journal_path,
)
from pagedcli.errors import ConfigError

_MAX_SHOWN = 3


def prepare_output(output: Path, wanted: Manifest, *, overwrite: bool, retry_errors: bool) -> Manifest:
    """Make the output ready to go on.

    Args:
        output: The file of rows.
        wanted: What this command would make it from.
        overwrite: Forget what is there.
        retry_errors: Forget the error rows that are there.

    Returns:
        The manifest of the output, with its own seed and time; its `complete` is set if there is nothing to do.

    Raises:
        ConfigError: The output was made from something else, or not by this command.
    """
    if overwrite:
        _remove(output)
    old = load_manifest(output)
    if old is None or not _has_rows(output):
        return _start(output, wanted)
    _refuse_changes(output, old, wanted, retry_errors=retry_errors)
    if old.complete is not None and not _is_whole(output, old.complete):
        old = dataclasses.replace(old, complete=None)
        save_manifest(output, old)
    if retry_errors and (old.complete is None or old.complete["errors"]):
        return _forget_errors(output, old, wanted)
    return old


def _remove(output: Path) -> None:
    output.unlink(missing_ok=True)
    journal_path(output).unlink(missing_ok=True)
    manifest_path(output).unlink(missing_ok=True)


def _has_rows(output: Path) -> bool:
    """Whether anything was ever answered; if not, there is nothing that could be mixed up."""
    files = (output, journal_path(output))
    return any(path.exists() and path.stat().st_size for path in files)


def _start(output: Path, wanted: Manifest) -> Manifest:
    if output.exists() and output.stat().st_size:
        raise ConfigError(
            f"{output}: exists and is not the output of a run to go on with ({manifest_path(output).name} is "
            "missing): --overwrite replaces it, or give another -o"
        )
    journal_path(output).unlink(missing_ok=True)
    save_manifest(output, wanted)
    return wanted


def _refuse_changes(output: Path, old: Manifest, wanted: Manifest, *, retry_errors: bool) -> None:
    if retry_errors:
        # An error row may say "--max-model-len N": this is the way to follow that advice.
        parameters = {**wanted.parameters, "max_model_len": old.parameters.get("max_model_len")}
        wanted = dataclasses.replace(wanted, parameters=parameters)
    found = changes(old, wanted)
    if found:
        more = f" and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
        raise ConfigError(
            f"{output}: was made otherwise: {'; '.join(found[:_MAX_SHOWN])}{more}: "
            "--overwrite starts anew, or give another -o"
        )


def _is_whole(output: Path, complete: dict[str, int]) -> bool:
    return output.exists() and output.stat().st_size == complete["bytes"]


def _forget_errors(output: Path, old: Manifest, wanted: Manifest) -> Manifest:
    pinned = {**old.parameters, "max_model_len": wanted.parameters["max_model_len"]}
    manifest = dataclasses.replace(old, complete=None, parameters=pinned)
    save_manifest(output, manifest)
    if manifest.parameters["order"] == "unordered":
        forget_errors_unordered(output)
    else:
        forget_errors_ordered(output)
    return manifest
