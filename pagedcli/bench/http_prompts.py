"""Bodies of requests: what a server is asked, and how later turns of a conversation carry the earlier answers.

Standard library only and `workloads`. A prompt goes out as token ids, as text, or as the messages of a chat. Where a
workload has only token ids and text is wanted, each id becomes a common word: equal ids give equal words, so what was
shared stays shared; how many tokens that is, only the server knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

from pagedcli.workloads.requests import WorkloadRequest

_TEXT = """
the of and to in that it is was for on are as with his they at be this from have or by one had not
but what all were when we there can an your which their said if do will each about how up out them
then she many some so these would other into has more her two like him see time could no make than
first been its who now people my made over did down only way find use may water long little very
after words called just where most know get through back much go good new write our me man too any
day same right look think also around another came come work three word must because does part even
place well such here take why things help put years different away
"""
WORDS = tuple(_TEXT.split())
"""Words that are one token in most vocabularies."""


class PromptForm(Enum):
    """How prompts are sent."""

    IDS = "token ids"
    TEXT = "text"
    CHAT = "chat"


def words(token_ids: Sequence[int]) -> str:
    """As many words as there are ids."""
    return " ".join(WORDS[token % len(WORDS)] for token in token_ids)


def new_text(request: WorkloadRequest) -> str:
    """What a request adds to its conversation, as text."""
    if request.text is not None:
        return request.text
    ids = request.prompt_token_ids
    return words(ids if request.follows is None else ids[len(ids) - request.new_tokens :])


@dataclass(slots=True)
class Conversation:
    """What was said so far.

    Attributes:
        messages: Of a chat.
        text: The same as one text.
    """

    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = ""

    def ask(self, request: WorkloadRequest) -> None:
        """A prompt was added."""
        if request.messages is not None and request.follows is None:
            self.messages += [{"role": role, "content": content} for role, content in request.messages]
            self.text += "\n".join(content for _, content in request.messages)
            return
        new = new_text(request)
        self.messages.append({"role": "user", "content": new})
        self.text += (" " if self.text else "") + new

    def answer(self, text: str) -> None:
        """An answer was added."""
        self.messages.append({"role": "assistant", "content": text})
        self.text += text

    def copy(self) -> Self:
        """One that goes on by itself."""
        return type(self)(list(self.messages), self.text)


@dataclass(frozen=True, slots=True)
class Asking:
    """How requests become bodies.

    Attributes:
        form: How prompts are sent.
        model: Name in requests; None: none is sent.
        more: Fields that are added to every body; one that is None is left out.
    """

    form: PromptForm
    model: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def body(self, request: WorkloadRequest, conversation: Conversation) -> dict[str, Any]:
        """A streamed request of the expected length; the request is part of the conversation already."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.more,
        }
        if self.form is PromptForm.CHAT:
            body["messages"] = list(conversation.messages)
        elif self.form is PromptForm.IDS:
            body["prompt"] = list(request.prompt_token_ids)
        else:
            body["prompt"] = conversation.text
        return {name: value for name, value in body.items() if value is not None}
