"""Fields of workload files, each checked where it is read. Standard library only and `errors`.

Whatever is wrong with a file is a `WorkloadError`: one line that names the file, the line and the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pagedcli.errors import ConfigError
from pagedcli.workloads.requests import Messages

MAX_TOKENS = 10_000_000
"""Longest prompt or output that a file may ask for: anything above it is a mistake, and would fill the memory."""
_SHOWN = 40


class WorkloadError(ConfigError):
    """A workload cannot be made or read."""


def shown(value: object) -> str:
    """A value in a message: short, and on one line."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


@dataclass(frozen=True, slots=True)
class Record:
    """One line or entry of a file.

    Attributes:
        place: Where it stands, such as "trace.jsonl, line 7".
        values: What it holds.
    """

    place: str
    values: Mapping[str, Any]

    def fail(self, message: str) -> NoReturn:
        """Refuse the file."""
        raise WorkloadError(f"{self.place}: {message}")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        """A field that must be there."""
        if not self.has(name):
            self.fail(f"{name} is missing")
        return self.values[name]

    def integer(self, name: str, *, least: int = 0, most: int = MAX_TOKENS) -> int:
        """A whole number within bounds."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(f"{name} is {shown(value)}: give a whole number")
        if not least <= value <= most:
            self.fail(f"{name} is {shown(value)}: give {least} to {most}")
        return value

    def seconds(self, name: str) -> float:
        """A time that is not negative."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(f"{name} is {shown(value)}: give a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not 0 <= number < math.inf:
            self.fail(f"{name} is {shown(value)}: give a number from 0 on")
        return number

    def string(self, name: str) -> str:
        """Text that can be sent."""
        return self.as_text(name, self.get(name))

    def as_text(self, name: str, value: object) -> str:
        """The value, if it is text that can be sent and is not empty."""
        if not isinstance(value, str):
            self.fail(f"{name} is {shown(value)}: give text")
        if not value:
            self.fail(f"{name} is empty")
        try:
            value.encode()
        except UnicodeEncodeError:
            self.fail(f"{name} holds half a surrogate pair, which no text can contain")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Token ids that the model has."""
        value = self.get(name)
        if not isinstance(value, list) or not value:
            self.fail(f"{name} is {shown(value)}: give a list of at least one token id")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
                self.fail(f"{name} holds {shown(item)}: give token ids from 0 to {vocab_size - 1}")
        return tuple(value)

    def objects(self, name: str) -> list[Mapping[str, Any]]:
        """A list of at least one object."""
        value = self.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            self.fail(f"{name} is {shown(value)}: give a list of at least one object")
        return value

    def messages(self, name: str) -> Messages:
        """Messages of a chat."""
        pairs = []
        for index, message in enumerate(self.objects(name)):
            role = self.as_text(f"{name}[{index}].role", message.get("role"))
            content = self.as_text(f"{name}[{index}].content", message.get("content"))
            pairs.append((role, content))
        return tuple(pairs)


def read_object(place: str, text: str) -> Record:
    """A line that holds one JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:  # malformed, or a number of thousands of digits
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "a number is too long"
        raise WorkloadError(f"{place}: not JSON: {reason}") from error
    except RecursionError as error:
        raise WorkloadError(f"{place}: not JSON that can be read: it is nested too deeply") from error
    if not isinstance(value, dict):
        raise WorkloadError(f"{place}: {shown(value)}: give an object")
    return Record(place, value)
