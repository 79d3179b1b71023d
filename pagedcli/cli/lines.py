"""Lines of a file of any size as bytes, with their physical numbers. Standard library only.

A line ends at a line feed; a carriage return before it is no part of it, nor is a byte order mark at the start of
the file. A line longer than `max_bytes` is read past, never held: it comes as its first bytes, marked `too_long`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

MAX_LINE_BYTES = 32 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One line that is not blank.

    Attributes:
        number: Physical line, counted from 1.
        ordinal: Lines before it that are not blank: its row's place in the output.
        data: Without line end and byte order mark.
        too_long: It had more than the allowed bytes; `data` is only its beginning.
    """

    number: int
    ordinal: int
    data: bytes
    too_long: bool = False


def _skip_rest(file: BinaryIO, max_bytes: int) -> None:
    while True:
        piece = file.readline(max_bytes)
        if not piece or piece.endswith(b"\n"):
            return


def read_lines(file: BinaryIO, max_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """Every line with something but white space in it (C23)."""
    number = ordinal = 0
    while raw := file.readline(max_bytes + 1):
        number += 1
        too_long = len(raw) > max_bytes and not raw.endswith(b"\n")
        if too_long:
            _skip_rest(file, max_bytes)
        if number == 1:
            raw = raw.removeprefix(_BYTE_ORDER_MARK)
        if too_long or raw.strip():
            yield Line(number, ordinal, raw.removesuffix(b"\n").removesuffix(b"\r"), too_long)
            ordinal += 1
