"""What a tokenizer is made of, however it is stored, and the one place where errors of the library are translated.

May import tokenizers and `errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tokenizers import Tokenizer as Backend

from pagedcli.errors import CheckpointError

T = TypeVar("T")
TRIAL_TEXT = "a 1\n\U0001f389"


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Everything that `Tokenizer` needs.

    Attributes:
        backend: The tokenizer of the tokenizers library.
        eos_token_ids: Ids that end an output, the most important first.
        special_tokens: Texts by name: `bos_token`, `eos_token`, ...
        chat_templates: Template texts by name; the usual one is "default".
        prefix_ids: Put before every encoded text (besides what the backend's post-processor does).
        suffix_ids: Put after it.
    """

    backend: Backend
    eos_token_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()


def checked(what: str, make: Callable[[], T]) -> T:
    """The result of `make`; whatever the tokenizers library refuses becomes a CheckpointError about `what`."""
    try:
        return make()
    except (
        BaseException
    ) as error:  # the library raises plain Exception, and panics (no Exception) on some files
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{what} cannot be used: {reason}") from error


def try_out(what: str, backend: Backend) -> None:
    """Encode and decode once: some broken files are only noticed by the library when they are used."""
    checked(what, lambda: backend.decode(backend.encode(TRIAL_TEXT).ids, skip_special_tokens=False))


def unique(ids: list[int]) -> tuple[int, ...]:
    """The ids in order, each once."""
    return tuple(dict.fromkeys(ids))
