"""From token ids to text, one id at a time. Standard library only; may import `text.pieces`.

Invariant: the concatenation of all that `push` and `finish` return is the decoding of all ids, wherever the calls were
cut; no character is ever split. Only an unfinished UTF-8 sequence is held back. U+FFFD stands for invalid bytes only:
as in the byte-level decoders one for each broken sequence, with byte fallback one for each invalid byte
(SentencePiece's rule; valid characters of the same run of bytes are kept).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from pagedcli.text.pieces import DecoderShape, Piece

_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")


class Detokenizer(Protocol):
    """Turns the ids of one output into text as they come."""

    def push(self, token_id: int) -> str:
        """Take one more id; return the text that has become certain."""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Take more ids; return what `push` would have returned for all of them together."""

    def finish(self) -> str:
        """Return the rest; nothing may be pushed afterwards."""


class StreamDetokenizer:
    """For decoders whose pieces are known token by token: holds back unfinished UTF-8 and nothing else.

    Args:
        token: Text of a token in the vocabulary, or None for an id that has no token or is left out.
        piece: Cached `shape.piece` of a token id, with the same meaning of None.
        shape: The decoder's shape.
        continuing: The ids go on after a prompt, so that nothing is stripped from the start.
    """

    def __init__(
        self,
        token: Callable[[int], str | None],
        piece: Callable[[int], Piece | None],
        shape: DecoderShape,
        *,
        continuing: bool = False,
    ) -> None:
        self._token = token
        self._piece = piece
        self._shape = shape
        self._each_byte = shape.kind == "pieces"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(
            "surrogateescape" if self._each_byte else "replace"
        )
        self._at_start = not continuing
        self._num_strip = 0 if continuing else shape.num_strip

    def push(self, token_id: int) -> str:
        """Take one more id; return the text that has become certain."""
        piece = self._next_piece(token_id)
        if piece is None:
            return ""
        text = self._decode(piece) if isinstance(piece, bytes) else self._decode(b"", final=True) + piece
        return self._strip(text) if self._num_strip else text

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Take more ids; return the text that has become certain."""
        if self._shape.kind != "bytes":
            return "".join(map(self.push, token_ids))
        # The first piece of a byte-level decoder is one like the others, and nothing is stripped.
        return self._decode(b"".join([p for p in map(self._piece, token_ids) if isinstance(p, bytes)]))

    def finish(self) -> str:
        """Return the rest: U+FFFD for what an unfinished character leaves."""
        text = self._decode(b"", final=True)
        return self._strip(text) if self._num_strip else text

    def _next_piece(self, token_id: int) -> Piece | None:
        piece = self._piece(token_id)
        if self._at_start and piece is not None:
            self._at_start = False
            token = self._token(token_id)
            return None if token is None else self._shape.first_piece(token)
        return piece

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        # One replacement character for each byte that surrogateescape has passed on.
        return _ESCAPED_BYTE.sub("\ufffd", text) if self._each_byte and text else text

    def _strip(self, text: str) -> str:
        while text and self._num_strip:
            if text[0] != self._shape.strip:
                self._num_strip = 0
                break
            text = text[1:]
            self._num_strip -= 1
        return text


class WholeDetokenizer:
    """For every other decoder: the library decodes all ids, and what cannot change any more is passed on.

    Args:
        decode: Decodes all ids of the output.
        stable: Decoding more ids never changes the text of the earlier ones; else all is held back until the end.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, stable: bool) -> None:
        self._decode = decode
        self._stable = stable
        self._ids: list[int] = []
        self._num_sent = 0

    def push(self, token_id: int) -> str:
        """Take one more id; return the text that has become certain."""
        self._ids.append(token_id)
        return self._rest() if self._stable else ""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Take more ids; return the text that has become certain."""
        self._ids += token_ids
        return self._rest() if self._stable else ""

    def finish(self) -> str:
        """Return the rest."""
        return self._rest()

    def _rest(self) -> str:
        text = self._decode(self._ids)[self._num_sent :]
        self._num_sent += len(text)
        return text
