"""Writing files so that a kill at any moment leaves either the old or the new. Standard library and `errors` only.

`Appender` never leaves half a line behind an error that it survives; after a kill the last line may be torn, which
`recovery` drops. `atomic_write` replaces a file as a whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self

from pagedcli.errors import ConfigError, PagedError


class OutputError(PagedError):
    """The output cannot be written any more (a full disk, a vanished folder); what was written stays."""


@contextlib.contextmanager
def refusing_os_errors() -> Iterator[None]:
    """What the system refuses before anything was answered is the user's to mend: one line that names the file."""
    try:
        yield
    except OSError as error:
        name = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        raise ConfigError(f"{name}{error.strerror or error}") from error


def write_all(fd: int, data: bytes) -> None:
    """Write every byte; OSError if that fails."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sync_folder(folder: Path) -> None:
    """Make renames and new names in the folder last through a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def atomic_write(path: Path, pieces: Iterable[bytes]) -> None:
    """Replace the file: it has the old content or the new one, never a mixture."""
    draft = path.with_name(path.name + ".tmp")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            for piece in pieces:
                write_all(fd, piece)
            os.fsync(fd)
        finally:
            os.close(fd)
        draft.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}") from error


def is_stream(path: Path) -> bool:
    """Whether the path is a pipe or device, which cannot be gone on with."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


class LineFile(Protocol):
    """Takes whole lines."""

    def append(self, data: bytes) -> None:
        """Write a line, or raise OutputError (BrokenPipeError where a reader went away)."""

    def sync(self) -> None:
        """Bring what was appended to the disk."""

    def close(self) -> None:
        """Take no more."""


class StreamFile:
    """Lines into a pipe, a terminal or a device: each goes out at once."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name

    def append(self, data: bytes) -> None:
        """Write a line."""
        try:
            self._file.write(data)
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"{self._name}: {error.strerror}") from error

    def sync(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        """The stream belongs to whoever opened it."""


class Appender:
    """A file to which whole lines are appended.

    Args:
        fd: Owned by the appender.
        name: For error messages.
        size: Bytes that are there; the file is cut to it.
    """

    def __init__(self, fd: int, name: str, size: int) -> None:
        self._fd = fd
        self._name = name
        self.size = size
        self._dirty = False
        os.ftruncate(fd, size)
        os.lseek(fd, size, os.SEEK_SET)

    def append(self, data: bytes) -> None:
        """Write a line; on failure what was there before stays."""
        try:
            write_all(self._fd, data)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size)
                os.lseek(self._fd, self.size, os.SEEK_SET)
            raise OutputError(f"{self._name}: {error.strerror}; the rows written so far are kept") from error
        self.size += len(data)
        self._dirty = True

    def read(self, offset: int, length: int) -> bytes:
        """Bytes that were appended."""
        return os.pread(self._fd, length, offset)

    def clear(self) -> None:
        """Forget everything."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self.size = 0

    def sync(self) -> None:
        """Bring what was appended to the disk."""
        if self._dirty:
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise OutputError(f"{self._name}: {error.strerror}") from error
        self._dirty = False

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


def open_appender(path: Path, size: int) -> Appender:
    """The file, made if it is not there, cut to `size` bytes."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: give -o a file that can be written") from error
    return Appender(fd, str(path), size)


def open_spool() -> Appender:
    """A file without a name, gone when it is closed."""
    with tempfile.TemporaryFile() as file:
        return Appender(os.dup(file.fileno()), "temporary file", 0)


class OutputLock:
    """Keeps two processes from writing one output; the system releases it however the process ends.

    The lock file is removed on release. A process that got the lock of a removed file takes the new one instead.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self._path = output.with_name(output.name + ".lock")
        self._fd = -1

    def __enter__(self) -> Self:
        while not self._try_lock():
            pass
        return self

    def _try_lock(self) -> bool:
        """Whether the lock was taken on the file that has the name now."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(
                f"{self._output}: {error.strerror}: give -o a file in a folder that exists and can be written"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(
                f"{self._output}: another `paged generate` is writing it: wait for it or give another -o"
            ) from None
        if not self._is_named(fd):
            os.close(fd)
            return False
        self._fd = fd
        return True

    def _is_named(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self._path.stat())
        except FileNotFoundError:
            return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
