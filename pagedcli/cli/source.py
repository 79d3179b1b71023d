"""Where rows come from: a file, a pipe, stdin, or a prompt on the command line. Standard library and this package.

For an output that can be gone on with, the input must be there again and be the same: what cannot be read twice is
copied to a temporary file first, and everything is hashed before the first row runs.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from pagedcli.cli.lines import read_lines
from pagedcli.errors import ConfigError

_PIECE_BYTES = 1 << 20


@dataclass(slots=True)
class Source:
    """An open input; a context that closes it.

    Attributes:
        name: For messages.
        file: Its bytes, from where they are read next.
        is_text: Every line is a prompt.
        num_rows: Rows, if they were counted.
    """

    name: str
    file: BinaryIO
    is_text: bool = False
    num_rows: int | None = None
    _stamp: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A reader thread may still wait in a pipe; closing under it would wait for it.
        if self.file.seekable():
            self.file.close()

    def count(self) -> None:
        """Count the rows of what can be read twice."""
        if self.file.seekable():
            self.num_rows = sum(1 for _ in read_lines(self.file))
            self.file.seek(0)

    def pin(self) -> dict[str, Any]:
        """Make the input one that can be read twice; what the manifest keeps of it."""
        if not self.file.seekable():
            spool = tempfile.TemporaryFile()  # noqa: SIM115 - the source closes it
            shutil.copyfileobj(self.file, spool, _PIECE_BYTES)
            spool.seek(0)
            self.file = spool
        self._stamp = self._stat()
        digest, size = hashlib.sha256(), 0
        while piece := self.file.read(_PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
        self.file.seek(0)
        self.count()
        return {"sha256": digest.hexdigest(), "bytes": size, "format": "text" if self.is_text else "jsonl"}

    def check_unchanged(self) -> None:
        """ConfigError if the file is not the one that `pin` hashed: its rows may be of both."""
        if self._stat() != self._stamp:
            raise ConfigError(f"{self.name}: was changed while it was read: run again with --overwrite")

    def _stat(self) -> tuple[int, int] | None:
        try:
            found = os.fstat(self.file.fileno())
        except io.UnsupportedOperation:
            return None
        return found.st_size, found.st_mtime_ns


def open_source(file: str | None, prompt: str | None) -> Source:
    """Open what the command line names; ConfigError if that cannot be read."""
    if prompt is not None:
        line = json.dumps({"prompt": prompt}) + "\n"
        return Source("-p", io.BytesIO(line.encode()))
    assert file is not None
    if file == "-":
        return Source("stdin", _stdin())
    path = Path(file)
    try:
        opened = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}: give a JSONL or .txt file, or - for stdin") from error
    return Source(file, opened, is_text=path.suffix.lower() == ".txt")


def _stdin() -> BinaryIO:
    """A file of our own on stdin: a thread that waits in it does not hold the interpreter's up at the end."""
    if sys.stdin is None:
        raise ConfigError("stdin is closed: give a file")
    try:
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    except io.UnsupportedOperation:
        return sys.stdin.buffer
