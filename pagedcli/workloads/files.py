"""Workload files: conversations as in ShareGPT, OpenAI batch files, and our own rows; and writing those.

Standard library only and `errors`. Texts become token ids by what the caller gives (`Reading.encode`), since a
tokenizer belongs to a model; without one a workload keeps its texts and has no ids, enough to load a server.

A row of ours is a JSON object: `prompt`, `messages`, `prompt_token_ids` or `turns` (a list of texts, one a turn); `id`,
`output_tokens`, `max_tokens`, `answer`, `arrival_s`, `follows`, `new_tokens`, `think_s`. Other fields are labels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagedcli.workloads.fields import Record, WorkloadError, read_object, shown
from pagedcli.workloads.requests import Messages, WorkloadRequest
from pagedcli.workloads.traces import TokenSource

Encode = Callable[[str | Messages], Sequence[int]]
"""Token ids of a text, or of the messages of a chat with the model's template."""
CHARACTERS_PER_TOKEN = 4
"""Where only the length of an answer is wanted and no tokenizer is there."""
_SPEAKERS = {"human": True, "user": True, "gpt": False, "chatgpt": False, "assistant": False, "bard": False}


@dataclass(frozen=True, slots=True)
class Reading:
    """How files are read.

    Attributes:
        tokens: Draws ids where a file has lengths only.
        encode: Makes ids of texts; None: texts stay texts.
        default_output: Output tokens of a request that says nothing about them.
        max_turns: Turns of a conversation at most.
    """

    tokens: TokenSource
    encode: Encode | None
    default_output: int
    max_turns: int | None

    def ids(self, place: str, prompt: str | Messages) -> tuple[int, ...]:
        """Token ids of a prompt; none without a tokenizer."""
        if self.encode is None:
            return ()
        ids = tuple(self.encode(prompt))
        if not ids:
            raise WorkloadError(f"{place}: the prompt has no token: give a longer one")
        return ids

    def answer(self, text: str) -> tuple[int, ...]:
        """Token ids of an answer, at least one; without a tokenizer zeros, as many as such a text has."""
        if self.encode is None:
            return (0,) * max(1, -(-len(text) // CHARACTERS_PER_TOKEN))
        return tuple(self.encode(text)) or self.tokens.draw("empty answer", 1)


def conversation(
    record: Record, name: str, turns: Sequence[tuple[str, str | None]], reading: Reading
) -> Iterator[WorkloadRequest]:
    """A request for each (message, answer or None): each has the turns before it in its prompt."""
    history: tuple[int, ...] = ()
    earlier: str | None = None
    for index, (message, answer) in enumerate(turns[: reading.max_turns]):
        new = reading.ids(record.place, message)
        output = reading.default_output if answer is None else len(reading.answer(answer))
        this = name if len(turns) == 1 else f"{name}-{index}"
        request = WorkloadRequest(this, history + new, output, output, text=message)
        if earlier is not None:
            request = replace(request, follows=earlier, new_tokens=len(new))
        yield request
        if reading.encode is not None:
            stand_in = reading.tokens.draw(f"answer {this}", output)
            history += new + (stand_in if answer is None else reading.answer(answer))
        earlier = this


def sharegpt_requests(name: str, entries: Sequence[object], reading: Reading) -> Iterator[WorkloadRequest]:
    """Of a list of conversations; one without a question is left out."""
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise WorkloadError(f"{name}, entry {number}: {shown(entry)}: give an object")
        yield from sharegpt_conversation(Record(f"{name}, entry {number}", entry), number, reading)


def sharegpt_conversation(record: Record, number: int, reading: Reading) -> Iterator[WorkloadRequest]:
    """Questions with the answers that follow them; what stands before the first question is left out."""
    field = "conversations" if record.has("conversations") else "conversation"
    spoken = record.get(field)
    if not isinstance(spoken, list):
        record.fail(f"{field} is {shown(spoken)}: give a list")
    turns: list[tuple[str, str | None]] = []
    for index, part in enumerate(spoken):
        place = f"{field}[{index}]"
        if not isinstance(part, dict):
            record.fail(f"{place} is {shown(part)}: give an object")
        speaker, text = part.get("from", part.get("role")), part.get("value", part.get("content"))
        if not isinstance(speaker, str):
            record.fail(f"{place}.from is {shown(speaker)}: give text")
        if not text or speaker.lower() not in _SPEAKERS:
            continue
        words = record.as_text(f"{place}.value", text)
        if _SPEAKERS[speaker.lower()]:
            turns.append((words, None))
        elif turns and turns[-1][1] is None:
            turns[-1] = (turns[-1][0], words)
    yield from conversation(record, f"chat-{number}", turns, reading)


def batch_request(record: Record, reading: Reading) -> WorkloadRequest:
    """Of a line of an OpenAI batch file."""
    body = record.get("body")
    if not isinstance(body, dict):
        record.fail(f"body is {shown(body)}: give an object")
    inner = Record(f"{record.place}: body", body)
    limit = "max_completion_tokens" if inner.has("max_completion_tokens") else "max_tokens"
    output = inner.integer(limit, least=1) if inner.has(limit) else reading.default_output
    name = record.string("custom_id")
    if (record.has("url") and record.string("url").endswith("/chat/completions")) or inner.has("messages"):
        messages = inner.messages("messages")
        return WorkloadRequest(name, reading.ids(record.place, messages), output, output, messages=messages)
    if isinstance(inner.get("prompt"), list):
        ids = inner.token_ids("prompt", reading.tokens.end)
        return WorkloadRequest(name, ids, output, output)
    text = inner.string("prompt")
    return WorkloadRequest(name, reading.ids(record.place, text), output, output, text=text)


def row_requests(record: Record, number: int, reading: Reading) -> Iterator[WorkloadRequest]:
    """Of a row of ours."""
    name = _row_id(record, number)
    if record.has("turns"):
        turns = record.get("turns")
        if not isinstance(turns, list) or not turns:
            record.fail(f"turns is {shown(turns)}: give a list of texts")
        texts = [record.as_text(f"turns[{index}]", turn) for index, turn in enumerate(turns)]
        yield from conversation(record, name, [(text, None) for text in texts], reading)
        return
    output, most = _lengths(record, reading)
    request = replace(_prompt(record, name, reading), output_tokens=output, max_tokens=most)
    yield _later(record, request)


def _row_id(record: Record, number: int) -> str:
    name = record.values.get("id", record.values.get("question_id", number))
    if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
        record.fail(f"id is {shown(name)}: give text or a number")
    return str(name)


def _lengths(record: Record, reading: Reading) -> tuple[int, int]:
    most = record.integer("max_tokens", least=1) if record.has("max_tokens") else None
    if record.has("output_tokens"):
        output = record.integer("output_tokens", least=1)
    elif record.has("answer"):
        output = len(reading.answer(record.string("answer")))
    else:
        output = most or reading.default_output
    if most is not None and most < output and record.has("output_tokens"):
        record.fail(f"max_tokens is {most}: output_tokens is {output}, more than that")
    return min(output, most or output), most or output


def _prompt(record: Record, name: str, reading: Reading) -> WorkloadRequest:
    text = record.string("prompt") if record.has("prompt") else None
    messages = record.messages("messages") if record.has("messages") else None
    if record.has("prompt_token_ids"):
        ids = record.token_ids("prompt_token_ids", reading.tokens.end)
    elif text is not None or messages is not None:
        ids = reading.ids(record.place, messages or text or "")
    else:
        record.fail("prompt is missing: give prompt, messages, prompt_token_ids or turns")
    return WorkloadRequest(name, ids, 1, 1, text=text, messages=messages)


def _later(record: Record, request: WorkloadRequest) -> WorkloadRequest:
    """With when it is due."""
    if record.has("arrival_s"):
        request = replace(request, arrival_s=record.seconds("arrival_s"))
    if not record.has("follows"):
        return request
    new = record.integer("new_tokens") if record.has("new_tokens") else len(request.prompt_token_ids)
    if new > len(request.prompt_token_ids):
        record.fail(f"new_tokens is {new}: the prompt has {len(request.prompt_token_ids)}")
    think = record.seconds("think_s") if record.has("think_s") else 0.0
    return replace(request, follows=record.string("follows"), new_tokens=new, think_s=think)


def jsonl_requests(name: str, lines: Sequence[str], reading: Reading) -> Iterator[WorkloadRequest]:
    """Of a JSONL file whose rows may be conversations, batch lines or rows of ours."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = read_object(f"{name}, line {number}", line)
        if record.has("conversations") or record.has("conversation"):
            yield from sharegpt_conversation(record, number, reading)
        elif record.has("body") or record.has("custom_id"):
            yield batch_request(record, reading)
        else:
            yield from row_requests(record, number, reading)


def as_row(request: WorkloadRequest) -> dict[str, Any]:
    """A row of ours that gives this request again."""
    row: dict[str, Any] = {"id": request.id}
    if request.text is not None:
        row["prompt"] = request.text
    if request.messages is not None:
        row["messages"] = [{"role": role, "content": content} for role, content in request.messages]
    if request.prompt_token_ids:
        row["prompt_token_ids"] = list(request.prompt_token_ids)
    row |= {"output_tokens": request.output_tokens, "max_tokens": request.max_tokens}
    row["arrival_s"] = request.arrival_s
    if request.follows is not None:
        row |= {"follows": request.follows, "new_tokens": request.new_tokens, "think_s": request.think_s}
    return row


def save_workload(path: Path, requests: Sequence[WorkloadRequest]) -> None:
    """Write a workload as rows of ours: whoever reads the file gets the same requests.

    Raises:
        WorkloadError: It cannot be written.
    """
    rows: list[Mapping[str, Any]] = [as_row(request) for request in requests]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be written: {error.strerror}") from error
