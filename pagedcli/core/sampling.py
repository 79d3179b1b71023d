"""Sampling parameters of one request, checked when they are made. Standard library only; may import `errors`.

The defaults are those of `paged generate` and the Python API (greedy, 256 tokens); the server starts from OpenAI's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagedcli.errors import RequestError

MAX_LOGPROBS = 20
MAX_N = 128
MAX_LOGIT_BIAS = 100.0


def _require(ok: bool, field: str, value: object, remedy: str) -> None:
    if not ok:
        raise RequestError(f"{field} is {value!r}: {remedy}", code="invalid_value", field=field)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends.

    Attributes:
        temperature: 0 is argmax with ties to the lowest id, always; else logits are divided by it.
        top_k: Keep the k most probable tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of most probable tokens whose probabilities sum to at least top_p.
        min_p: Drop tokens less probable than min_p times the most probable one.
        repetition_penalty: Over prompt and output tokens (CTRL, Keskar et al. 2019); 1 is none.
        presence_penalty: Subtracted once for each token that occurs in the output.
        frequency_penalty: Subtracted for each occurrence of a token in the output.
        logit_bias: (token id, bias) pairs added to the logits, -100 to 100.
        allowed_token_ids: Only these may be sampled; None: all.
        bad_token_ids: These are never sampled.
        bad_words: Texts that never appear; the text layer turns them into `bad_word_ids`.
        allowed_words: Only tokens of these texts may be sampled; the text layer turns them into allowed_token_ids.
        bad_word_ids: Token sequences whose last token is never sampled after the others.
        seed: Makes a request reproducible alone and under load; None: the engine's seed is mixed with a counter.
        n: Samples of the prompt; they share the prompt's pages.
        max_tokens: Output tokens at most; None: as many as fit.
        min_tokens: No stop token, stop text or end of sequence before so many output tokens.
        stop: Texts that end a request; cut from the output unless include_stop_str_in_output.
        stop_token_ids: Token ids that end a request, besides the model's own.
        include_stop_str_in_output: Keep the stop text in the output.
        ignore_eos: Do not end at the model's end-of-sequence tokens.
        logprobs: Number of top alternatives to return for each output token (0: the token's own only); None: none.
        prompt_logprobs: The same for prompt tokens.
        echo: Return the prompt's text before the output.
        skip_special_tokens: Leave special tokens out of the text.
        priority: Lower runs earlier under the priority policy.
        deadline_s: Seconds after arrival at which the request ends with what it has; None: never.
        max_pages: Pages of KV at which the request ends with what it has (finish_reason page_cap); None: no cap.
        cache_salt: Requests share prefixes only with requests of the same salt.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    deadline_s: float | None = None
    max_pages: int | None = None
    cache_salt: str = ""
