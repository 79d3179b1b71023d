"""`AsyncLLM`: a model in this process for asyncio programs. May import `engine` and the composition root.

Tokenizing runs on worker threads and the engine on its own, so that the event loop only ever waits. Invariant: a call
that is cancelled, or a stream that is left, aborts its requests, and their pages are free within a step or two.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
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
from pagedcli.engine.handover import DeltaStream, Handover
from pagedcli.engine.outputs import Delta, EngineStats, RequestOutput
from pagedcli.engine.prompt import RequestSpec
from pagedcli.errors import RequestError


class AsyncLLM:
    """The same as `LLM` for asyncio. Calls of any number of tasks share the engine's batch.

    Args:
        model: Folder of safetensors, GGUF file or hub id; None: SmolLM2-135M-Instruct.
        config: Settings to start from; None: the defaults.
        settings: Any field of the configuration by name.

    Making one loads the model and blocks meanwhile; `await AsyncLLM.create(...)` does that on a worker thread.

    Example:
        async with await AsyncLLM.create() as llm:
            async for delta in llm.stream("The capital of France is", SamplingParams(max_tokens=8)):
                print(delta.text, end="")
    """

    def __init__(
        self, model: str | PathLike[str] | None = None, *, config: EngineConfig | None = None, **settings: Any
    ) -> None:
        if model is not None:
            settings["model"] = model
        self._attach(build_engine(config_from_settings(config or EngineConfig(), settings)))

    @classmethod
    async def create(
        cls, model: str | PathLike[str] | None = None, *, config: EngineConfig | None = None, **settings: Any
    ) -> AsyncLLM:
        """Make one without blocking the event loop; arguments as for the class."""
        return await asyncio.to_thread(cls, model, config=config, **settings)

    @classmethod
    def from_engine(cls, engine: Engine) -> AsyncLLM:
        """Wrap an engine that is already built; closing the `AsyncLLM` closes it."""
        llm = cls.__new__(cls)
        llm._attach(engine)
        return llm

    def _attach(self, engine: Engine) -> None:
        self._engine = engine
        self._handovers: list[Handover] = []
        self._finalizer = weakref.finalize(self, engine.close)

    @property
    def engine(self) -> Engine:
        """The engine: resolved settings, tokenizer, and the thread-safe client."""
        return self._engine

    @property
    def _client(self) -> EngineThread:
        return self._engine.client

    def stats(self) -> EngineStats:
        """Counters and rates of the engine."""
        return self._client.stats()

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        errors: Errors = "raise",
    ) -> list[RequestOutput]:
        """Continue one prompt or many; arguments, results and errors as in `LLM.generate`."""
        return await self._answer(prompt_specs(prompts, params), errors)

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template_args: Mapping[str, Any] | None = None,
        errors: Errors = "raise",
    ) -> list[RequestOutput]:
        """Answer one conversation or many; arguments, results and errors as in `LLM.chat`."""
        return await self._answer(chat_specs(messages, params, template_args), errors)

    async def as_completed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(Position of the prompt, output) of each request as it ends; refused ones carry `error`.

        Leaving the iterator (`aclose`, cancellation) aborts what is not finished.
        """
        async for item in self._each(prompt_specs(prompts, params)):
            yield item

    async def _answer(self, specs: list[RequestSpec], errors: Errors) -> list[RequestOutput]:
        check_errors(errors)
        outputs: dict[int, RequestOutput] = {}
        # Closed explicitly: when this raises, what is still running must be aborted now, not when it is collected.
        async with contextlib.aclosing(self._each(specs)) as each:
            async for index, output in each:
                if output.error is not None and errors == "raise":
                    raise output.error
                outputs[index] = output
        return [outputs[index] for index in range(len(specs))]

    async def _each(self, specs: list[RequestSpec]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        async with _Requests(self._client, self._handover()) as requests:
            for index, spec in enumerate(specs):
                try:
                    await requests.add(index, spec)
                except RequestError as error:
                    yield index, refused(spec, error)
            while requests.num_open:
                index, delta = await requests.next()
                if delta.output is not None:
                    yield index, delta.output

    async def stream(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Sequence[Message] | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Continue one prompt, or answer one conversation, bit by bit; arguments and errors as in `LLM.stream`.

        The request starts with the first iteration. Leaving the iterator (`aclose`, cancellation) aborts it.
        """
        spec = RequestSpec(
            prompt=prompt,
            messages=messages,
            params=checked_params(params),
            template_args=template_args or {},
        )
        async with _Requests(self._client, self._handover()) as requests:
            await requests.add(0, spec)
            while requests.num_open:
                _, delta = await requests.next()
                if delta.output is not None and delta.output.error is not None:
                    raise delta.output.error
                yield delta

    async def submit(self, spec: RequestSpec) -> DeltaStream:
        """Hand over a request; its deltas come in lists, everything that one step of the engine brought at once.

        Use the stream as a context: leaving it aborts what is unfinished.

        Raises:
            RequestError: The request is refused.
            EngineDead: The engine is closed or has failed.
        """
        stream = DeltaStream(self._client, self._handover())
        await stream.start(spec)
        return stream

    def _handover(self) -> Handover:
        """The way to the running event loop."""
        for known in [known for known in self._handovers if known.is_closed]:
            known.close()
            self._handovers.remove(known)
        loop = asyncio.get_running_loop()
        for known in self._handovers:
            if known.loop is loop:
                return known
        self._handovers.append(Handover(self._client))
        return self._handovers[-1]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, as `generate` would see it."""
        return self._engine.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self._engine.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    async def close(self) -> None:
        """Abort what runs and free the model. A second call does nothing."""
        await asyncio.to_thread(self._finalizer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class _Requests:
    """The requests of one task; whatever is open when the context is left is aborted."""

    def __init__(self, client: EngineThread, handover: Handover) -> None:
        self._client = client
        self._handover = handover
        self._deltas: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        self._open: dict[int, str] = {}

    @property
    def num_open(self) -> int:
        """Requests whose last delta was not taken yet."""
        return len(self._open)

    async def add(self, index: int, spec: RequestSpec) -> None:
        """Hand a request to the engine; the tokenizer runs on a worker thread."""
        sink = self._handover.sink(lambda delta: self._deltas.put_nowait((index, delta)))
        adding = asyncio.ensure_future(asyncio.to_thread(self._client.add, spec, sink))
        try:
            self._open[index] = await asyncio.shield(adding)
        except asyncio.CancelledError:
            # The worker thread cannot be stopped: abort what it is about to add.
            adding.add_done_callback(self._abort_added)
            raise

    def _abort_added(self, adding: asyncio.Future[str]) -> None:
        if not adding.cancelled() and adding.exception() is None:
            self._client.abort(adding.result())

    async def next(self) -> tuple[int, Delta]:
        """The next delta of any of them, with its index."""
        index, delta = await self._deltas.get()
        if delta.output is not None:
            del self._open[index]
        return index, delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for request_id in self._open.values():
            self._client.abort(request_id)
