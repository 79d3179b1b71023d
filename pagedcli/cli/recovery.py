"""What an earlier run of the same command left: which rows are done, and where writing goes on.

May import `errors` and this package. A last line without line feed was torn by a kill and is dropped; anything else
that is no row was written by someone else, and is refused rather than lost.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedcli.cli.files import atomic_write, open_appender
from pagedcli.cli.journal import Journal, OrderedSink, RowSink, UnorderedSink, entry_prefix, journal_entry
from pagedcli.cli.output_rows import error_line, is_error_row, row_id
from pagedcli.cli.rows import Row
from pagedcli.errors import ConfigError

_START_ANEW = "--overwrite starts anew"


def journal_path(output: Path) -> Path:
    """Beside the output."""
    return output.with_name(output.name + ".journal")


def _id_digest(value: Any) -> int:
    text = json.dumps(value, ensure_ascii=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A row in the output: its place, its bytes and what they say."""

    index: int
    offset: int
    data: bytes
    value: dict[str, Any]


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def stored_rows(path: Path) -> Iterator[StoredRow]:
    """Every whole row of the output; ConfigError at a line that is none."""
    if not path.exists():
        return
    offset = 0
    with path.open("rb") as file:
        for index, data in enumerate(file):
            if not data.endswith(b"\n"):
                return
            value = _object(data)
            if value is None:
                raise ConfigError(f"{path}: line {index + 1} is no output row of this command: {_START_ANEW}")
            yield StoredRow(index, offset, data, value)
            offset += len(data)


@dataclass(frozen=True, slots=True)
class JournalRow:
    """An entry of the journal: the row's ordinal, its place in the file, its bytes, and what they say."""

    ordinal: int
    offset: int
    data: bytes
    value: dict[str, Any]


def journal_rows(path: Path) -> Iterator[JournalRow]:
    """Entries up to the first that is not whole."""
    if not path.exists():
        return
    offset = 0
    with path.open("rb") as file:
        for data in file:
            entry = _object(data) if data.endswith(b"\n") else None
            if entry is None or not isinstance(entry.get("n"), int) or not isinstance(entry.get("row"), dict):
                return
            start = len(entry_prefix(entry["n"]))
            yield JournalRow(entry["n"], offset + start, data[start:-2], entry["row"])
            offset += len(data)


@dataclass(slots=True)
class Done:
    """Rows that need not run, asked by the thread that reads the input; fixed before it starts.

    Attributes:
        output: For messages.
        ids: In order: digest of the id of each row in the output.
        ordinals: In order: rows in the journal.
        by_id: Unordered: digests of the ids of served rows in the output.
        by_line: Unordered: lines of the error rows in the output.
        num_rows: Rows done.
        num_errors: Error rows among them.
    """

    output: Path
    ids: array[int] = field(default_factory=lambda: array("Q"))
    ordinals: frozenset[int] = frozenset()
    by_id: set[int] = field(default_factory=set)
    by_line: set[int] = field(default_factory=set)
    num_rows: int = 0
    num_errors: int = 0

    def has(self, row: Row) -> bool:
        """Whether the row is done; ConfigError if the output has another row in its place."""
        if row.ordinal < len(self.ids):
            if self.ids[row.ordinal] != _id_digest(row.id):
                raise ConfigError(
                    f"{self.output}: row {row.ordinal + 1} is not the one of line {row.line} of the input: "
                    f"the output was changed; {_START_ANEW}"
                )
            return True
        if row.ordinal in self.ordinals or row.line in self.by_line:
            return True
        is_later_one = row.error is not None and row.error.code == "duplicate_id"
        return not is_later_one and _id_digest(row.id) in self.by_id


def recover_ordered(output: Path) -> tuple[Done, RowSink]:
    """Go on with an output in input order."""
    done, size = Done(output), 0
    for row in stored_rows(output):
        done.ids.append(_id_digest(row_id(row.value)))
        done.num_errors += is_error_row(row.value)
        size = row.offset + len(row.data)
    entries: dict[int, tuple[int, int]] = {}
    journal_size = 0
    for entry in journal_rows(journal_path(output)):
        journal_size = entry.offset + len(entry.data) + 2
        if entry.ordinal >= len(done.ids) and entry.ordinal not in entries:
            entries[entry.ordinal] = (entry.offset, len(entry.data))
            done.num_errors += is_error_row(entry.value)
    done.ordinals = frozenset(entries)
    done.num_rows = len(done.ids) + len(entries)
    journal = Journal(open_appender(journal_path(output), journal_size), entries)
    return done, OrderedSink(open_appender(output, size), journal, len(done.ids), done.num_errors)


def recover_unordered(output: Path) -> tuple[Done, RowSink]:
    """Go on with an output in which rows stand as they finished."""
    done, size = Done(output), 0
    for row in stored_rows(output):
        line = error_line(row.value)
        if is_error_row(row.value) and line is not None:
            done.by_line.add(line)
        else:
            done.by_id.add(_id_digest(row_id(row.value)))
        done.num_errors += is_error_row(row.value)
        done.num_rows += 1
        size = row.offset + len(row.data)
    return done, UnorderedSink(open_appender(output, size), done.num_rows, done.num_errors)


def forget_errors_unordered(output: Path) -> None:
    """Take the error rows out, so that they run again."""
    atomic_write(output, (row.data for row in stored_rows(output) if not is_error_row(row.value)))


def forget_errors_ordered(output: Path) -> None:
    """Cut the output at its first error row; the good rows after it go into the journal, to wait for their turn.

    The journal is replaced before the output is cut: a kill between the two leaves the output whole, and entries of
    the journal for rows that the output has are ignored.
    """
    errors = (row for row in stored_rows(output) if is_error_row(row.value))
    first = next(errors, None)
    atomic_write(journal_path(output), _good_entries(output, first))
    if first is not None:
        open_appender(output, first.offset).close()


def _good_entries(output: Path, first_error: StoredRow | None) -> Iterator[bytes]:
    """Journal lines for the good rows behind the first error row, and for those that wait already."""
    count = 0
    for row in stored_rows(output):
        count = row.index + 1
        if first_error is not None and row.index > first_error.index and not is_error_row(row.value):
            yield journal_entry(row.index, row.data)
    for entry in journal_rows(journal_path(output)):
        if entry.ordinal >= count and not is_error_row(entry.value):
            yield journal_entry(entry.ordinal, entry.data)
