"""Takes an answer apart as it comes: head, framing, server-sent events. Standard library only.

Nothing that a server sends may raise anything but `BadAnswer`, or make this grow without limit. An event counts from
the moment at which the piece with its last byte came.
"""

from __future__ import annotations

from collections.abc import Mapping

MAX_HEAD = 65_536
MAX_BODY = 1 << 28
DONE = b"[DONE]"
_MAX_CHUNK_LINE = 1024


class BadAnswer(Exception):
    """What came is no answer in HTTP; the message says why."""


class Head:
    """Status and headers.

    Args:
        data: Up to the empty line.
    """

    def __init__(self, data: bytes) -> None:
        first, *lines = data.split(b"\r\n")
        words = first.split(None, 2)
        if (
            len(words) < 2
            or not words[0].startswith(b"HTTP/1.")
            or not words[1].isdigit()
            or len(words[1]) != 3
        ):
            raise BadAnswer(f"no HTTP: it begins with {first[:40]!r}")
        self.status = int(words[1])
        self.headers: Mapping[str, str] = {
            name.strip().lower().decode("latin-1"): value.strip().decode("latin-1")
            for name, found, value in (line.partition(b":") for line in lines)
            if found
        }

    @property
    def length(self) -> int | None:
        """Content-Length, if it is there."""
        text = self.headers.get("content-length")
        if text is None:
            return None
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            raise BadAnswer(f"Content-Length is {text[:40]!r}")
        return int(text)

    @property
    def is_chunked(self) -> bool:
        """Whether the body comes in chunks."""
        return "chunked" in self.headers.get("transfer-encoding", "").lower()


class Chunks:
    """Undoes chunked transfer encoding, piece by piece."""

    def __init__(self) -> None:
        self.is_over = False
        self._data = bytearray()
        self._left = 0

    def feed(self, data: bytes) -> bytes:
        """What of the body is in this piece."""
        self._data += data
        body = bytearray()
        while not self.is_over:
            if self._left == 0:
                end = self._data.find(b"\r\n")
                if end < 0:
                    if len(self._data) > _MAX_CHUNK_LINE:
                        raise BadAnswer("a chunk has no length")
                    break
                self._left = self._length(bytes(self._data[:end])) + 2
                del self._data[: end + 2]
                self.is_over = self._left == 2
            elif len(self._data) < self._left:
                break
            else:
                body += self._data[: self._left - 2]
                del self._data[: self._left]
                self._left = 0
        return bytes(body)

    @staticmethod
    def _length(line: bytes) -> int:
        digits = line.split(b";")[0].strip()
        try:
            length = int(digits, 16) if len(digits) < 16 and not digits.startswith((b"-", b"+")) else -1
        except ValueError:
            length = -1
        if not 0 <= length <= MAX_BODY:
            raise BadAnswer(f"a chunk has the length {digits[:20]!r}")
        return length


class Events:
    """Server-sent events out of a body, and the body itself for those that are none."""

    def __init__(self) -> None:
        self.found: list[tuple[float, bytes]] = []
        self.start = bytearray()
        self.is_done = False
        self._line = bytearray()
        self._data: list[bytes] = []

    def feed(self, moment: float, body: bytes) -> None:
        """More of the body."""
        if len(self.start) < MAX_HEAD:
            self.start += body[: MAX_HEAD - len(self.start)]
        self._line += body
        if b"\n" not in body:
            return
        *lines, rest = bytes(self._line).split(b"\n")
        self._line = bytearray(rest)
        for line in lines:
            self._take(moment, line.rstrip(b"\r"))

    def end(self, moment: float) -> None:
        """The body is over: what stands at its end without an empty line is an event, too."""
        self._take(moment, bytes(self._line).rstrip(b"\r"))
        self._line.clear()
        self._take(moment, b"")

    def _take(self, moment: float, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            self.found.append((moment, b"\n".join(self._data)))
            self.is_done = self.is_done or self.found[-1][1].strip() == DONE
            self._data = []


class Reader:
    """One answer, fed with what comes over the connection."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self.events = Events()
        self.is_whole = False
        self.num_bytes = 0
        self._early = b""
        self._chunks: Chunks | None = None
        self._missing: int | None = None

    def feed(self, moment: float, data: bytes) -> bool:
        """Take a piece; whether the answer is over with it."""
        self.num_bytes += len(data)
        if self.num_bytes > MAX_BODY:
            raise BadAnswer(f"more than {MAX_BODY >> 20} MiB")
        if self.head is None:
            data = self._read_head(data)
            if self.head is None:
                return False
        body = self._chunks.feed(data) if self._chunks is not None else data
        if self._missing is not None:
            body = body[: self._missing]
            self._missing -= len(body)
        self.events.feed(moment, body)
        self.is_whole = self._missing == 0 or (self._chunks is not None and self._chunks.is_over)
        return self.is_whole

    def close(self, moment: float) -> None:
        """The connection is over; without any framing that is how an answer ends."""
        if self.head is not None and self._chunks is None and self._missing is None:
            self.is_whole = True
        self.events.end(moment)

    def _read_head(self, data: bytes) -> bytes:
        """What is left of the piece when the head is read; heads of interim answers (100) are passed over."""
        self._early += data
        while self.head is None:
            start, found, rest = self._early.partition(b"\r\n\r\n")
            if not found:
                if len(self._early) > MAX_HEAD:
                    raise BadAnswer(f"a head of more than {MAX_HEAD} bytes")
                if not self._early.startswith(b"HTTP/1."[: len(self._early)]):
                    raise BadAnswer(f"no HTTP: it begins with {self._early[:40]!r}")
                return b""
            if len(start) > MAX_HEAD:
                raise BadAnswer(f"a head of more than {MAX_HEAD} bytes")
            head, self._early = Head(start), rest
            if head.status >= 200:
                self.head = head
        self._chunks = Chunks() if self.head.is_chunked else None
        self._missing = self.head.length if self._chunks is None else None
        rest, self._early = self._early, b""
        return rest
