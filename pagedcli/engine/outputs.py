"""The values that front ends get back: outputs, deltas of a stream, and what the displays show of the engine.

May import `core` and `errors`. All are frozen; nothing here computes anything but sums. Ids of requests are strings
here (the user's, or drawn); inside the engine every sample of a request has an int of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedcli.core.request import FinishReason
from pagedcli.core.stats import SchedulerStats
from pagedcli.errors import EngineDead, RequestError


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request, over all its samples.

    Attributes:
        prompt_tokens: Tokens of the prompt, counted once however many samples there are.
        completion_tokens: Tokens sampled and kept, over all samples.
        cached_tokens: Prompt tokens whose KV was found in the pool when the request first ran.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Seconds:
    """When things happened, in seconds from the arrival of the request in the engine.

    Attributes:
        queued: Until the first token of the prompt was computed; equals `total` if none ever was.
        first_token: Until the first output token was known (includes `queued`); None: there was none.
        total: Until the last sample ended.
    """

    queued: float
    first_token: float | None
    total: float


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One alternative: token id, its text, natural logarithm of its probability."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token of a prompt or an output, with the alternatives asked for.

    Attributes:
        token_id: The token.
        text: Its text alone (U+FFFD where it is part of a character).
        logprob: Natural logarithm of its probability under the model's own distribution.
        rank: 1 for the most probable token.
        top: Most probable tokens, best first.
        offset: Characters of the sample's text (of the prompt, for prompt tokens) that precede the token.
    """

    token_id: int
    text: str
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One of the n samples of a request.

    Attributes:
        index: 0 to n - 1.
        text: The output; after the prompt's text with echo.
        token_ids: Output tokens kept: a stop text ends the list with the token that completed it, a stop token is
            its last item.
        finish_reason: Why it ended; None only in the output of a request that failed.
        logprobs: One for each item of `token_ids`, if asked for.
        stop_reason: The stop text or stop token id that ended it, if one did (None for the model's own end).
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All that came of a request.

    Attributes:
        request_id: The caller's id, or one drawn.
        prompt: Text of the prompt; None if it was given as token ids.
        prompt_token_ids: Tokens of the prompt.
        samples: n of them in order of index (what was reached, if the request failed).
        prompt_logprobs: If asked for: one per prompt token, None for the first.
        usage: Token counts.
        seconds: Times from arrival.
        error: Why the request was refused or lost; None: it was served.
        num_preemptions: How often its samples lost their pages and were recomputed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    samples: tuple[SampleOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    usage: Usage
    seconds: Seconds
    error: RequestError | EngineDead | None = None
    num_preemptions: int = 0

    @property
    def text(self) -> str:
        """Text of the first sample; empty if there is none."""
        return self.samples[0].text if self.samples else ""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason of the first sample."""
        return self.samples[0].finish_reason if self.samples else None


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in one sample of a streaming request.

    The texts of a sample's deltas, concatenated, are `SampleOutput.text`; so are its token ids and logprobs.

    Attributes:
        request_id: The request.
        index: The sample.
        text: Text that cannot change any more (may be empty).
        token_ids: Tokens since the last delta (their text may come with a later one).
        finish_reason: Given in the last delta of the sample.
        logprobs: One for each of `token_ids`, if asked for.
        output: Given in the very last delta of the request: everything, `error` included.
        stop_reason: The stop text or stop token id that ended the sample, if one did.
        prompt_token_ids: Tokens of the prompt, in the first delta of the sample.
        prompt_logprobs: Theirs, if asked for, in the first delta of the sample.
        cached_tokens: Prompt tokens whose KV was found in the pool.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    output: RequestOutput | None = None
    stop_reason: str | int | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GapSeconds:
    """Time in which the executor had nothing to run, by cause.

    Attributes:
        scheduler: The engine thread was choosing the next step or applying the last one.
        tokenizer: Text work: detokenizing on the engine thread, or every caller still tokenizing a prompt.
        no_work: There was no request.
        http: Requests were being read and checked by a server, and there was no other.
    """

    scheduler: float = 0.0
    tokenizer: float = 0.0
    no_work: float = 0.0
    http: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What displays, metrics and summaries read; counters count from the start of the engine.

    Attributes:
        uptime_s: Seconds since the engine thread started.
        num_running: Samples that hold a slot.
        num_waiting: Samples that wait for one, preempted ones included.
        num_unfinished: Requests not answered yet, not to be confused with samples.
        num_steps: Steps done.
        prompt_tokens: Prompt tokens of the requests that first ran (each prompt once), cached ones included.
        cached_tokens: Those of them that were served from the pool.
        generated_tokens: Tokens sampled.
        computed_tokens: Positions computed, recomputed ones included.
        recomputed_tokens: Positions computed again after a preemption.
        num_preemptions: Preemptions.
        requests_finished: Requests answered, by reason of their first sample.
        requests_aborted: Requests aborted by their callers.
        requests_rejected: Requests refused, by error code.
        prompt_tokens_per_s: Positions of prompts computed, over the last seconds (`timing.WINDOW_S`).
        generated_tokens_per_s: Tokens sampled, over the same time.
        kv_use: Tokens stored over token slots allocated to running requests, shared pages once; 0 if nothing runs.
        pool_use: Part of the pool's blocks that running requests hold, 0 to 1.
        blocks_free: Blocks that hold nothing.
        blocks_cached: Blocks kept for prefix hits, evictable.
        blocks_used: Blocks that running requests hold (shared ones once).
        blocks_shared: Blocks held by more than one of them.
        executor_busy: Part of the time that the executor was computing, 0 to 1, over the same seconds.
        executor_busy_total: The same since the first request.
        executor_seconds: Seconds that the executor was computing.
        gap_seconds: The rest, by cause.
        scheduler: The scheduler's own counters, peaks included.
    """

    uptime_s: float
    num_running: int
    num_waiting: int
    num_unfinished: int
    num_steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    num_preemptions: int
    requests_finished: dict[str, int]
    requests_aborted: int
    requests_rejected: dict[str, int]
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    kv_use: float
    pool_use: float
    blocks_free: int
    blocks_cached: int
    blocks_used: int
    blocks_shared: int
    executor_busy: float
    executor_busy_total: float
    executor_seconds: float
    gap_seconds: GapSeconds
    scheduler: SchedulerStats

    @property
    def prefix_hit_rate(self) -> float:
        """Part of the prompt tokens that was served from the pool, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
