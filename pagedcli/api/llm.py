"""`LLM`: a model in this process, called synchronously. May import `engine` and the composition root.

Calls may come from several threads and share the engine's batch; each returns its own results in input order.
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Self

from pagedcli.api.build import Engine, build_engine
from pagedcli.api.calls import (
    Errors,
    Message,
    Prompt,
    chat_specs,
    check_errors,
    checked_params,
    prompt_specs,
    refused,
)
from pagedcli.api.settings import config_from_settings
from pagedcli.config import EngineConfig
from pagedcli.core.sampling import SamplingParams
from pagedcli.engine.client import EngineThread
from pagedcli.engine.outputs import Delta, EngineStats, RequestOutput
from pagedcli.engine.prompt import RequestSpec
from pagedcli.errors import RequestError

Progress = Callable[[int, int], None]
"""Called with (requests answered, requests in the call) in the caller's thread."""


class LLM:
    """A model that answers prompts, batched continuously over a paged KV cache.

    Use it as a context manager, or call `close`. One object takes any number of calls, also from several threads.

    Args:
        model: Folder of safetensors, GGUF file or hub id; None: SmolLM2-135M-Instruct.
        config: Settings to start from; None: the defaults.
        settings: Any field of the configuration by name, such as `dtype="float32"`, `num_pages=256`,
            `max_num_seqs=8`, `seed=1`.

    Raises:
        ConfigError: A setting is unknown or out of range.
        CheckpointError: The model cannot be used.

    Example:
        with LLM() as llm:
            for output in llm.generate(["The capital of France is", "2 + 2 ="], SamplingParams(max_tokens=8)):
                print(output.text)
    """

    def __init__(
        self, model: str | PathLike[str] | None = None, *, config: EngineConfig | None = None, **settings: Any
    ) -> None:
        if model is not None:
            settings["model"] = model
        self._attach(build_engine(config_from_settings(config or EngineConfig(), settings)))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Wrap an engine that is already built; closing the `LLM` closes it."""
        llm = cls.__new__(cls)
        llm._attach(engine)
        return llm

    def _attach(self, engine: Engine) -> None:
        self._engine = engine
        # The engine's thread never refers to this object, so an LLM that is dropped takes its engine along.
        self._finalizer = weakref.finalize(self, engine.close)

    @property
    def engine(self) -> Engine:
        """The engine: resolved settings, tokenizer, and the thread-safe client."""
        return self._engine

    def stats(self) -> EngineStats:
        """Counters and rates of the engine."""
        return self._client.stats()

    @property
    def _client(self) -> EngineThread:
        return self._engine.client

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        errors: Errors = "raise",
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Continue one prompt or many.

        Args:
            prompts: Text, token ids, or a list of these.
            params: For all prompts, or one for each; None: greedy, 256 tokens.
            errors: "raise": the first refused request ends the call. "return": its output carries `error`.
            progress: Called after each answer.

        Returns:
            One output per prompt, in order.

        Raises:
            RequestError: A request was refused (`errors="raise"`).
            EngineDead: The engine has failed or is closed.
        """
        return self._answer(prompt_specs(prompts, params), errors, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template_args: Mapping[str, Any] | None = None,
        errors: Errors = "raise",
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, through the model's chat template.

        Args:
            messages: A list of messages, or a list of such lists.
            params: For all conversations, or one for each.
            template_args: Further variables for the template, such as `{"enable_thinking": False}`.
            errors: As in `generate`.
            progress: As in `generate`.

        Returns:
            One output per conversation, in order.
        """
        return self._answer(chat_specs(messages, params, template_args), errors, progress)

    def _answer(
        self, specs: list[RequestSpec], errors: Errors, progress: Progress | None
    ) -> list[RequestOutput]:
        check_errors(errors)
        call = _Call(self._client, len(specs), errors, progress)
        try:
            for index, spec in enumerate(specs):
                call.add(index, spec)
            return call.wait()
        except BaseException:  # KeyboardInterrupt too: what nobody waits for must not run on.
            call.abort()
            raise

    def stream(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Message] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> DeltaStream:
        """Continue one prompt, or answer one conversation, bit by bit.

        The request starts at once; closing or dropping the iterator aborts it. The last delta carries the whole
        output.

        Args:
            prompt: Text or token ids; None if `messages` are given.
            params: Sampling parameters; with n > 1 the deltas of the samples are interleaved (`Delta.index`).
            messages: A conversation; None if `prompt` is given.
            template_args: As in `chat`.

        Raises:
            RequestError: The request is refused.
            EngineDead: The engine has failed or is closed.
        """
        spec = RequestSpec(
            prompt=prompt,
            messages=messages,
            params=checked_params(params),
            template_args=template_args or {},
        )
        return DeltaStream(self._client, spec)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, as `generate` would see it."""
        return self._engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self._engine.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def close(self) -> None:
        """Abort what runs and free the model. A second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class DeltaStream:
    """The deltas of one request, as they come; an iterator that can be left early.

    Leaving it (`close`, a `with` block, or dropping it) aborts the request if it is not finished.
    """

    def __init__(self, client: EngineThread, spec: RequestSpec) -> None:
        deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self._deltas = deltas
        self._ended = False
        self.request_id = client.add(spec, deltas.put)
        self._abort = weakref.finalize(self, client.abort, self.request_id)
        self._abort.atexit = False

    def __iter__(self) -> DeltaStream:
        return self

    def __next__(self) -> Delta:
        if self._ended:
            raise StopIteration
        delta = self._deltas.get()
        if delta.output is not None:
            self._ended = True
            self._abort.detach()
            if delta.output.error is not None:
                raise delta.output.error
        return delta

    def close(self) -> None:
        """Abort the request if it is not finished; nothing comes any more."""
        self._ended = True
        self._abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Call:
    """The requests of one `generate` or `chat`."""

    def __init__(self, client: EngineThread, count: int, errors: Errors, progress: Progress | None) -> None:
        self._client = client
        self._errors = errors
        self._progress = progress
        self._outputs: list[RequestOutput | None] = [None] * count
        self._num_done = 0
        self._open: dict[int, str] = {}
        self._done: queue.SimpleQueue[tuple[int, Delta]] = queue.SimpleQueue()

    def add(self, index: int, spec: RequestSpec) -> None:
        """Hand one request to the engine."""
        try:
            self._open[index] = self._client.add(spec, partial(self._put, index))
        except RequestError as error:
            self._keep(index, refused(spec, error))

    def _put(self, index: int, delta: Delta) -> None:
        self._done.put((index, delta))

    def wait(self) -> list[RequestOutput]:
        """Wait for all answers."""
        while self._open:
            index, delta = self._done.get()
            del self._open[index]
            assert delta.output is not None
            self._keep(index, delta.output)
        return [output for output in self._outputs if output is not None]

    def _keep(self, index: int, output: RequestOutput) -> None:
        if output.error is not None and self._errors == "raise":
            raise output.error
        self._outputs[index] = output
        self._num_done += 1
        if self._progress is not None:
            self._progress(self._num_done, len(self._outputs))

    def abort(self) -> None:
        """Abort what is still open."""
        for request_id in self._open.values():
            self._client.abort(request_id)
