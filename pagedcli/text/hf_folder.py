"""The tokenizer files of a Hugging Face model folder. May import tokenizers, `errors` and `text.parts`.

As in transformers 5, `tokenizer.json` decides what is added around a text (its post-processor, not `add_bos_token`),
and `tokenizer_config.json` names the special tokens and may add tokens. The ids that end an output are those of
`generation_config.json` (without it: `config.json`) and the tokenizer's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pagedcli.errors import CheckpointError, how_to_install
from pagedcli.text.parts import TokenizerParts, checked, try_out, unique

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def folder_parts(path: Path) -> TokenizerParts:
    """Read a model folder's tokenizer; CheckpointError names the file and what is wrong with it."""
    backend = _read_backend(path)
    config = _read_config(path)
    _add_tokens(backend, config, path)
    if not backend.get_vocab_size():
        raise CheckpointError(f"{path / 'tokenizer.json'} has an empty vocabulary: it cannot encode anything")
    try_out(str(path / "tokenizer.json"), backend)
    special = _special_tokens(config, path)
    return TokenizerParts(
        backend=backend,
        eos_token_ids=_eos_token_ids(backend, special, path),
        special_tokens={name: token.content for name, token in special.items()},
        chat_templates=_chat_templates(config, path),
    )


def _read_backend(path: Path) -> Backend:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{path} has no tokenizer.json: convert its tokenizer with transformers ({how_to_install('convert')}), "
            f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
        )
    backend = checked(str(file), lambda: Backend.from_str(_read_text(file)))
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _read_object(file: Path) -> dict[str, Any]:
    """A JSON object; {} where there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}: it must be an object")
    return value


def _read_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json; older folders keep their special tokens in special_tokens_map.json, which then counts."""
    config = _read_object(path / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_object(path / "special_tokens_map.json")
    if not config.get("extra_special_tokens"):
        config["extra_special_tokens"] = config.pop("additional_special_tokens", None) or []
    return config


def _token(value: object, where: str) -> AddedToken:
    """A special token, stored as its text or as an object with flags."""
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(content, str):
        raise CheckpointError(f"{where} is {value!r}: it must be a text or an object with a text as content")
    flags = {name: bool(value[name]) for name in TOKEN_FLAGS if name in value}
    return AddedToken(content, **flags)


def _special(token: AddedToken) -> AddedToken:
    """The same token, marked as special: one that the configuration names is left out of texts."""
    flags = {name: getattr(token, name) for name in TOKEN_FLAGS}
    return AddedToken(token.content, **{**flags, "special": True})


def _special_tokens(config: Mapping[str, Any], path: Path) -> dict[str, AddedToken]:
    """Named special tokens: the usual names and any other `..._token` of the configuration."""
    where = path / "tokenizer_config.json"
    extra = config.get("extra_special_tokens")
    named = {**config, **extra} if isinstance(extra, dict) else dict(config)
    return {
        name: _token(value, f"{where}: {name}")
        for name, value in named.items()
        if value is not None
        and name.endswith("_token")
        and (name in NAMED_TOKENS or isinstance(value, (str, dict)))
    }


def _add_tokens(backend: Backend, config: Mapping[str, Any], path: Path) -> None:
    """Register the tokens that the configuration adds or marks as special, in transformers' order."""
    where = path / "tokenizer_config.json"
    listed = config.get("added_tokens_decoder", {})
    extra = config.get("extra_special_tokens", [])
    if not isinstance(listed, dict) or not all(key.isdecimal() for key in listed):
        raise CheckpointError(f"{where}: added_tokens_decoder must be an object of tokens by id")
    if not isinstance(extra, (dict, list)):
        raise CheckpointError(f"{where}: extra_special_tokens must be a list or an object")
    ordered = sorted(listed.items(), key=lambda item: int(item[0]))
    added = [_token(value, f"{where}: token {token_id}") for token_id, value in ordered]
    named = [token for token in _special_tokens(config, path).values() if token.content]
    extras = (
        [_token(value, f"{where}: extra_special_tokens") for value in extra]
        if isinstance(extra, list)
        else []
    )
    checked(str(where), lambda: backend.add_tokens(added))
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    new = [known.get(token.content, token) for token in extras]
    special = [_special(known.get(token.content, token)) for token in named]
    checked(str(where), lambda: backend.add_tokens([*special, *new]))
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))


def _eos_token_ids(backend: Backend, special: Mapping[str, AddedToken], path: Path) -> tuple[int, ...]:
    file = path / "generation_config.json"
    if not file.is_file():
        file = path / "config.json"
    value = _read_object(file).get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise CheckpointError(
            f"{file}: eos_token_id is {value!r}: it must be a token id or a list of token ids"
        )
    own = backend.token_to_id(special["eos_token"].content) if "eos_token" in special else None
    return unique(ids + ([] if own is None else [own]))


def _chat_templates(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Templates by name: files of their own count before those in the configuration."""
    files = {"default": path / "chat_template.jinja"} if (path / "chat_template.jinja").is_file() else {}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if files:
        return {name: _read_text(file) for name, file in files.items()}
    value = config.get("chat_template")
    where = f"{path / 'tokenizer_config.json'}: chat_template"
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    named = value if isinstance(value, dict) else {} if value is None else {"default": value}
    if not all(isinstance(item, str) for pair in named.items() for item in pair):
        raise CheckpointError(f"{where} must be a text or a list of objects with name and template")
    return named
