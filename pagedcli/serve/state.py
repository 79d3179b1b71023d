"""What the routes share: settings, the lifecycle of the model, names, open requests, and who is told how each ended.

May import this package, `config`, `engine.outputs` and `errors`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from pagedcli.api.async_llm import AsyncLLM
from pagedcli.config import ServeConfig
from pagedcli.engine.outputs import RequestOutput
from pagedcli.errors import RequestError
from pagedcli.serve.lifecycle import Lifecycle
from pagedcli.serve.params import Defaults
from pagedcli.serve.streams import OpenCalls
from pagedcli.serve.validation import printable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One API request, when it is over.

    Attributes:
        endpoint: Path of its route.
        request_id: As the answer carried it; empty if none was made.
        status: HTTP status.
        stream: Whether it was streamed.
        outputs: Of its prompts, as far as they came.
        error_code: Of the error it was answered with, if it was.
        client: Address of the client.
        seconds: From its arrival until the last byte was handed over.
        client_gone: Whether the client left before the end.
    """

    endpoint: str
    request_id: str
    status: int
    stream: bool
    outputs: tuple[RequestOutput, ...]
    error_code: str | None
    client: str
    seconds: float
    client_gone: bool


@dataclass(slots=True)
class ServerState:
    """All that a server knows besides the engine.

    Attributes:
        config: Section `[serve]`.
        lifecycle: The model, once it is loaded.
        names: Served names; empty until the model is loaded if none were given.
        sampling: The server's own defaults for sampling fields.
        keys: API keys; none: everybody may ask.
        created: Unix time of the start, for model cards.
        open: Streams of unfinished requests by the id that their answer carries.
        on_error: Told the code of every error that an API route answers with.
        on_end: Told of every completions request that is over.
        metrics: Page of `/metrics`: bytes and their content type; None until there is an engine.
    """

    config: ServeConfig
    lifecycle: Lifecycle
    names: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[bytes, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    open: OpenCalls = field(default_factory=dict)
    on_error: Callable[[str], None] = lambda code: None
    on_end: Callable[[RequestRecord], None] = lambda record: None
    metrics: Callable[[], tuple[bytes, str]] | None = None
    defaults: Defaults = field(default_factory=lambda: Defaults({}, {}))

    def llm(self) -> AsyncLLM:
        """The model; RequestError 503 or EngineDead while there is none that takes requests."""
        return self.lifecycle.serving()

    def receiving(self) -> AbstractContextManager[None]:
        """Round what is done with a request before the engine has it, so that its time is accounted for."""
        llm = self.lifecycle.llm
        return nullcontext() if llm is None else llm.engine.client.timing.receiving()

    def check_model(self, name: str | None) -> str:
        """The served name that answers carry; 404 for one that is not served, errors of `llm` before that."""
        self.llm()
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise RequestError(
                f"the model {printable(name)!r} does not exist: this server serves {', '.join(self.names)}",
                code="model_not_found",
                status=404,
                field="model",
            )
        return name
