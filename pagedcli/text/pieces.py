"""What each token of a vocabulary contributes to a text, derived from the tokenizer's decoder. Standard library only.

A *piece* is what one token adds: `bytes` belong to a run of UTF-8 that neighbouring tokens may complete, `str` is whole
text. Decoders whose pieces can be told token by token are understood (`DecoderShape.kind` "bytes" and "pieces");
everything else is left to the tokenizers library ("stable", where decoding more never changes earlier text, or
"opaque").
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Piece = bytes | str
ShapeKind = Literal["bytes", "pieces", "stable", "opaque"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The GPT-2 alphabet: the printable character that stands for each byte in a byte-level vocabulary."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = byte_alphabet()
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """How a decoder turns tokens into text.

    Attributes:
        kind: "bytes": byte-level; "pieces": text pieces, with or without byte fallback; see the module for the others.
        replacements: (pattern, content) pairs applied to each token, in order.
        byte_fallback: Tokens such as `<0xEA>` stand for one byte.
        strip: Character removed from the start of the whole text, at most `num_strip` times.
        num_strip: See `strip`.
        drop_first: Character removed wherever it occurs in the first token (Metaspace decoders).
    """

    kind: ShapeKind
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: str = ""
    num_strip: int = 0
    drop_first: str = ""

    def piece(self, token: str) -> Piece:
        """What `token` adds to a text that it does not start."""
        if self.kind == "bytes":
            return byte_level_bytes(token)
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        byte = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return bytes((int(byte[1], 16),)) if byte else token

    def first_piece(self, token: str) -> Piece:
        """What `token` adds at the very start of a text; `strip` is not yet applied."""
        return self.piece(token.replace(self.drop_first, "") if self.drop_first else token)


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a token of a byte-level vocabulary; an added token outside the alphabet is its own UTF-8."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "surrogatepass")


def decoder_shape(state: Mapping[str, Any] | None) -> DecoderShape:
    """The shape of a serialized decoder of the tokenizers library; None: the tokenizer has no decoder."""
    if state is None:
        return DecoderShape("stable")
    parts = list(state["decoders"]) if state["type"] == "Sequence" else [state]
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return DecoderShape("bytes")
    if kinds == ["Metaspace"]:
        return _metaspace_shape(parts[0])
    if kinds in (["WordPiece"], ["BPEDecoder"]):
        return DecoderShape("stable")
    return _sentencepiece_shape(parts)


def _metaspace_shape(part: Mapping[str, Any]) -> DecoderShape:
    space = part["replacement"]
    drop = "" if part.get("prepend_scheme", "always") == "never" else space
    return DecoderShape("pieces", replacements=((space, " "),), drop_first=drop)


def _sentencepiece_shape(parts: list[Mapping[str, Any]]) -> DecoderShape:
    """Replace*, ByteFallback?, Fuse, Strip? in this order; any other sequence is opaque."""
    letter = {"Replace": "R", "ByteFallback": "B", "Fuse": "F", "Strip": "S"}
    letters = "".join(letter.get(part["type"], "?") for part in parts)
    if not re.fullmatch(r"R*B?(FS?)?", letters):
        return DecoderShape("opaque")
    replacements = [(p["pattern"].get("String"), p["content"]) for p in parts if p["type"] == "Replace"]
    strip: Mapping[str, Any] = parts[-1] if letters.endswith("S") else {"content": "", "start": 0, "stop": 0}
    if strip["stop"] or not all(pattern for pattern, _ in replacements):
        return DecoderShape("opaque")
    return DecoderShape("pieces", tuple(replacements), "B" in letters, strip["content"], strip["start"])
