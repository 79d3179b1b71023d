"""Keyword arguments of `LLM` and `AsyncLLM` turned into an `EngineConfig`.

May import `config`, `config_file` and `errors`.
Every field of the configuration is a keyword by its own name; the names are unique across sections. What is unknown
is refused with the nearest name.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from pagedcli.config import EngineConfig
from pagedcli.config_file import checked_setting
from pagedcli.errors import ConfigError

ALIASES = {"block_size": "page_size", "kv_cache_memory_bytes": "kv_memory_bytes"}
"""Names that other engines use for ours."""
ENFORCE_EAGER = "enforce_eager"
"""One that says the opposite of ours: `cuda_graphs`."""


def section_of_setting() -> dict[str, str | None]:
    """Section of each setting by name; None for those of the engine itself."""
    sections: dict[str, str | None] = {}
    for part in dataclasses.fields(EngineConfig):
        value = getattr(EngineConfig(), part.name)
        if dataclasses.is_dataclass(value):
            sections.update({field.name: part.name for field in dataclasses.fields(value)})
        else:
            sections[part.name] = None
    return sections


def config_from_settings(base: EngineConfig, settings: dict[str, Any]) -> EngineConfig:
    """`base` with the given settings replaced.

    Raises:
        ConfigError: A name is unknown, given twice, or a value is of the wrong type or out of range.
    """
    if not isinstance(base, EngineConfig):
        raise ConfigError(f"config is a {type(base).__name__}: give an EngineConfig, or settings by name")
    sections = section_of_setting()
    changes: dict[str | None, dict[str, Any]] = {}
    for given, said in settings.items():
        name, value = _ours(given, said)
        if name not in sections:
            raise ConfigError(
                f"unknown setting {given!r}{_suggestion(given, [*sections, *ALIASES, ENFORCE_EAGER])}"
            )
        part = changes.setdefault(sections[name], {})
        if name in part:
            raise ConfigError(f"{name} is given twice, also as {given}: give it once")
        section = sections[name]
        part[name] = checked_setting(type(getattr(base, section) if section else base), name, value)
    top = changes.pop(None, {})
    for section, values in changes.items():
        assert section is not None
        top[section] = dataclasses.replace(getattr(base, section), **values)
    return dataclasses.replace(base, **top)


def _ours(given: str, value: Any) -> tuple[str, Any]:
    """Our name and value of a setting."""
    if given != ENFORCE_EAGER:
        return ALIASES.get(given, given), value
    if not isinstance(value, bool):
        raise ConfigError(f"{ENFORCE_EAGER} is {value!r}: give True or False")
    return "cuda_graphs", False if value else None


def _suggestion(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {near[0]}?" if near else f": known are {', '.join(sorted(known))}"
