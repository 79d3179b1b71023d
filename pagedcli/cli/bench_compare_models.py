"""The checkpoints that `paged bench compare` runs: the original, and quantized copies, given or made here.

May import everything below `cli`.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pagedcli.bench.compare import NOT_GIVEN, Model, quality_facts
from pagedcli.bench.experiments import ORIGINAL
from pagedcli.bench.session import Session
from pagedcli.cli.console import Messages
from pagedcli.config import EngineConfig, ModelConfig
from pagedcli.errors import ConfigError
from pagedcli.quant.quality import QUALITY_FILE

METHODS = ("awq", "gptq")
_IS_QUANTIZED = "the original is quantized itself: --dtype bfloat16, or a folder that is not"
_NO_QUALITY = (
    "there is no quality.json with perplexities beside the {name} checkpoint: paged quantize writes one"
)
_NOT_TIMED = "the making of both was not timed: --quantize DIR makes them here"


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line says of quantized copies.

    Attributes:
        awq: Folder of an AWQ checkpoint.
        gptq: Folder of a GPTQ checkpoint.
        quantize: Folder in which to make both.
        short: Whether to make them of little text.
    """

    awq: str | None
    gptq: str | None
    quantize: str | None
    short: bool


@dataclass(frozen=True, slots=True)
class Known:
    """Folders of quantized checkpoints by method, and figures of them; see `compare.quality_facts`."""

    folders: Mapping[str, str]
    facts: Mapping[str, float]


def find_quantized(given: Given, config: EngineConfig, messages: Messages) -> Known:
    """The quantized copies, made here if that is asked for.

    Raises:
        ConfigError: The flags contradict each other, or a quality.json cannot be read.
        MissingDependencyError: They are to be made, and torch is not installed.
    """
    folders = {name: folder for name in METHODS if (folder := getattr(given, name)) is not None}
    facts: dict[str, float] = {}
    if given.quantize is not None:
        if folders:
            raise ConfigError("--quantize makes both checkpoints: leave --awq and --gptq out")
        folders, facts = make_both(Path(given.quantize), config, messages, short=given.short)
    for name, folder in folders.items():
        facts = {**_quality(name, Path(folder)), **facts}
    return Known(folders, facts)


def _quality(name: str, folder: Path) -> dict[str, float]:
    """Of the checkpoint's quality.json, if it has one."""
    try:
        found = json.loads((folder / QUALITY_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / QUALITY_FILE}: {error}: mend it, or take it away") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{folder / QUALITY_FILE} is no object: take it away")
    return quality_facts(name, found)


def make_both(
    target: Path, config: EngineConfig, messages: Messages, *, short: bool
) -> tuple[dict[str, str], dict[str, float]]:
    """Make both checkpoints as `paged quantize` does, with the same text, and take the time; a finished one is kept."""
    from pagedcli.api.quantize import quantize, require_torch_for_quantizing
    from pagedcli.cli.quantize_display import QuantizeDisplay
    from pagedcli.quant.options import QuantizeOptions
    from pagedcli.quant.request import QuantizeRequest
    from pagedcli.runtime.threads import compute_threads

    require_torch_for_quantizing()
    samples, length = (8, 64) if short else (32, 512)
    folders, facts = {}, {}
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--quantize {target}: cannot be a folder: {error.strerror}") from None
    for method in METHODS:
        folder = target / method
        folders[method] = str(folder)
        if (folder / QUALITY_FILE).is_file():
            messages.say(f"{folder} is there already: it is used as it is")
            continue
        request = QuantizeRequest(
            options=QuantizeOptions(method=method),  # type: ignore[arg-type]
            model=config.model.model,
            output=str(folder),
            samples=samples,
            seq_len=length,
            threads=config.device.threads or compute_threads(),
        )
        messages.say(f"making {folder}: {samples} samples of {length} tokens")
        start = time.perf_counter()
        with QuantizeDisplay(messages) as display:
            quantize(request, display)
        facts[f"{method}.making_s"] = time.perf_counter() - start
    return folders, facts


def load_models(
    config: EngineConfig, folders: Mapping[str, str], messages: Messages
) -> tuple[dict[str, Session], dict[str, Model]]:
    """Every checkpoint, loaded.

    Raises:
        ConfigError: A quantized one is of another model, or made by another method.
        CheckpointError: A folder cannot be used.
    """
    # What contiguous allocation reserves is an arm's matter: a model must be able to run the longest of all.
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, max_model_len=None))
    first = Session(config, on_phase=messages.detail)
    sessions, models = {ORIGINAL: first}, {ORIGINAL: Model(first, config)}
    for name, folder in folders.items():
        model = ModelConfig(model=folder, activation=config.model.activation)
        own = dataclasses.replace(config, model=model)
        session = sessions[name] = Session(own, on_phase=messages.detail)
        _check_method(name, folder, session)
        if _shape(session) != _shape(first):
            known = config.model.model or "the default model"
            raise ConfigError(f"--{name} {folder} has other layers or another vocabulary than {known}")
        models[name] = Model(session, own)
    return sessions, models


def _check_method(name: str, folder: str, session: Session) -> None:
    found = session.quantization
    if found is not None and found.method == name:
        return
    there = "its weights are not quantized" if found is None else f"its weights are {found.detail}"
    mend = f"give it as --{found.method}" if found is not None and found.method in METHODS else "leave it out"
    raise ConfigError(f"--{name} {folder} is no {name.upper()} checkpoint: {there}: {mend}")


def _shape(session: Session) -> tuple[int, ...]:
    spec = session.spec
    return (spec.vocab_size, spec.num_layers, spec.hidden_size)


def what_is_missing(known: Known, original: Session) -> dict[str, str]:
    """Why something is not measured, by the beginning of its name; see `Measurements`."""
    missing = {"int4": _IS_QUANTIZED} if original.choice.as_codes else {}
    for name in METHODS:
        if f"{name}.making_s" not in known.facts:
            missing[f"{name}.making"] = _NOT_TIMED
        if name not in known.folders:
            for begin in (name, f"int4/{name}", f"modes/+ {name.upper()}"):
                missing[begin] = NOT_GIVEN[name]
        elif f"{name}.perplexity_increase" not in known.facts:
            missing[f"{name}.perplexity"] = _NO_QUALITY.format(name=name.upper())
    return missing
