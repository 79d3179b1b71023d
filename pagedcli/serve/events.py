"""A streamed answer as server-sent events: what each delta of the engine becomes on the wire.

May import `engine.outputs` and this package. An event is one JSON object; what does not change from event to event
is written once for a request, because a token must cost as little as possible. Invariant: the texts of a choice's
events, put together, are the text that the same request gets without streaming (P3).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from pagedcli.engine.outputs import Delta, RequestOutput, Usage
from pagedcli.errors import PagedError
from pagedcli.serve.bodies import (
    Shape,
    chat_logprobs,
    completion_logprobs,
    finish_reason,
    prompt_logprobs_body,
    usage_body,
)
from pagedcli.serve.errors import encode_json, error_body

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, proxies see that the connection lives."""
_quoted = json.encoder.encode_basestring


class EventWriter:
    """Writes the events of one request.

    Args:
        shape: What all of its events have in common.
        num_prompts: Prompts; each has `shape.n` choices.
        continuous_usage: Whether every event carries the token counts so far.
    """

    def __init__(self, shape: Shape, num_prompts: int, *, continuous_usage: bool) -> None:
        self._shape = shape
        self._num_prompts = num_prompts
        self._continuous = continuous_usage
        self._head = {
            "id": shape.id,
            "object": "chat.completion.chunk" if shape.is_chat else "text_completion",
            "created": shape.created,
            "model": shape.model,
        }
        # Everything of a plain event but its index and text.
        head = encode_json(self._head).decode()[:-1]
        self._before = f'data: {head},"choices":[{{"index":'
        self._between = ',"delta":{"content":' if shape.is_chat else ',"text":'
        close = "}" if shape.is_chat else ""
        self._after = close + ',"logprobs":null,"finish_reason":null}]}\n\n'
        self._is_plain = not (continuous_usage or shape.logprobs or shape.prompt_logprobs or shape.token_ids)
        self._usages = [Usage(0, 0, 0)] * num_prompts

    def start(self) -> bytes:
        """Who speaks, for every choice of a chat; nothing for completions."""
        if not self._shape.is_chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._event([_choice(index, {"delta": delta})])
            for index in range(self._num_prompts * self._shape.n)
        )

    def deltas(self, position: int, deltas: Iterable[Delta]) -> bytes:
        """Events of what is new for the prompt at `position`."""
        return b"".join([self._delta(position, delta) for delta in deltas])

    def _delta(self, position: int, delta: Delta) -> bytes:
        if delta.output is not None and delta.output.error is not None:
            return b""
        index = position * self._shape.n + delta.index
        if self._is_plain and delta.finish_reason is None:
            if not delta.text:
                return b""
            text = f"{self._before}{index}{self._between}{_quoted(delta.text)}{self._after}"
            return text.encode("utf-8", "backslashreplace")
        self._count(position, delta)
        choices = self._chat(index, delta) if self._shape.is_chat else self._completion(index, delta)
        return b"".join(self._event([choice], self._usage(position), self._top(delta)) for choice in choices)

    def _count(self, position: int, delta: Delta) -> None:
        before = self._usages[position]
        prompt = before.prompt_tokens if delta.prompt_token_ids is None else len(delta.prompt_token_ids)
        self._usages[position] = Usage(
            prompt, before.completion_tokens + len(delta.token_ids), delta.cached_tokens
        )

    def _usage(self, position: int) -> dict[str, Any] | None:
        return usage_body([self._usages[position]]) if self._continuous else None

    def _chat(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """What is said, and that it has ended, in an event of its own as OpenAI writes it."""
        choices = []
        if delta.text or (delta.token_ids and not self._is_plain):
            extras = self._extras(delta)
            if self._shape.logprobs:
                extras["logprobs"] = chat_logprobs(delta.logprobs or (), self._shape.token_bytes)
            choices.append(_choice(index, {"delta": {"content": delta.text}}, **extras))
        if delta.finish_reason is not None:
            choices.append(_choice(index, {"delta": {}}, **_end(delta)))
        return choices

    def _completion(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        extras = self._extras(delta) | (_end(delta) if delta.finish_reason is not None else {})
        shape = self._shape
        is_first = delta.prompt_token_ids is not None
        if shape.logprobs:
            before = (delta.prompt_logprobs or ()) if shape.echo and is_first else ()
            extras["logprobs"] = completion_logprobs([*before, *(delta.logprobs or ())], delta.text)
        if shape.prompt_logprobs and is_first:
            extras["prompt_logprobs"] = prompt_logprobs_body(delta.prompt_logprobs or ())
        if shape.token_ids and is_first:
            extras["prompt_token_ids"] = list(delta.prompt_token_ids or ())
        return [_choice(index, {"text": delta.text}, **extras)]

    def _extras(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": list(delta.token_ids)} if self._shape.token_ids else {}

    def _top(self, delta: Delta) -> dict[str, Any]:
        """What an event of a chat says of the prompt, once."""
        extras: dict[str, Any] = {}
        if self._shape.is_chat and delta.prompt_token_ids is not None and delta.index == 0:
            if self._shape.prompt_logprobs:
                extras["prompt_logprobs"] = prompt_logprobs_body(delta.prompt_logprobs or ())
            if self._shape.token_ids:
                extras["prompt_token_ids"] = list(delta.prompt_token_ids)
        return extras

    def usage(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The last event of a stream whose token counts were asked for: no choices, totals over all of them."""
        return self._event([], usage_body(output.usage for output in outputs))

    def _event(
        self,
        choices: list[dict[str, Any]],
        usage: dict[str, Any] | None = None,
        extras: dict[str, Any] | None = None,
    ) -> bytes:
        body = (
            self._head | {"choices": choices} | (extras or {}) | ({} if usage is None else {"usage": usage})
        )
        return b"data: " + encode_json(body) + b"\n\n"


def _choice(index: int, said: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"index": index, **said, "logprobs": None, "finish_reason": None} | rest


def _end(delta: Delta) -> dict[str, Any]:
    return {"finish_reason": finish_reason(delta.finish_reason), "stop_reason": delta.stop_reason}


def error_event(error: PagedError) -> bytes:
    """An error that came when the answer had begun."""
    return b"data: " + encode_json(error_body(error)) + b"\n\n"
