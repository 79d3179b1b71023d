"""The output stage: turns the core's token events into text, deltas and outputs, and ends samples at stop texts.

May import `text`, `core` and `errors`. It runs on the engine thread and holds everything about a request that is not
a decision of the scheduler. Invariants: a sample's deltas, concatenated, are its output (P3); no character of a stop
text leaves before it is certain that the text is none; nothing leaves after a sample has ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pagedcli.core.plan import TokenEvent, TokenLogprob
from pagedcli.core.request import FinishReason
from pagedcli.engine.outputs import (
    Delta,
    RequestOutput,
    SampleOutput,
    Seconds,
    TokenLogprobs,
    TopLogprob,
    Usage,
)
from pagedcli.engine.prompt import Prepared, TextCodec
from pagedcli.errors import EngineDead, RequestError
from pagedcli.text.stop import StopMatcher


def _token_logprobs(value: TokenLogprob, codec: TextCodec, offset: int) -> TokenLogprobs:
    top = tuple(TopLogprob(token, codec.token_text(token), logprob) for token, logprob in value.top)
    return TokenLogprobs(
        token_id=value.token,
        text=codec.token_text(value.token),
        logprob=value.logprob,
        rank=value.rank,
        top=top,
        offset=offset,
    )


class SampleStage:
    """Text of one sample: detokenizer, then stop matcher, then what was not delivered yet."""

    def __init__(self, index: int, prepared: Prepared, codec: TextCodec, prompt_text: str) -> None:
        """`prompt_text` is what comes before the output (echo), else empty."""
        params = prepared.params
        self.index = index
        self.finish_reason: FinishReason | None = None
        self._params = params
        self._codec = codec
        self._stop_ids = prepared.stop_ids
        self._detokenizer = codec.detokenizer(skip_special_tokens=params.skip_special_tokens, continuing=True)
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._num_chars = len(prompt_text)
        self._text: list[str] = [prompt_text]
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self.stop_reason: str | int | None = None
        self._num_read = 0
        self._sent_text = 0
        self._sent_tokens = 0
        self.is_started = False

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return len(self._token_ids)

    def know(self, tokens: Sequence[int]) -> None:
        """Take the output so far, of which `push` was not told because nobody needed its text yet."""
        self._token_ids += tokens[len(self._token_ids) :]

    def _catch_up(self) -> None:
        """Make the text of the tokens that came by `know`; no stop text is looked for in them."""
        kept = self._token_ids[self._num_read :]
        self._num_read = len(self._token_ids)
        if kept:
            text = self._detokenizer.push_all(kept)
            self._num_chars += len(text)
            self._text.append(text)

    def push(self, token: int, logprob: TokenLogprob | None, finish: FinishReason | None) -> None:
        """Take one token and, if `finish` is given or a stop text matches, end the sample."""
        self._catch_up()
        self._token_ids.append(token)
        self._num_read += 1
        if logprob is not None:
            self._logprobs.append(_token_logprobs(logprob, self._codec, self._num_chars))
        by_token = finish is FinishReason.STOP and token in self._stop_ids
        if by_token and token in self._params.stop_token_ids:
            self.stop_reason = token
        if not by_token or self._params.include_stop_str_in_output:
            self._take_text(self._detokenizer.push(token))
        if finish is not None:
            self.end(finish)

    def _take_text(self, text: str) -> None:
        self._num_chars += len(text)
        if self.num_tokens <= self._params.min_tokens:
            self._text.append(self._matcher.skip(text))
            return
        safe, matched = self._matcher.push(text)
        self._text.append(safe)
        if matched and self.finish_reason is None:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = self._matcher.matched

    def end(self, reason: FinishReason) -> None:
        """End the sample (a stop text that matched stays the reason) and release what was held back."""
        if self.finish_reason is not None:
            return
        self._catch_up()
        self._take_text(self._detokenizer.finish())
        if self.finish_reason is None:
            self._text.append(self._matcher.finish())
            self.finish_reason = reason

    def take_new(self) -> tuple[str, tuple[int, ...], tuple[TokenLogprobs, ...] | None]:
        """Text, tokens and log-probabilities since the last call."""
        self._catch_up()
        text = "".join(self._text[self._sent_text :])
        token_ids = tuple(self._token_ids[self._sent_tokens :])
        logprobs = tuple(self._logprobs[self._sent_tokens :]) if self._params.logprobs is not None else None
        self._sent_text, self._sent_tokens = len(self._text), len(self._token_ids)
        return text, token_ids, logprobs

    def output(self) -> SampleOutput:
        """The whole sample."""
        self._catch_up()
        return SampleOutput(
            index=self.index,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=self.finish_reason,
            logprobs=tuple(self._logprobs) if self._params.logprobs is not None else None,
            stop_reason=self.stop_reason,
        )


class RequestStage:
    """All samples of one request, and its times.

    Args:
        request_id: The caller's id.
        prepared: The request in the core's terms.
        codec: The model's tokenizer.
        arrival: Clock when the request arrived.
        stream: Whether what comes before the end is delivered at all.

    Attributes:
        is_silent: Between its first token and its end a sample has nothing to tell: its tokens may come by `know`.
    """

    def __init__(
        self, request_id: str, prepared: Prepared, codec: TextCodec, arrival: float, *, stream: bool = True
    ) -> None:
        self.request_id = request_id
        self._stream = stream
        # A token alone is wanted at once for its delta, or because a stop text may end the sample; values come with it.
        wanted = stream or prepared.params.stop or prepared.params.logprobs is not None
        self.is_silent = not wanted and prepared.params.prompt_logprobs is None
        self.num_preemptions = 0
        self._prepared = prepared
        self._arrival = arrival
        self._codec = codec
        prompt_text = self._prompt_text() if prepared.params.echo else ""
        self.samples = [
            SampleStage(index, prepared, codec, prompt_text) for index in range(prepared.params.n)
        ]
        self._prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._queued: float | None = None
        self._first_token: float | None = None
        self._cached_tokens = 0

    @property
    def done(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.finish_reason is not None for sample in self.samples)

    def _prompt_text(self) -> str:
        prepared = self._prepared
        return prepared.prompt if prepared.prompt is not None else self._codec.decode(prepared.tokens)

    def take(self, index: int, event: TokenEvent, now: float) -> Delta | None:
        """What an event of sample `index`, which has not ended, adds; None: nothing to deliver."""
        sample = self.samples[index]
        self.note(index, event, now)
        if event.token is not None:
            sample.push(event.token, event.logprob, event.finish)
        elif event.finish is not None:
            sample.end(event.finish)
        else:
            return None
        if not self._stream and sample.finish_reason is None:
            return None
        return self._delta(sample, now)

    def note(self, index: int, event: TokenEvent, now: float) -> None:
        """Take what an event tells of the request's times and of its prompt, not its token."""
        if event.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = self._with_offsets(event.prompt_logprobs)
        if self._queued is None and not math.isnan(event.first_scheduled):
            self._queued = event.first_scheduled - self._arrival
        if index == 0:
            self._cached_tokens = event.cached_tokens
        if event.token is not None and self._first_token is None:
            self._first_token = now - self._arrival

    def _with_offsets(self, values: Sequence[TokenLogprob]) -> tuple[TokenLogprobs | None, ...]:
        skip = self._prepared.params.skip_special_tokens
        detokenizer = self._codec.detokenizer(skip_special_tokens=skip)
        offset = len(detokenizer.push(self._prepared.tokens[0]))
        result: list[TokenLogprobs | None] = [None]
        for value in values:
            result.append(_token_logprobs(value, self._codec, offset))
            offset += len(detokenizer.push(value.token))
        return tuple(result)

    def _delta(self, sample: SampleStage, now: float) -> Delta:
        output = self._output(now, None) if sample.finish_reason is not None and self.done else None
        return self._make_delta(sample, output)

    def _make_delta(self, sample: SampleStage, output: RequestOutput | None) -> Delta:
        """What is new in a sample; what is to be said of the prompt comes with the first delta."""
        is_first, sample.is_started = not sample.is_started, True
        text, token_ids, logprobs = sample.take_new()
        return Delta(
            self.request_id,
            sample.index,
            text,
            token_ids,
            sample.finish_reason,
            logprobs,
            output,
            sample.stop_reason,
            self._prepared.tokens if is_first else None,
            self._prompt_logprobs if is_first else None,
            self._cached_tokens,
        )

    def end_all(self, reason: FinishReason, now: float) -> list[Delta]:
        """End every open sample with what it has."""
        deltas = []
        for sample in self.samples:
            if sample.finish_reason is None:
                sample.end(reason)
                deltas.append(self._delta(sample, now))
        return deltas

    def fail(self, error: RequestError | EngineDead, now: float) -> Delta:
        """The last delta of a request that is lost; samples keep what they reached."""
        sample = next(sample for sample in self.samples if sample.finish_reason is None)
        return self._make_delta(sample, self._output(now, error))

    def _output(self, now: float, error: RequestError | EngineDead | None) -> RequestOutput:
        total = now - self._arrival
        tokens = self._prepared.tokens
        num_output = sum(sample.num_tokens for sample in self.samples)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prepared.prompt,
            prompt_token_ids=tokens,
            samples=tuple(sample.output() for sample in self.samples),
            prompt_logprobs=self._prompt_logprobs,
            usage=Usage(len(tokens), num_output, self._cached_tokens),
            seconds=Seconds(total if self._queued is None else self._queued, self._first_token, total),
            error=error,
            num_preemptions=self.num_preemptions,
        )
