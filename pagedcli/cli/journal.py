"""Where output rows go: in input order through a journal, or as they finish. May import `errors` and this package.

In order: a row whose turn it is goes to the output, any other into the journal until its turn comes. The output is
at any moment a prefix of the result, and every finished row is in one of the two: exactly once in what is read.
As they finish: rows go straight to the output, which says by itself which ones are there.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from pagedcli.cli.files import Appender, LineFile
from pagedcli.cli.output_rows import encode_row, is_error_row

SYNC_SECONDS = 1.0
_COMPACT_BYTES = 1 << 20
_SUFFIX = b"}\n"


def entry_prefix(ordinal: int) -> bytes:
    """How a journal entry begins; the row follows, then `}` and a line feed."""
    return b'{"n": %d, "row": ' % ordinal


def journal_entry(ordinal: int, row: bytes) -> bytes:
    """A journal line for a row."""
    return entry_prefix(ordinal) + row.removesuffix(b"\n") + _SUFFIX


class RowSink(Protocol):
    """Takes each output row once, in any order."""

    num_rows: int
    num_errors: int

    def put(self, ordinal: int, value: dict[str, Any]) -> None:
        """Take the row of the ordinal-th line."""

    def sync(self, *, force: bool = False) -> None:
        """Bring rows to the disk, if it is time to."""

    def close(self) -> None:
        """Bring everything to the disk and let go of the files."""


class Journal:
    """Finished rows that wait for their turn: (ordinal, row) entries in a file, found by their place in it.

    Args:
        file: Holds the entries, and nothing else.
        entries: Ordinal to (offset of the row, length) for what is there already.
    """

    def __init__(self, file: Appender, entries: dict[int, tuple[int, int]] | None = None) -> None:
        self._file = file
        self._entries = dict(entries or {})

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._entries

    def append(self, ordinal: int, row: bytes) -> None:
        """Keep a row (with its line feed)."""
        offset = self._file.size + len(entry_prefix(ordinal))
        self._file.append(journal_entry(ordinal, row))
        self._entries[ordinal] = (offset, len(row) - 1)

    def take(self, ordinal: int) -> bytes:
        """The row, which the journal then no longer counts as waiting."""
        return self._file.read(*self._entries.pop(ordinal)) + b"\n"

    def compact(self) -> None:
        """Empty the file once nothing waits in it; what was in it must be on the disk elsewhere."""
        if not self._entries and self._file.size > _COMPACT_BYTES:
            self._file.clear()

    def sync(self) -> None:
        """Bring the entries to the disk."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Sink:
    """What both sinks share: the counters and the pace of syncing."""

    def __init__(self, output: LineFile, num_rows: int, num_errors: int) -> None:
        self._output = output
        self.num_rows = num_rows
        self.num_errors = num_errors
        self._synced_at = time.monotonic()

    def _count(self, value: dict[str, Any]) -> None:
        self.num_rows += 1
        self.num_errors += is_error_row(value)

    def sync(self, *, force: bool = False) -> None:
        """Bring rows to the disk at most every `SYNC_SECONDS`."""
        if force or time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self._sync()
            self._synced_at = time.monotonic()

    def _sync(self) -> None:
        self._output.sync()


class UnorderedSink(_Sink):
    """Rows as they finish.

    Args:
        output: Where they go.
        num_rows: Rows that are there already.
        num_errors: Error rows among them.
    """

    def __init__(self, output: LineFile, num_rows: int = 0, num_errors: int = 0) -> None:
        super().__init__(output, num_rows, num_errors)

    def put(self, ordinal: int, value: dict[str, Any]) -> None:
        """Take the row of the ordinal-th line."""
        self._output.append(encode_row(value))
        self._count(value)

    def close(self) -> None:
        """Bring everything to the disk and let go of the file."""
        try:
            self._output.sync()
        finally:
            self._output.close()


class OrderedSink(_Sink):
    """Rows in input order.

    Args:
        output: Holds rows 0 to `next_ordinal - 1`.
        journal: Holds later ones.
        next_ordinal: The row whose turn it is.
        num_errors: Error rows among those in output and journal.
    """

    def __init__(
        self, output: LineFile, journal: Journal, next_ordinal: int = 0, num_errors: int = 0
    ) -> None:
        super().__init__(output, next_ordinal + len(journal), num_errors)
        self._journal = journal
        self._next = next_ordinal
        self._drain()

    def put(self, ordinal: int, value: dict[str, Any]) -> None:
        """Take the row of the ordinal-th line."""
        row = encode_row(value)
        if ordinal == self._next:
            self._output.append(row)
            self._next += 1
            self._drain()
        else:
            self._journal.append(ordinal, row)
        self._count(value)

    def _drain(self) -> None:
        """Move the rows whose turn has come; one that is in both files after a kill is dropped on recovery."""
        while self._next in self._journal:
            self._output.append(self._journal.take(self._next))
            self._next += 1

    def _sync(self) -> None:
        self._output.sync()
        self._journal.compact()
        self._journal.sync()

    def close(self) -> None:
        """Bring everything to the disk and let go of the files."""
        try:
            self._sync()
        finally:
            self._output.close()
            self._journal.close()
