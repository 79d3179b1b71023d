"""Where settings come from: defaults < `paged.toml` < `--config` < `--set` < flags, the later over the former.

Standard library only; may import `config` and `errors`. Every value keeps its source, so an error names the file or
flag it came from. Nothing is guessed: an unknown key or a value of the wrong type is a `ConfigError`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pagedcli.config import EngineConfig
from pagedcli.errors import ConfigError

S = TypeVar("S")
FOLDER_FILE = "paged.toml"
TUNED = "tuned"
"""Table of a file that tells what its settings were measured for; it sets nothing."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
# Two ways to say one thing: what a later source says replaces both of an earlier one.
_RIVALS = {"cache.num_pages": "cache.kv_memory_bytes", "cache.kv_memory_bytes": "cache.num_pages"}


class _MismatchError(ValueError):
    """A value is of the wrong type; the message is the remedy."""


@dataclass(frozen=True, slots=True)
class Value:
    """A setting as given and where it was given ("paged.toml", "--set", "--page-size")."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Settings:
    """What all sources together say.

    Attributes:
        engine: The engine's settings.
        extra: Values of the sections that the caller added, by section, then key; only names are checked.
        given: Every setting that some source gave, by dotted key.
        folder_file: The `paged.toml` that was read; None: there was none, or it was not wanted.
        tuned: What the files' settings were measured for, as `paged bench tune` wrote it; empty: nothing is said.
    """

    engine: EngineConfig
    extra: dict[str, dict[str, Any]]
    given: dict[str, Value]
    folder_file: Path | None = None
    tuned: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def parse_size(text: str) -> int:
    """Bytes from "2GiB", "512 MiB", "1.5GB" or "65536"; K, M, G, T alone are binary; else ValueError."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError('give a size such as "2GiB", "512MiB" or a number of bytes')
    number, prefix, binary, byte = match.groups()
    base = 1000 if prefix and byte and not binary else 1024
    try:
        return int(float(number) * base ** _POWER[prefix.lower()])
    except OverflowError:
        raise ValueError('give a size that a machine can have, such as "2GiB"') from None


def show_bytes(count: int) -> str:
    """A size for people, in binary units."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def suggestion(name: str, known: Iterable[str], otherwise: str) -> str:
    """A question "did you mean X?" if something known is close, else `otherwise`."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]}?" if close else otherwise


def _one_of(value: Any, choices: tuple[str, ...]) -> str:
    if value not in choices:
        shown = ", ".join(str(choice) for choice in choices)
        hint = suggestion(str(value), choices, "")
        raise ValueError(f"choose one of {shown}" + (f"; {hint}" if hint else ""))
    return str(value)


def _whole_number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _MismatchError("give a whole number")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _MismatchError("give a number")
    try:
        return float(value)
    except OverflowError:
        raise _MismatchError("give a number of fewer digits") from None


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _MismatchError("give true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _MismatchError("give text in quotes")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise _MismatchError("give text in quotes, or a list of such texts")
    return tuple(value)


def _whole_numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise _MismatchError("give a list of whole numbers, such as [1, 8, 64]")
    return tuple(map(_whole_number, value))


_CHECKS: dict[Any, Callable[[Any], Any]] = {
    int: _whole_number,
    float: _number,
    bool: _switch,
    str: _text,
    tuple[str, ...]: _texts,
    tuple[int, ...]: _whole_numbers,
}


def _coerce(value: Any, hint: Any, unit: str) -> Any:
    """The value as the field's type says; ValueError with the remedy if it is none."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(option for option in get_args(hint) if option is not type(None))
    if get_origin(hint) is Literal:
        return _one_of(value, get_args(hint))
    if unit == "bytes" and isinstance(value, str):
        return parse_size(value)
    return _CHECKS[hint](value)


def checked_setting(section: type, name: str, value: Any) -> Any:
    """A setting given from Python: None where the field may be None, paths as text, else as from a file.

    Raises:
        ConfigError: The value is of the wrong type, or none of the choices.
    """
    field = next(field for field in dataclasses.fields(section) if field.name == name)
    hint = get_type_hints(section)[name]
    if value is None and type(None) in get_args(hint):
        return None
    try:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        return _coerce(value, hint, field.metadata.get("unit", ""))
    except ValueError as error:
        raise ConfigError(f"{name} is {value!r}: {error}") from None


def _sections() -> dict[str, type]:
    hints = get_type_hints(EngineConfig)
    return {
        name: hint
        for name, hint in hints.items()
        if isinstance(hint, type) and dataclasses.is_dataclass(hint)
    }


def _top_level() -> dict[str, Any]:
    return {name: hint for name, hint in get_type_hints(EngineConfig).items() if name not in _sections()}


def _names(section: type) -> list[str]:
    return [field.name for field in dataclasses.fields(section)]


def _check_name(section: str, name: str, known: Iterable[str], source: str) -> str:
    """The dotted key, if such a setting exists."""
    known = list(known)
    if name not in known:
        dotted = f"{section}.{name}" if section else name
        listed = ("known there: " if section else "known: ") + ", ".join(known)
        raise ConfigError(f"{source}: unknown setting {dotted}: {suggestion(name, known, listed)}")
    return f"{section}.{name}" if section else name


def _refuse_without_section(name: str, sections: Mapping[str, type], source: str) -> None:
    """A setting of some section, given as if it had none."""
    owners = [section for section, kind in sections.items() if name in _names(kind)]
    if owners and name not in _top_level():
        meant = " or ".join(f"{section}.{name}" for section in owners)
        raise ConfigError(f"{source}: unknown setting {name}: did you mean {meant}?")


def _flatten(table: Mapping[str, Any], sections: Mapping[str, type], source: str) -> dict[str, Value]:
    """One file's table as dotted keys; a section or key that does not exist is refused."""
    flat: dict[str, Value] = {}
    for name, value in table.items():
        if name not in sections:
            _refuse_without_section(name, sections, source)
            key = _check_name("", name, [*sections, *_top_level()], source)
            flat[key] = Value(value, source)
        elif not isinstance(value, Mapping):
            raise ConfigError(f"{source}: {name} is a section: write [{name}] and its settings below it")
        else:
            for key, item in value.items():
                dotted = _check_name(name, key, _names(sections[name]), source)
                flat[dotted] = Value(item, source)
    return flat


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}: give a readable TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: not TOML that can be read: nested too deeply") from None


def _literal(text: str) -> Any:
    """The right side of `--set`: a TOML value, or the text itself where it is none (`device.device=cpu`)."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text.strip()
    # A line feed in the text may begin a second setting, which nobody would read.
    return table["value"] if len(table) == 1 else text.strip()


def _assignments(items: Sequence[str], sections: Mapping[str, type]) -> dict[str, Value]:
    flat: dict[str, Value] = {}
    for item in items:
        key, equals, text = item.partition("=")
        source = f"--set {item}"
        if not equals:
            raise ConfigError(f"{source}: write --set section.key=value")
        section, dot, name = key.strip().partition(".")
        table = {section: {name: _literal(text)}} if dot else {section: _literal(text)}
        flat |= _flatten(table, sections, source)
    return flat


def _overlay(given: dict[str, Value], layer: Mapping[str, Value]) -> None:
    for key, value in layer.items():
        rival = _RIVALS.get(key)
        if rival is not None and rival not in layer:
            given.pop(rival, None)
        given[key] = value


def _check(key: str, value: Value, hint: Any, unit: str) -> Any:
    try:
        return _coerce(value.value, hint, unit)
    except ValueError as error:
        raise ConfigError(f"{value.source}: {key} is {value.value!r}: {error}") from None


def _section_values(name: str, section: type, given: Mapping[str, Value]) -> dict[str, Any]:
    hints = get_type_hints(section)
    result = {}
    for field in dataclasses.fields(section):
        key = f"{name}.{field.name}"
        if key in given:
            result[field.name] = _check(key, given[key], hints[field.name], field.metadata.get("unit", ""))
    return result


def _sourced(error: ConfigError, given: Mapping[str, Value]) -> ConfigError:
    """The same error with the source of the settings that it names."""
    message = str(error)
    sources = {value.source for key, value in given.items() if key in message}
    return ConfigError(f"{', '.join(sorted(sources))}: {message}") if sources else error


def build_section(name: str, section: type[S], given: Mapping[str, Value]) -> S:
    """The value of a section that the caller added, checked as the engine's own are.

    Raises:
        ConfigError: A value is of the wrong type or out of range; names where it was given.
    """
    try:
        return section(**_section_values(name, section, given))
    except ConfigError as error:
        if any(str(error).startswith(f"{value.source}:") for value in given.values()):
            raise
        raise _sourced(error, given) from None


def _build(given: Mapping[str, Value]) -> EngineConfig:
    try:
        parts: dict[str, Any] = {
            name: section(**_section_values(name, section, given)) for name, section in _sections().items()
        }
        for name, hint in _top_level().items():
            if name in given:
                parts[name] = _check(name, given[name], hint, "")
        return EngineConfig(**parts)
    except ConfigError as error:
        if any(str(error).startswith(f"{value.source}:") for value in given.values()):
            raise
        raise _sourced(error, given) from None


def load_settings(
    *,
    config_file: Path | None = None,
    assignments: Sequence[str] = (),
    flags: Mapping[str, Value] | None = None,
    extra_sections: Mapping[str, type] | None = None,
    folder: Path | None = None,
    read_folder_file: bool = True,
) -> Settings:
    """Put all sources together.

    Args:
        config_file: `--config FILE`.
        assignments: `--set` items, "section.key=value" each.
        flags: Dotted key to value and the flag that gave it.
        extra_sections: Further sections, each with the dataclass whose field names are its keys;
            their values are not checked here.
        folder: Where `paged.toml` is looked for; None: the current folder.
        read_folder_file: Whether it is (`--no-config`: it is not).
    """
    extra_sections = extra_sections or {}
    sections = _sections() | dict(extra_sections)
    given: dict[str, Value] = {}
    folder_file = (folder or Path()) / FOLDER_FILE
    files = [folder_file] if read_folder_file and folder_file.is_file() else []
    tuned: Mapping[str, Any] = {}
    for file in files if config_file is None else [*files, config_file]:
        table = _read(file)
        tuned = _tuned_table(table, str(file)) or tuned
        _overlay(given, _flatten(table, sections, str(file)))
    _overlay(given, _assignments(assignments, sections))
    _overlay(given, flags or {})
    extra = {
        section: {key: given[f"{section}.{key}"].value for key in _names(kind) if f"{section}.{key}" in given}
        for section, kind in extra_sections.items()
    }
    return Settings(_build(given), extra, given, files[0] if files else None, tuned)


def _tuned_table(table: dict[str, Any], source: str) -> Mapping[str, Any]:
    """Taken out of the table: it is no section of settings."""
    tuned = table.pop(TUNED, {})
    if not isinstance(tuned, Mapping):
        raise ConfigError(f"{source}: {TUNED} is a section: write [{TUNED}], or take it away")
    return tuned
