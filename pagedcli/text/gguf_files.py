"""The tokenizer of a GGUF file as Hugging Face files. May import tokenizers, `errors` and `text`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from pagedcli.text.gguf_tokenizer import gguf_parts
from pagedcli.text.parts import TokenizerParts


def tokenizer_files(metadata: Mapping[str, Any], max_length: int | None) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json, by name.

    Args:
        metadata: Of the GGUF file.
        max_length: Tokens that the model was made for.
    """
    parts = gguf_parts(metadata)
    backend = parts.backend
    if parts.prefix_ids or parts.suffix_ids:
        backend = Backend.from_str(backend.to_str())
        backend.post_processor = _around(backend, parts)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **parts.special_tokens,
        "add_bos_token": bool(parts.prefix_ids),
        "add_eos_token": bool(parts.suffix_ids),
        "clean_up_tokenization_spaces": False,
    }
    if max_length is not None:
        config["model_max_length"] = max_length
    if "default" in parts.chat_templates:
        config["chat_template"] = _templates(parts.chat_templates)
    return {
        "tokenizer.json": backend.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }


def _templates(found: Mapping[str, str]) -> str | list[dict[str, str]]:
    if len(found) == 1:
        return found["default"]
    return [{"name": name, "template": text} for name, text in found.items()]


def _around(backend: Backend, parts: TokenizerParts) -> TemplateProcessing:
    """Start and end tokens around a text, as the file wants them."""
    ids = (*parts.prefix_ids, *parts.suffix_ids)
    tokens = {token_id: str(backend.id_to_token(token_id)) for token_id in ids}
    before = [tokens[token_id] for token_id in parts.prefix_ids]
    after = [tokens[token_id] for token_id in parts.suffix_ids]
    single = [*before, "$A", *after]
    pair = [*single, *[f"{piece}:1" for piece in (*before, "$B", *after)]]
    special = [(token, token_id) for token_id, token in tokens.items()]
    return TemplateProcessing(single=single, pair=pair, special_tokens=special)
