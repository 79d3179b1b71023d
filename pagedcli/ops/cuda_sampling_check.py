"""Tries the sampling kernels once against torch, at the start of an engine. Imports torch, numpy and `paged_kernels`.

The reference is the rule written plainly over a full ranking. Rows are chosen so that every way of choosing is gone:
the greatest, a race over all tokens, a list of few candidates, a search for many, and sums over what is ranked before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from paged_kernels import cuda_abi
from paged_kernels.sampling import log_normalizer, ranked, running_sum, vocabulary_noise
from torch import Tensor

from pagedcli.ops.cuda_sampling import ROW, CudaSampling, LogprobTensors

NUM_TOP = 5
LOGPROB_BOUND = 1e-5
SEED, POSITION, SAMPLE_INDEX = 2**63 + 12345, 6, 3
TOKENS, NUM_PROMPT = (7, 7, 11, 5, 1999, 5), 2
BIAS = ((3, 4.0), (5, -1.5))


@dataclass(frozen=True, slots=True)
class Wish:
    """What one row asks for; the defaults ask for nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    changes: bool = False


WISHES = (
    Wish(temperature=0.0),
    Wish(temperature=0.0, changes=True),
    Wish(),
    Wish(temperature=0.7, changes=True),
    Wish(temperature=3.0, top_k=40, top_p=0.8),
    Wish(temperature=3.0, top_k=700, top_p=0.9),
    Wish(temperature=4.0, top_p=0.3),
    Wish(temperature=4.0, min_p=0.2, changes=True),
)


def sampling_difference(kernels: CudaSampling, device: torch.device, vocab_size: int) -> str | None:
    """What is wrong with the kernels on this device, with logits of so many tokens, 2,000 at least; None: nothing."""
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(len(WISHES), vocab_size, generator=generator) * 3).to(device)
    try:
        return _wrong_tokens(kernels, logits) or _wrong_logprobs(kernels, logits)
    except cuda_abi.CudaKernelError as error:
        return str(error)


def _wrong_tokens(kernels: CudaSampling, logits: Tensor) -> str | None:
    wide = logits.double()
    expected = [
        _choose(_changed(row) if wish.changes else row, wish) for row, wish in zip(wide, WISHES, strict=True)
    ]
    held = _Held.on(logits, kernels.room_bytes)
    rows = torch.frombuffer(bytearray(held.rows().tobytes()), dtype=torch.uint8).to(logits.device)
    chosen = torch.full((2, len(WISHES)), -1, dtype=torch.int64, device=logits.device)
    kernels.sample(logits, rows, chosen)
    tokens, faults = chosen.tolist()
    if tokens == expected and not any(faults):
        return None
    return f"it chose {tokens} with faults {faults}, torch {expected}"


def _changed(logits: Tensor) -> Tensor:
    """With a repetition penalty of 1.3, presence 0.4, frequency 0.2, the bias, and every fourth token forbidden."""
    result = logits.clone()
    for token in set(TOKENS):
        result[token] = torch.where(result[token] > 0, result[token] / 1.3, result[token] * 1.3)
    output = TOKENS[NUM_PROMPT:]
    for token in set(output):
        result[token] = result[token] - output.count(token) * 0.2 - 0.4
    for token, bias in BIAS:
        result[token] += bias
    result[::4] = -torch.inf
    return result


def _choose(logits: Tensor, wish: Wish) -> int:
    if wish.temperature == 0.0:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / wish.temperature
    values, ids = (part[0] for part in ranked(scaled[None], len(logits)))
    weights = torch.exp(values)
    keep = torch.arange(len(logits), device=logits.device) < (wish.top_k or len(logits))
    front = running_sum(torch.where(keep, weights, 0.0)[None])[0]
    before = torch.nn.functional.pad(front[:-1], (1, 0))
    keep &= (before < wish.top_p * front[-1]) | (wish.top_p == 1.0)
    keep &= (weights >= wish.min_p) & (values > -torch.inf)
    key = [torch.tensor([word], device=logits.device) for word in (SEED - 2**64, POSITION, SAMPLE_INDEX)]
    scores = values + vocabulary_noise(len(logits), *key)[0][ids]
    return int(ids[scores.masked_fill(~keep, -torch.inf).argmax()])


@dataclass(frozen=True, slots=True)
class _Held:
    """What the rows point to, on the device."""

    tokens: Tensor
    forbidden: Tensor
    bias_ids: Tensor
    bias: Tensor
    rooms: Tensor

    @classmethod
    def on(cls, logits: Tensor, room_bytes: int) -> _Held:
        device = logits.device

        def integers(values: Sequence[int], kind: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=kind, device=device)

        room = (len(TOKENS) + len(BIAS)) * room_bytes
        return cls(
            integers(TOKENS, torch.int32),
            integers(range(0, logits.shape[1], 4)),
            integers([token for token, _ in BIAS]),
            torch.tensor([bias for _, bias in BIAS], dtype=torch.float64, device=device),
            torch.empty((len(WISHES), room), dtype=torch.uint8, device=device),
        )

    def rows(self) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        rows = np.zeros(len(WISHES), ROW)
        rows["repetition_penalty"], rows["seed"], rows["sample_index"] = 1.0, SEED, SAMPLE_INDEX
        rows["tokens"], rows["position"], rows["num_prompt"] = self.tokens.data_ptr(), POSITION, NUM_PROMPT
        for at, wish in enumerate(WISHES):
            rows["logit_row"][at] = at
            for name in ("temperature", "top_k", "top_p", "min_p"):
                rows[name][at] = getattr(wish, name)
            if wish.changes:
                self._change(rows, at)
        return rows

    def _change(self, rows: np.ndarray[tuple[int], np.dtype[np.void]], at: int) -> None:
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        for name, value in zip(names, (1.3, 0.4, 0.2), strict=True):
            rows[name][at] = value
        rows["forbidden"][at], rows["num_forbidden"][at] = self.forbidden.data_ptr(), len(self.forbidden)
        rows["bias_ids"][at], rows["bias"][at] = self.bias_ids.data_ptr(), self.bias.data_ptr()
        rows["num_bias"][at], rows["room"][at] = len(BIAS), self.rooms[at].data_ptr()


def _wrong_logprobs(kernels: CudaSampling, logits: Tensor) -> str | None:
    count, device = len(logits), logits.device
    tokens = torch.arange(0, 100 * count, 100, device=device)
    logit_rows = torch.arange(count, device=device)
    out = LogprobTensors.empty(count, NUM_TOP, device)
    for tensor in (out.chosen, out.ranks, out.top_ids, out.top):
        tensor.fill_(-1)
    kernels.logprobs(logits, logit_rows, tokens, torch.full_like(tokens, NUM_TOP), out)
    wide = logits.double()
    wanted = wide - log_normalizer(wide)[:, None]
    values, ids = ranked(wanted, logits.shape[1])
    ranks = (ids == tokens[:, None]).nonzero()[:, 1] + 1
    chosen = wanted.gather(1, tokens[:, None])[:, 0]
    off = float(torch.cat([out.chosen - chosen, (out.top - values[:, :NUM_TOP]).flatten()]).abs().max())
    if not torch.equal(out.ranks, ranks) or not torch.equal(out.top_ids, ids[:, :NUM_TOP]):
        return "ranks of tokens are not torch's"
    return None if off <= LOGPROB_BOUND else f"log-probabilities are off by {off:.2g}"
