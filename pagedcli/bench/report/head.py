"""What stands at the head of a report: model, machine, date, version, settings, workload, other load.

Standard library only. Whatever the dictionary tells is shown, under its own names, so that nothing is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from pagedcli.bench.report.figures import find
from pagedcli.bench.report.numbers import number, seconds, share, size

DEFAULT_MODEL = "SmolLM2-135M-Instruct"


def head_of(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and texts."""
    rows = []
    if "model" in (data.get("settings") or {}):  # kernels alone are of no model
        rows.append(("Model", model_name(find(data, "settings.model"))))
    rows += [(name, text) for name, text in (
        ("Machine", described(data.get("machine"))),
        ("Date", str(data.get("date", ""))),
        ("Version", str(data.get("version", ""))),
        ("Settings", described(_settings(data))),
        ("Workload", described(data.get("workload"))),
        ("Limits", described(_machine_limits(data))),
        ("Rounds", str(data.get("stopped") or "")),
        ("Other load", other_load(data)),
        ("Command", str(data.get("command", ""))),
        ("Took", f"{number(data['seconds'])} s" if "command" in data and "seconds" in data else ""),
    ) if text]  # fmt: skip
    return rows


def model_name(model: Any) -> str:
    """As the user named it; of a folder or file its own name, since nobody else has the folders above it."""
    text = str(model or DEFAULT_MODEL)
    return PurePath(text).name if text.startswith(("/", ".", "~")) or "\\" in text else text


def _machine_limits(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the machine can do at most; the shares of it that a run reached are figures of the run."""
    limits = data.get("limits") or {}
    return {key: value for key, value in limits.items() if not key.endswith("_share") and key != "bound_by"}


def _settings(data: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = data.get("settings") or {}
    return {key: value for key, value in settings.items() if key != "model" and value is not None}


def other_load(data: Mapping[str, Any]) -> str:
    """What else kept the machine busy, or nothing."""
    return str(data.get("other_load") or "")


def described(value: Any) -> str:
    """A value in words; of a mapping its parts: `page size 16, threads 2`."""
    if isinstance(value, Mapping):
        return "; ".join(_parts(value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(described(item) for item in value)
    return "" if value is None else str(value)


_UNITS: dict[str, Callable[[float], str]] = {
    "_bytes_per_s": lambda value: f"{number(value / 1e9)} GB/s",
    "flops_per_s": lambda value: f"{number(value / 1e9)} GFLOP/s",
    "_bytes": size,
    "_us_per_step": lambda value: f"{number(value)} µs a step",
    "_s": seconds,
    "_share": lambda value: f"{share(value)} of the time",
}


def _parts(value: Mapping[str, Any]) -> Iterator[str]:
    for key, part in value.items():
        if part is None or part == "" or part == {}:
            continue
        name, text = _with_unit(key, part)
        yield f"{name} {text}" if not isinstance(part, Mapping) else f"{name} ({text})"


def _with_unit(key: str, value: Any) -> tuple[str, str]:
    """The name in words and the number with the unit that the key's end tells."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        for ending, text in _UNITS.items():
            if key.endswith(ending):
                return key.removesuffix(ending).strip("_").replace("_", " ") or "arithmetic", text(value)
    return key.replace("_", " "), described(value)
