"""What came back for one request, as figures that can be believed. Standard library only.

A server may count wrongly, or not at all: its usage is taken only where it can be true, else events with text are
counted, and `Answer.doubts` says so. Moments never go back, and nothing is earlier than when the request was due.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedcli.bench.http_reading import DONE, Reader

_SHOWN = 200
_MAX_PROMPT = 100_000_000


@dataclass(slots=True)
class Answer:
    """What came back, and when, on the client's clock.

    Attributes:
        sent_s: When the request was sent.
        due_s: When it was to be sent: latencies count from here. None: when it was sent.
        id: Of the request.
        status: HTTP status; 0: none came.
        token_times: Of the events that brought text.
        end_s: When the answer was over.
        texts: Text of those events.
        prompt_tokens: As the server counted them; 0 if it did not say.
        output_tokens: As the server counted them, if that can be true, else the events.
        finish_reason: Of the first choice.
        error: Why the request failed; None: it was served.
        retry_after: What a server that refused for now said about later.
        doubts: What the server did that changes how it was counted.
    """

    sent_s: float
    due_s: float | None = None
    id: str = ""
    status: int = 0
    token_times: list[float] = field(default_factory=list)
    end_s: float = 0.0
    texts: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    retry_after: str | None = None
    doubts: list[str] = field(default_factory=list)

    @property
    def start_s(self) -> float:
        """From when latencies count."""
        return self.sent_s if self.due_s is None else self.due_s

    @property
    def late_s(self) -> float:
        """How late the client was."""
        return max(0.0, self.sent_s - self.start_s)

    @property
    def is_served(self) -> bool:
        """Whether it counts in the distributions."""
        return self.error is None and bool(self.token_times)

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.texts)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return max(0.0, self.token_times[0] - self.start_s)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None if there is none."""
        if self.output_tokens < 2 or len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Times between two events with text."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]

    @property
    def e2e_s(self) -> float:
        """The whole latency."""
        return max(0.0, self.end_s - self.start_s)


@dataclass(slots=True)
class _Usage:
    """The last that the server said."""

    prompt: object = None
    output: object = None
    was_said: bool = False


class AnswerReader:
    """Fills in an answer while it comes, event by event: none of it is left to do when others wait.

    Args:
        answer: With the moments of the request.
        max_tokens: That were asked for, if that is known.
    """

    def __init__(self, answer: Answer, max_tokens: int | None) -> None:
        self._answer = answer
        self._max_tokens = max_tokens
        self._usage = _Usage()
        self._is_done = False
        self._next = 0

    def take(self, reader: Reader) -> None:
        """The events that are there and were not yet taken."""
        if reader.head is None or reader.head.status != 200:
            return
        found = reader.events.found
        while self._next < len(found) and not self._is_done:
            moment, data = found[self._next]
            self._next += 1
            if data.strip() == DONE:
                self._is_done = True
            else:
                _take_event(data, moment, self._answer, self._usage)

    def finish(self, reader: Reader) -> None:
        """The reader is closed: counts, and why it is no answer; an error that there is already stays."""
        answer = self._answer
        if reader.head is None:
            answer.error = answer.error or "the connection was closed without an answer"
            return
        answer.status = reader.head.status
        if answer.status != 200:
            answer.error = _refusal(reader)
            answer.retry_after = reader.head.headers.get("retry-after")
            return
        self.take(reader)
        _count(answer, self._usage, self._max_tokens)
        if answer.error is None:
            answer.error = _incomplete(reader, answer, self._is_done)


def _refusal(reader: Reader) -> str:
    """A status that is not 200, with what the server said."""
    assert reader.head is not None
    status, headers = reader.head.status, reader.head.headers
    if 300 <= status < 400:
        return (
            f"{status}: redirected to {headers.get('location', 'nowhere')[:_SHOWN]}: give that server's URL"
        )
    later = f" (Retry-After: {headers['retry-after'][:20]})" if "retry-after" in headers else ""
    return f"{status}{later}: {_message(bytes(reader.events.start))}"


def _message(body: bytes) -> str:
    """The message of an error body, or its beginning."""
    text = body.decode(errors="replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    error = value.get("error", value.get("detail")) if isinstance(value, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return " ".join((error if isinstance(error, str) else text).split())[:_SHOWN]


def _incomplete(reader: Reader, answer: Answer, is_done: bool) -> str | None:
    """Why an answer of status 200 is none."""
    if not reader.events.found:
        kind = reader.head.headers.get("content-type", "unknown") if reader.head is not None else ""
        start = " ".join(bytes(reader.events.start[:80]).decode(errors="replace").split())
        if start:
            return f"no event stream came, but {kind}: {start}"
        return "an empty answer came" if reader.is_whole else "the stream ended before [DONE]"
    if answer.finish_reason == "abort":
        return "aborted by the server"
    if not is_done:
        if not reader.is_whole or answer.finish_reason is None:
            return "the stream ended before [DONE]"
        answer.doubts.append("no [DONE]")
    return None if answer.token_times else "no token came"


def _take_event(data: bytes, moment: float, answer: Answer, usage: _Usage) -> None:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        answer.error = answer.error or f"an event is no JSON: {data[:60]!r}"
        return
    if not isinstance(event, dict):
        answer.error = answer.error or f"an event is no object: {data[:60]!r}"
        return
    if event.get("error"):
        answer.error = answer.error or _message(data)
        return
    said = event.get("usage")
    if isinstance(said, dict):
        usage.prompt, usage.output = said.get("prompt_tokens"), said.get("completion_tokens")
        usage.was_said = True
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            _take_choice(choice, moment, answer)


def _take_choice(choice: dict[str, Any], moment: float, answer: Answer) -> None:
    texts = [text for text in _texts(choice) if isinstance(text, str) and text]
    if texts:
        times = answer.token_times
        times.append(max(moment, times[-1] if times else answer.start_s))
        answer.texts.append("".join(texts))
    reason = choice.get("finish_reason")
    if isinstance(reason, str) and choice.get("index", 0) == 0:
        answer.finish_reason = reason


def _texts(choice: dict[str, Any]) -> Sequence[object]:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        return (reasoning, delta.get("content"))
    return (choice.get("text"),)


def _count(answer: Answer, usage: _Usage, max_tokens: int | None) -> None:
    """Take the server's counts where they can be true."""
    events = len(answer.token_times)
    answer.output_tokens = events
    if not usage.was_said:
        answer.doubts.append("no usage")
        return
    least, most = (
        max(1, events - 1),
        max_tokens or _MAX_PROMPT,
    )  # the last event may bring text that was held back
    if _is_count(usage.output, least if events else 0, most):
        answer.output_tokens = int(str(usage.output))
    else:
        answer.doubts.append("usage cannot be true")
    if _is_count(usage.prompt, 1, _MAX_PROMPT):
        answer.prompt_tokens = int(str(usage.prompt))
    elif "usage cannot be true" not in answer.doubts:
        answer.doubts.append("usage cannot be true")


def _is_count(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
