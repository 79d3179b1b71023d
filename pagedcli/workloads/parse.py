"""One way to name any workload: a kind with its lengths, or a file. Standard library only and `errors`.

- mixed: prompts of 32 to 256 tokens, outputs of 16 to 256; random:32-256:16-256 is the same with other ranges
- fixed:PROMPT:OUTPUT: every request alike
- shared-prefix:512:16-64:16-64: a common prefix, then the prompt's own tokens, then the output
- chats:4:16-64:16-64: conversations of so many turns
- a file: ShareGPT JSON, OpenAI batch JSONL, our rows, Azure's CSV, Mooncake's JSONL

What stands after a colon may be left out from the end, where there is a default.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from pagedcli.workloads.fields import MAX_TOKENS, WorkloadError, read_object
from pagedcli.workloads.files import Encode, Reading, jsonl_requests, sharegpt_requests
from pagedcli.workloads.requests import WorkloadRequest, chats, mixed_lengths, shared_prefix
from pagedcli.workloads.traces import (
    AZURE_COLUMNS,
    TokenSource,
    azure_requests,
    from_zero,
    mooncake_requests,
)

KINDS = ("mixed", "fixed", "random", "shared-prefix", "chats")
DEFAULT_REQUESTS = 32
DEFAULT_OUTPUT = 128
MAX_DRAWN = 100_000_000
"""Tokens of all requests of a kind, at most: a few GiB."""


def workload_name(given: str | None) -> str:
    """What `--workload` says; the default one where it is left out."""
    return "mixed" if given is None else given


def parse_workload(
    text: str,
    *,
    vocab_size: int,
    seed: int = 0,
    num_requests: int | None = None,
    first_token: int = 0,
    encode: Encode | None = None,
    text_only: bool = False,
    default_output: int = DEFAULT_OUTPUT,
    max_turns: int | None = None,
    length_scale: float = 1.0,
    time_scale: float = 1.0,
) -> list[WorkloadRequest]:
    """The requests that a text names; the same arguments give the same ones.

    Args:
        text: As at the top of this module.
        vocab_size: Token ids are below it.
        seed: Of lengths and token ids that are drawn.
        num_requests: So many; None: all of a file, 32 of a kind.
        first_token: Smallest id that is drawn.
        encode: Makes token ids of texts, for files that hold texts.
        text_only: Without `encode`, leave texts as they are: such requests have no token ids.
        default_output: Output tokens where a file says nothing.
        max_turns: Turns of a file's conversation at most.
        length_scale: Makes the prompts and outputs of a trace shorter; other workloads take 1 only.
        time_scale: Makes the gaps between arrivals shorter: 0.5 is twice as fast.

    Raises:
        WorkloadError: There is no such kind or file, or the file is malformed: names file, line and field; or
            lengths are to be scaled that are no trace's.
    """
    if not 0 <= first_token < vocab_size:
        raise WorkloadError(f"token ids from {first_token} to {vocab_size - 1}: there are none")
    kind, *parts = text.split(":")
    if kind in KINDS:
        _refuse_scale(text, length_scale)
        return _of_kind(
            kind,
            _Parts(text, parts),
            DEFAULT_REQUESTS if num_requests is None else num_requests,
            seed,
            vocab_size,
            first_token,
        )
    reading = Reading(TokenSource(seed, first_token, vocab_size), encode, default_output, max_turns)
    requests = _read(Path(text), reading, length_scale)
    taken = list(requests if num_requests is None else islice(requests, num_requests))
    _check(text, taken, has_texts=encode is not None or text_only)
    return _in_order(taken, time_scale)


@dataclass(slots=True)
class _Parts:
    """What stands between the colons."""

    whole: str
    parts: list[str]

    def take(self, default: tuple[int, int] | None) -> tuple[int, int]:
        """The next range, such as 16-64 or 64."""
        if not self.parts:
            if default is None:
                raise self.wrong()
            return default
        low, _, high = self.parts.pop(0).partition("-")
        if not all(part.isascii() and part.isdigit() and len(part) < 9 for part in (low, high or low)):
            raise self.wrong()
        first, last = int(low), int(high or low)
        if not 1 <= first <= last <= MAX_TOKENS:
            told = f"{low}-{high}" if high else low
            raise WorkloadError(
                f"workload {self.whole!r}: {told}: give a number from 1 to {MAX_TOKENS}, or a range such as 16-64"
            )
        return first, last

    def one(self, default: int) -> int:
        """The next number."""
        first, last = self.take((default, default))
        if first != last:
            raise WorkloadError(f"workload {self.whole!r}: {first}-{last}: give one number there")
        return first

    def end(self) -> None:
        """Nothing may be left."""
        if self.parts:
            raise self.wrong()

    def wrong(self) -> WorkloadError:
        return WorkloadError(
            f"workload {self.whole!r}: give mixed, fixed:PROMPT:OUTPUT, random:32-256:16-256, shared-prefix:512, "
            "chats:TURNS or a file"
        )


def _bound(name: str, num: int, tokens: int) -> None:
    """Whether memory is likely to hold what is drawn."""
    if num * tokens > MAX_DRAWN:
        raise WorkloadError(
            f"workload {name!r}: {num} requests of up to {tokens} tokens: {MAX_DRAWN} tokens in all are the most, "
            f"so give at most {MAX_DRAWN // tokens} requests"
            if tokens <= MAX_DRAWN
            else f"workload {name!r}: a request of up to {tokens} tokens: {MAX_DRAWN} are the most"
        )


def _of_kind(
    kind: str, parts: _Parts, num: int, seed: int, vocab_size: int, first_token: int
) -> list[WorkloadRequest]:
    wanted = {"seed": seed, "vocab_size": vocab_size, "first_token": first_token}
    if kind == "shared-prefix":
        prefix, prompt, output = parts.one(512), parts.take((16, 64)), parts.take((16, 64))
        parts.end()
        _bound(parts.whole, num, prefix + prompt[1] + output[1])
        return shared_prefix(num, prefix_tokens=prefix, prompt_tokens=prompt, output_tokens=output, **wanted)
    if kind == "chats":
        turns, prompt, output = parts.one(4), parts.take((16, 64)), parts.take((16, 64))
        parts.end()
        _bound(parts.whole, num, turns * (turns + 1) // 2 * (prompt[1] + output[1]))
        return chats(num, turns=turns, prompt_tokens=prompt, output_tokens=output, **wanted)
    defaults: tuple[tuple[int, int] | None, ...] = (None, None)
    if kind == "mixed":
        defaults = ((32, 256), (16, 256))
    prompt, output = parts.take(defaults[0]), parts.take(defaults[1])
    parts.end()
    _bound(parts.whole, num, prompt[1] + output[1])
    requests = mixed_lengths(num, prompt_tokens=prompt, output_tokens=output, **wanted)
    return [replace(request, id=f"{kind}-{index}") for index, request in enumerate(requests)]


def _read(path: Path, reading: Reading, length_scale: float) -> Iterator[WorkloadRequest]:
    """By what the file holds, whatever its name is."""
    name, content = path.name, _content(path)
    start = content.lstrip()[:1]
    if not start:
        raise WorkloadError(f"{name}: is empty: it holds no request")
    if start == "[":
        _refuse_scale(name, length_scale)
        return sharegpt_requests(name, _entries(name, content), reading)
    lines = content.split("\n")
    first = next((line for line in lines if line.strip()), "")
    if start != "{":
        if not any(column in first for column in AZURE_COLUMNS):
            raise WorkloadError(
                f"{name}, line 1: neither JSON nor a CSV header with {', '.join(AZURE_COLUMNS)}"
            )
        return from_zero(azure_requests(name, lines, reading.tokens, length_scale=length_scale))
    if read_object(f"{name}, line {1 + lines.index(first)}", first).has("hash_ids"):
        return from_zero(mooncake_requests(name, lines, reading.tokens, length_scale=length_scale))
    _refuse_scale(name, length_scale)
    return jsonl_requests(name, lines, reading)


def _refuse_scale(name: str, length_scale: float) -> None:
    """Texts cannot be made longer or shorter, and a kind has its lengths in its name."""
    if length_scale != 1:
        raise WorkloadError(f"workload {name!r}: only the lengths of Azure and Mooncake traces can be scaled")


def _content(path: Path) -> str:
    if path.is_char_device() or path.is_block_device():
        raise WorkloadError(f"workload {str(path)!r}: is a device: give a file")
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise WorkloadError(
            f"workload {str(path)!r}: no such file; the kinds are {', '.join(KINDS)}"
        ) from error
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path.name}: not UTF-8 at byte {error.start}") from error
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        told = getattr(error, "strerror", None) or error
        raise WorkloadError(f"workload {str(path)[:60]!r}: cannot be read: {told}") from error


def _entries(name: str, content: str) -> Sequence[object]:
    try:
        entries: list[object] = json.loads(content)
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{name}, line {error.lineno}: not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{name}: not JSON that can be read: {error}") from error
    return entries


def _check(name: str, requests: Sequence[WorkloadRequest], *, has_texts: bool) -> None:
    """Ids are unique, and turns stand after those that they follow."""
    if not requests:
        raise WorkloadError(f"{name}: holds no request")
    seen: set[str] = set()
    for request in requests:
        if request.id in seen:
            raise WorkloadError(f"{name}: id {request.id!r} occurs twice: ids must differ")
        if request.follows is not None and request.follows not in seen:
            raise WorkloadError(
                f"{name}: id {request.id!r} follows {request.follows!r}, which is not above it"
            )
        if not request.prompt_token_ids and not has_texts:
            raise WorkloadError(f"{name}: holds texts: a tokenizer is needed for them")
        seen.add(request.id)


def _in_order(requests: Sequence[WorkloadRequest], time_scale: float) -> list[WorkloadRequest]:
    """By arrival, which is scaled; a turn has the arrival of its conversation."""
    arrivals: dict[str, float] = {}
    moved = []
    for request in requests:
        earlier = request.follows
        due = request.arrival_s * time_scale if earlier is None else arrivals[earlier]
        arrivals[request.id] = due
        moved.append(replace(request, arrival_s=due))
    return sorted(moved, key=lambda request: request.arrival_s)
