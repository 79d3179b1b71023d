"""What one slot's request wants of the sampler, as tensors on the device, and what it does to the logits.

May import torch, `core`, `errors`. The order of operations on a row of logits, the model's own being float32:

    repetition penalty -> presence and frequency penalties -> logit_bias -> forbidden tokens (allowed_token_ids,
    bad_token_ids, stop tokens before min_tokens, bad words) -> temperature -> top_k -> top_p -> min_p

The penalties up to the forbidden tokens are here, in float64; the rest is in `sampler`. Repetition counts prompt and
output, presence and frequency the output only (C11). Counts come from the token store, not from counters of their own,
so that a preemption, a fork or a late result cannot leave them wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedcli.core.plan import Admission
from pagedcli.core.sampling import SamplingParams

MINUS_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True)
class BadWords:
    """Token sequences of two and more tokens, right-aligned in one table.

    Attributes:
        heads: [num_words, longest] int64, all tokens but the last; -1 fills the left.
        last: [num_words] int64.
    """

    heads: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One slot's sampling; made at admission, never changed.

    Attributes:
        params: As in the request.
        seed: Bits of the seed as a signed 64-bit number.
        sample_index: Part of the random numbers' key.
        num_prompt: Tokens at the front of the slot's token store that are prompt.
        forbidden: [any] int64 ids never sampled, or None.
        early_forbidden: [any] int64 ids not sampled before min_tokens, or None.
        bias_ids, bias: [any] int64 and float64, or None.
        bad_words: Or None.
    """

    params: SamplingParams
    seed: int
    sample_index: int
    num_prompt: int
    forbidden: Tensor | None
    early_forbidden: Tensor | None
    bias_ids: Tensor | None
    bias: Tensor | None
    bad_words: BadWords | None

    @property
    def changes_logits(self) -> bool:
        """Whether `adjust` would do anything (before min_tokens is looked at)."""
        return self.penalizes or any(
            part is not None for part in (self.forbidden, self.early_forbidden, self.bias, self.bad_words)
        )

    @property
    def penalizes(self) -> bool:
        """Whether a penalty counts tokens."""
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )

    def adjust(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Penalties, biases and forbidden tokens.

        Args:
            logits: [vocab_size] float64, left as it is.
            tokens: [position] of the slot, prompt and output.

        Returns:
            [vocab_size] float64, -inf for tokens that may not be sampled.
        """
        logits = self._penalized(logits, tokens)
        if self.bias_ids is not None and self.bias is not None:
            logits = logits.index_add(0, self.bias_ids, self.bias)
        if self.forbidden is not None:
            logits = logits.index_fill(0, self.forbidden, MINUS_INFINITY)
        if self.early_forbidden is not None and len(tokens) - self.num_prompt < self.params.min_tokens:
            logits = logits.index_fill(0, self.early_forbidden, MINUS_INFINITY)
        return logits if self.bad_words is None else _without_bad_words(logits, self.bad_words, tokens)

    def _penalized(self, logits: Tensor, tokens: Tensor) -> Tensor:
        params = self.params
        if params.repetition_penalty != 1.0:
            seen = torch.zeros_like(logits, dtype=torch.bool).index_fill(0, tokens.long(), True)
            scaled = torch.where(
                logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
            )
            logits = torch.where(seen, scaled, logits)
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            output = tokens[self.num_prompt :].long()
            counts = torch.zeros_like(logits).index_add(
                0, output, torch.ones_like(output, dtype=logits.dtype)
            )
            logits = logits - counts * params.frequency_penalty
            logits = logits - (counts > 0) * params.presence_penalty
        return logits


def make_sampling_row(admission: Admission, vocab_size: int, device: torch.device) -> SamplingRow:
    """The sampling of a request that is admitted.

    Ids beyond the head's rows cannot be sampled, so that forbidding or biasing them is done already.
    """
    params = admission.params

    def id_tensor(ids: Iterable[int]) -> Tensor | None:
        known = sorted({token for token in ids if token < vocab_size})
        return torch.tensor(known, dtype=torch.int64, device=device) if known else None

    bias = {token: value for token, value in params.logit_bias if token < vocab_size}
    return SamplingRow(
        params=params,
        seed=_signed(admission.seed),
        sample_index=admission.sample_index,
        num_prompt=admission.num_prompt,
        forbidden=id_tensor(_forbidden(params, vocab_size)),
        early_forbidden=id_tensor(admission.stop_ids) if params.min_tokens else None,
        bias_ids=id_tensor(bias),
        bias=torch.tensor([bias[i] for i in sorted(bias)], dtype=torch.float64, device=device)
        if bias
        else None,
        bad_words=_bad_words(params, vocab_size, device),
    )


def _signed(seed: int) -> int:
    bits = seed & (2**64 - 1)
    return bits - 2**64 if bits >= 2**63 else bits


def _forbidden(params: SamplingParams, vocab_size: int) -> list[int]:
    single = [word[0] for word in params.bad_word_ids if len(word) == 1]
    never = [*params.bad_token_ids, *single]
    if params.allowed_token_ids is None:
        return never
    allowed = set(params.allowed_token_ids)
    return [*never, *(token for token in range(vocab_size) if token not in allowed)]


def _bad_words(params: SamplingParams, vocab_size: int, device: torch.device) -> BadWords | None:
    words = [word for word in params.bad_word_ids if len(word) > 1 and word[-1] < vocab_size]
    if not words:
        return None
    longest = max(len(word) for word in words) - 1
    heads = [[-1] * (longest + 1 - len(word)) + list(word[:-1]) for word in words]
    return BadWords(
        torch.tensor(heads, dtype=torch.int64, device=device),
        torch.tensor([word[-1] for word in words], dtype=torch.int64, device=device),
    )


def _without_bad_words(logits: Tensor, words: BadWords, tokens: Tensor) -> Tensor:
    """Forbid the last token of every word whose other tokens are the sequence's last ones."""
    longest = words.heads.shape[1]
    tail = tokens[-longest:].long()
    # Before the sequence's first token stands -2, which no word holds, not even as filling.
    tail = torch.nn.functional.pad(tail, (longest - len(tail), 0), value=-2)
    matches = ((words.heads == tail) | (words.heads == -1)).all(dim=1)
    # Several words may end in the same token: a sum of hits, not an assignment whose order would be open.
    hits = torch.zeros_like(logits).index_add(0, words.last, matches.to(logits.dtype))
    return torch.where(hits > 0, MINUS_INFINITY, logits)
