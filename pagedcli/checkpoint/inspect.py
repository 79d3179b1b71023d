"""Judges a model folder or GGUF file without running it: `paged doctor MODEL`.

Imports `errors` and the readers. Which tensors a model needs is known above this layer, so that it comes as an
argument. Nothing raises: what would stop the model from running becomes a finding of level "refused".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pagedcli.checkpoint.base import Checkpoint
from pagedcli.checkpoint.gguf_checkpoint import GGUFCheckpoint
from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.config_file import show_bytes
from pagedcli.errors import PagedError

Level = Literal["ok", "note", "warning", "refused"]
Shapes = Mapping[str, tuple[int, ...]]

_SHOWN = 5  # names listed before "and N more"
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the judgement; "refused" means that the model will not run as it is."""

    level: Level
    message: str


def judge(
    path: Path,
    *,
    expected_shapes: Callable[[Mapping[str, Any]], Shapes] | None = None,
    check: Callable[[Checkpoint], None] | None = None,
    page_size: int = 16,
) -> list[Finding]:
    """What is in a model, and whether it will run.

    Args:
        path: Model folder or GGUF file.
        expected_shapes: From the config to the tensors that the model needs; may raise PagedError.
        check: Any further check; it raises PagedError for a model that will be refused.
        page_size: Tokens in a page of KV.
    """
    try:
        checkpoint = open_checkpoint(path)
    except PagedError as error:
        return [Finding("refused", str(error))]
    findings = [*_describe(checkpoint), *_tensors(checkpoint, expected_shapes)]
    if check is not None and not any(finding.level == "refused" for finding in findings):
        findings += _guarded(lambda: check(checkpoint))
    return [*findings, *_tokenizer(checkpoint), *_memory(checkpoint, page_size)]


def _guarded(action: Callable[[], None]) -> list[Finding]:
    try:
        action()
    except PagedError as error:
        return [Finding("refused", str(error))]
    return []


def _describe(checkpoint: Checkpoint) -> Iterator[Finding]:
    config = checkpoint.config
    kind = "safetensors folder" if checkpoint.format == "safetensors" else "GGUF file"
    yield Finding("ok", f"format: {kind}, {show_bytes(checkpoint.stored_bytes())} of weights")
    names = config.get("architectures")
    family = names[0] if isinstance(names, list) and names else f"model_type {config.get('model_type')!r}"
    tied = ", tied head" if config.get("tie_word_embeddings") else ""
    yield Finding("ok", f"family: {family}, {_num_parameters(checkpoint) / 1e6:,.1f} M parameters{tied}")
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    given = [f"{name} {config[name]}" for name in (*sizes, "max_position_embeddings") if name in config]
    yield Finding("ok", f"sizes: {', '.join(given)}")
    yield Finding("ok", f"dtype: {_stored(checkpoint)}")
    if (found := checkpoint.quantization) is not None:
        yield Finding("ok", f"quantization: {found.detail}, {found.bits_per_weight:.2f} bits per weight")
        yield from (Finding("note", f"quantization: {note}") for note in found.notes)


def _stored(checkpoint: Checkpoint) -> str:
    dtype = checkpoint.config.get("torch_dtype", "unknown")
    if not isinstance(checkpoint, GGUFCheckpoint):
        return f"stored as {dtype}"
    kinds = Counter(checkpoint.kind(name) for name in checkpoint.names())
    return (
        f"stored as {', '.join(f'{kind} ({n})' for kind, n in kinds.most_common())}; auto runs it as {dtype}"
    )


def _tensors(
    checkpoint: Checkpoint, expected_shapes: Callable[[Mapping[str, Any]], Shapes] | None
) -> list[Finding]:
    present = set(checkpoint.names())
    if expected_shapes is None:
        return [Finding("ok", f"tensors: {len(present)}, all headers valid")]
    try:
        expected = expected_shapes(checkpoint.config)
    except PagedError as error:
        return [Finding("refused", str(error))]
    missing = [name for name in expected if name not in present]
    extra = sorted(present - set(expected))
    wrong = [
        f"{name} {list(checkpoint.shape(name))} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in present and checkpoint.shape(name) != shape
    ]
    findings = []
    if missing:
        findings.append(Finding("refused", f"tensors: {len(missing)} missing: {_some(missing)}"))
    if wrong:
        findings.append(Finding("refused", f"tensors: {len(wrong)} of another shape: {_some(wrong)}"))
    if not findings:
        findings.append(
            Finding("ok", f"tensors: all {len(expected)} are there, with the shapes of the config")
        )
    if extra:
        findings.append(Finding("note", f"tensors: {len(extra)} that the model does not use: {_some(extra)}"))
    return findings


def _tokenizer(checkpoint: Checkpoint) -> Iterator[Finding]:
    try:
        tokenizer = checkpoint.load_tokenizer()
    except PagedError as error:
        yield Finding("refused", str(error))
        return
    rows = checkpoint.config.get("vocab_size", tokenizer.vocab_size)
    ends = ", ".join(f"{i} {tokenizer.token_text(i)!r}" for i in tokenizer.eos_token_ids) or "none"
    yield Finding("ok", f"tokenizer: {tokenizer.vocab_size} tokens; ends with {ends}")
    if isinstance(rows, int) and tokenizer.vocab_size > rows:
        yield Finding(
            "warning", f"tokenizer: {tokenizer.vocab_size} tokens, but the embedding has {rows} rows"
        )
    if not tokenizer.eos_token_ids:
        yield Finding("warning", "tokenizer: no end token is known: outputs end only at max_tokens")
    if tokenizer.chat_template is None:
        yield Finding("warning", "chat template: none: chat needs one (--chat-template FILE)")
    else:
        yield Finding("ok", "chat template: present")


def _memory(checkpoint: Checkpoint, page_size: int) -> Iterator[Finding]:
    config = checkpoint.config
    dtype = str(config.get("torch_dtype", "float32"))
    item = _ITEM_BYTES.get(dtype, 4)
    heads: Any = config.get("num_attention_heads")
    kv_heads: Any = config.get("num_key_value_heads") or heads
    hidden: Any = config.get("hidden_size")
    layers: Any = config.get("num_hidden_layers")
    if not all(isinstance(x, int) and x > 0 for x in (heads, kv_heads, hidden, layers)):
        yield Finding("warning", "memory: the config does not say how many layers and heads there are")
        return
    head_dim = config.get("head_dim") or hidden // heads
    token = 2 * layers * kv_heads * head_dim * item
    yield Finding(
        "ok", f"KV: {token:,} bytes a token, {show_bytes(token * page_size)} a page of {page_size} ({dtype})"
    )
    context = config.get("max_position_embeddings")
    message = f"memory: about {_weights(checkpoint, item, dtype)}"
    if isinstance(context, int):
        message += f", and {show_bytes(token * context)} for the KV of one sequence of {context:,} tokens"
    yield Finding("ok", message)


def _weights(checkpoint: Checkpoint, item: int, dtype: str) -> str:
    """Memory of the weights as they run if nothing else is asked for."""
    found = checkpoint.quantization
    if found is None:
        return f"{show_bytes(_num_parameters(checkpoint) * item)} for weights in {dtype}"
    dense = (_num_parameters(checkpoint) - found.num_weights) * item
    total, codes = show_bytes(dense + found.num_bytes), show_bytes(found.num_bytes)
    return f"{total} for weights, {codes} of it as codes, the rest in {dtype}"


def _num_parameters(checkpoint: Checkpoint) -> int:
    return sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
