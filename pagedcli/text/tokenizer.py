"""The tokenizer of a model: text to ids, ids to text, chat messages to text. May import tokenizers, `errors`, `text`.

Encoding is the tokenizers library's. Decoding is one code for whole outputs and for streams (`text.detokenizer`), so
that the two cannot differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedcli.errors import RequestError
from pagedcli.text.detokenizer import Detokenizer, StreamDetokenizer, WholeDetokenizer
from pagedcli.text.gguf_tokenizer import gguf_parts
from pagedcli.text.hf_folder import folder_parts
from pagedcli.text.parts import TokenizerParts
from pagedcli.text.pieces import Piece, decoder_shape

if TYPE_CHECKING:
    from pagedcli.text.chat import ChatTemplates


class Tokenizer:
    """Text to ids and back.

    Attributes:
        vocab_size: One more than the highest token id.
        eos_token_ids: Ids that end an output: those of the generation settings first, then the tokenizer's own.
        bos_token_id: The start token, whether or not `encode` adds it.
        special_ids: Ids of special tokens, left out of texts by default.
        chat_template: The default chat template, if the model has one.
        special_tokens: Texts of special tokens by name (`bos_token`, `eos_token`, ...).
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._prefix = list(parts.prefix_ids)
        self._suffix = list(parts.suffix_ids)
        decoder = parts.backend.decoder
        self._shape = decoder_shape(None if decoder is None else json.loads(decoder.__getstate__()))
        self._pieces: dict[int, Piece | None] = {}
        self._template_sources = dict(parts.chat_templates)
        added = parts.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = 1 + max(parts.backend.get_vocab(with_added_tokens=True).values())
        self.eos_token_ids = parts.eos_token_ids
        self.special_tokens = dict(parts.special_tokens)
        bos = parts.special_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else parts.backend.token_to_id(bos)

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face model folder; CheckpointError where it cannot be read."""
        return cls(folder_parts(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer that a GGUF file describes in its `tokenizer.*` keys; CheckpointError if it cannot."""
        return cls(gguf_parts(metadata))

    @property
    def chat_template(self) -> str | None:
        """The default chat template, or None."""
        return self._template_sources.get("default")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, with the start token (and others) that the model wants around it.

        Text made by a chat template names its start token itself: encode it with `add_special_tokens=False`.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:  # not text, or not Unicode text
            raise RequestError(_why_not_text(text), code="invalid_value", field="prompt") from error
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def encode_inside(self, text: str) -> list[int]:
        """Ids of a text as it is encoded in the middle of another one: without a start token or prefix space."""
        line_end = self.encode("\n", add_special_tokens=False)
        ids = self.encode("\n" + text, add_special_tokens=False)
        known = ids[: len(line_end)] == line_end
        return ids[len(line_end) :] if known else self.encode(text, add_special_tokens=False)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Ids of a conversation (`apply_chat_template`, then `encode` without another start token)."""
        return self.encode(self.apply_chat_template(messages, **options), add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; ids without a token give no text."""
        if self._shape.kind not in ("bytes", "pieces"):
            return self._library_decode(ids, skip_special_tokens)
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([*map(detokenizer.push, ids), detokenizer.finish()])

    def detokenizer(self, *, skip_special_tokens: bool = True, continuing: bool = False) -> Detokenizer:
        """A detokenizer for one output.

        Args:
            skip_special_tokens: Leave special tokens out of the text.
            continuing: The output goes on after a prompt: a SentencePiece tokenizer then keeps the space before the
                first word, which `decode` of the output alone would strip.
        """
        if self._shape.kind in ("bytes", "pieces"):
            piece = self._piece_unless_special if skip_special_tokens else self._piece
            return StreamDetokenizer(self._token, piece, self._shape, continuing=continuing)
        stable = self._shape.kind == "stable"
        return WholeDetokenizer(lambda ids: self._library_decode(ids, skip_special_tokens), stable=stable)

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes that a token adds inside a text, or None if it has none of its own."""
        if self._shape.kind not in ("bytes", "pieces"):
            return None
        piece = self._piece(token_id)
        return piece.encode("utf-8") if isinstance(piece, str) else piece

    @cached_property
    def ids_by_bytes(self) -> dict[bytes, int]:
        """The lowest id of each byte string that a token adds inside a text; special tokens are left out."""
        ids = [token_id for token_id in range(self.vocab_size) if token_id not in self.special_ids]
        return {data: token_id for token_id in reversed(ids) if (data := self.token_bytes(token_id))}

    def token_text(self, token_id: int) -> str:
        """What to show for a token, for example beside its log-probability; "" for an id without a token."""
        data = self.token_bytes(token_id)
        return (self._token(token_id) or "") if data is None else data.decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **options: Any,
    ) -> str:
        """Prompt text of a conversation; see `ChatTemplates.render` for the options."""
        return self._templates.render(
            messages, template=template, add_generation_prompt=add_generation_prompt, **options
        )

    @cached_property
    def _templates(self) -> ChatTemplates:
        """Made when the first conversation comes: jinja2 takes as long to import as the tokenizer to load."""
        from pagedcli.text.chat import ChatTemplates

        return ChatTemplates(self._template_sources, self.special_tokens)

    def _token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def _piece(self, token_id: int) -> Piece | None:
        if token_id not in self._pieces:
            token = self._token(token_id)
            self._pieces[token_id] = None if token is None else self._shape.piece(token)
        return self._pieces[token_id]

    def _piece_unless_special(self, token_id: int) -> Piece | None:
        return None if token_id in self.special_ids else self._piece(token_id)

    def _library_decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)


def _why_not_text(text: object) -> str:
    if not isinstance(text, str):
        return f"prompt is a {type(text).__name__}: it must be text"
    for index, character in enumerate(text):
        if 0xD800 <= ord(character) < 0xE000:
            return f"prompt has half a surrogate pair at character {index}: it is not Unicode text"
    return "prompt cannot be encoded"
