"""Chooses tokens and computes log-probabilities, on torch. May import `paged_kernels`, torch and `core`.

Every row's result is a function of that row's logits, tokens and parameters alone, to the last bit, whatever rows it
is sampled with (the rules are in `paged_kernels.sampling`). The order of operations is told in `sampling_rows`.
Cut-offs are ranks, not values: tokens are ordered by logit, ties to the lowest id, and top_k and top_p keep a front of
that order. A row that leaves nothing to sample, or whose logits are no numbers, gets a `Fault` and token 0; the other
rows do not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from paged_kernels.sampling import (
    gumbel_noise,
    log_normalizer,
    ranked,
    rowwise,
    running_sum,
    tree_sum,
    vocabulary_noise,
)
from torch import Tensor

from pagedcli.core.plan import TokenLogprob
from pagedcli.runtime.faults import Fault
from pagedcli.runtime.sampling_rows import SamplingRow
from pagedcli.runtime.transfer import integers, reals

# Rows handled at once in float64: bounds the memory, and keeps a CPU within its caches.
_TILE_ROWS = 16
# Candidates looked at first; grows by this factor while a row keeps more.
_FIRST_CANDIDATES = 64
_CANDIDATE_GROWTH = 8
NO_LIMIT = 2**31
__all__ = ["Fault", "LogprobRequest", "Logprobs", "SampleRequest", "logprobs", "sample"]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One token to sample.

    Attributes:
        logit_row: Row of the step's logits.
        slot: Row of the token store.
        position: Index of the sampled token in its sequence.
        row: The slot's sampling.
    """

    logit_row: int
    slot: int
    position: int
    row: SamplingRow

    @property
    def is_plain(self) -> bool:
        """Whether it is the greatest of the model's own logits that is taken."""
        return self.row.params.is_greedy and not self.row.changes_logits


@dataclass(frozen=True, slots=True)
class LogprobRequest:
    """Log-probabilities of one token under one row of logits; `num_top` alternatives."""

    logit_row: int
    num_top: int


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of several tokens, on the device.

    Attributes:
        tokens: [count] int64.
        chosen: [count] float64.
        ranks: [count] int64.
        top_ids: [count, most] int64.
        top: [count, most] float64.
        num_top: Alternatives asked for, per token.
    """

    tokens: Tensor
    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor
    num_top: tuple[int, ...]

    def to_host(self, begin: Callable[[Tensor], Tensor]) -> Logprobs:
        """Start the copies to the host; `begin` as in `HostCopies`."""
        return Logprobs(
            tokens=begin(self.tokens),
            chosen=begin(self.chosen),
            ranks=begin(self.ranks),
            top_ids=begin(self.top_ids),
            top=begin(self.top),
            num_top=self.num_top,
        )

    def read(self) -> list[TokenLogprob]:
        """As plain values, once the copies are complete."""
        columns = (self.tokens, self.chosen, self.ranks, self.top_ids, self.top)
        rows = zip(*(column.tolist() for column in columns), self.num_top, strict=True)
        return [
            TokenLogprob(token, chosen, rank, tuple(zip(ids[:count], values[:count], strict=True)))
            for token, chosen, rank, ids, values, count in rows
        ]


def sample(logits: Tensor, requests: Sequence[SampleRequest], store: Tensor) -> tuple[Tensor, Tensor]:
    """Choose a token for each request.

    Args:
        logits: [num_logit_rows, vocab_size] float32.
        requests: Not empty.
        store: [max_slots, length] token store.

    Returns:
        Tokens [len(requests)] int64 and faults [len(requests)] int64 (`Fault`), on the device.
    """
    rows = _take(logits, [request.logit_row for request in requests])
    tokens, faults = greatest(rows)
    finite = faults == int(Fault.NONE)
    special = [index for index, request in enumerate(requests) if not request.is_plain]
    for first in range(0, len(special), _TILE_ROWS):
        tile = special[first : first + _TILE_ROWS]
        index = integers(tile, logits.device)
        values = torch.where(finite[index, None], rows[index].double(), 0.0)
        chosen, left = _sample_tile(values, [requests[i] for i in tile], store)
        tokens[index] = chosen
        faults[index] = torch.where(left | ~finite[index], faults[index], int(Fault.NOTHING_LEFT))
    return tokens, faults


def greatest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Token of the greatest logit of each row [rows] int64, ties to the lowest id, and `Fault`s [rows] int64.

    Reads nothing back to the host, so that it can be part of a CUDA graph.
    """
    tokens = logits.argmax(dim=1)
    # A NaN is found as the greatest, so that the greatest tells of the whole row.
    wrong = ~torch.isfinite(logits.gather(1, tokens[:, None])[:, 0])
    # Not `where`, which would send its number to the device, and wait.
    faults = torch.zeros_like(tokens).masked_fill_(wrong, int(Fault.NOT_FINITE))
    return tokens.masked_fill(wrong, 0), faults


def _take(logits: Tensor, rows: list[int]) -> Tensor:
    """The rows in that order, without a copy where they are all of them."""
    return logits if rows == list(range(len(logits))) else logits[integers(rows, logits.device)]


def _sample_tile(logits: Tensor, requests: list[SampleRequest], store: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [rows] and whether anything was left to sample [rows]; logits [rows, vocab_size] float64."""
    adjusted = torch.stack(
        [
            request.row.adjust(row, store[request.slot, : request.position])
            if request.row.changes_logits
            else row
            for row, request in zip(logits, requests, strict=True)
        ]
    )
    left = adjusted.amax(dim=1) > float("-inf")
    adjusted = torch.where(left[:, None], adjusted, 0.0)
    tokens = adjusted.argmax(dim=1)
    for group, choose in (
        ([i for i, r in enumerate(requests) if _keeps_all(r)], _choose_from_all),
        (
            [i for i, r in enumerate(requests) if not _keeps_all(r) and not r.row.params.is_greedy],
            _choose_kept,
        ),
    ):
        if group:
            index = integers(group, logits.device)
            tokens[index] = choose(adjusted[index], [requests[i] for i in group])
    return tokens, left


def _keeps_all(request: SampleRequest) -> bool:
    params = request.row.params
    return not params.is_greedy and params.top_k <= 0 and params.top_p == 1.0 and params.min_p == 0.0


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return reals(values, device)[:, None]


def _tempered(logits: Tensor, requests: list[SampleRequest]) -> Tensor:
    """(logit - greatest) / temperature: at most 0, so that no temperature however small gives NaN."""
    temperatures = _column([request.row.params.temperature for request in requests], logits.device)
    return (logits - logits.amax(dim=1, keepdim=True)) / temperatures


def _noise_key(requests: list[SampleRequest], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    return (
        integers([request.row.seed for request in requests], device),
        integers([request.position for request in requests], device),
        integers([request.row.sample_index for request in requests], device),
    )


def _choose_from_all(logits: Tensor, requests: list[SampleRequest]) -> Tensor:
    """Gumbel-max over the whole vocabulary."""
    noise = vocabulary_noise(logits.shape[1], *_noise_key(requests, logits.device))
    return (_tempered(logits, requests) + noise).argmax(dim=1)


def _choose_kept(logits: Tensor, requests: list[SampleRequest]) -> Tensor:
    """Gumbel-max over what top_k, top_p and min_p keep."""
    scaled = _tempered(logits, requests)
    totals = _kept_weight(scaled, requests)
    tokens = torch.zeros(len(requests), dtype=torch.int64, device=logits.device)
    open_rows = list(range(len(requests)))
    count = _FIRST_CANDIDATES
    while open_rows:
        index = integers(open_rows, logits.device)
        count = min(count, logits.shape[1])
        some = [requests[i] for i in open_rows]
        values, ids = ranked(scaled[index], count)
        keep, complete = _kept(values, some, totals[index], whole=count == logits.shape[1])
        tokens[index] = _choose(values.masked_fill(~keep, float("-inf")), ids, some)
        # A row that is not complete was chosen for too early: it is chosen for again among more candidates.
        open_rows = [i for i, done in zip(open_rows, complete.tolist(), strict=True) if not done]
        count *= _CANDIDATE_GROWTH
    return tokens


def _choose(scores: Tensor, ids: Tensor, requests: list[SampleRequest]) -> Tensor:
    """Gumbel-max over candidates in any order, ties to the lowest id: [rows, count] -> [rows]."""
    noisy = scores + gumbel_noise(ids, *_noise_key(requests, ids.device))
    best = noisy == noisy.amax(dim=1, keepdim=True)
    return torch.where(best, ids, torch.iinfo(torch.int64).max).amin(dim=1)


def _kept_weight(scaled: Tensor, requests: list[SampleRequest]) -> Tensor:
    """Sum of exp(scaled) over the vocabulary for the rows that need it, those with top_p and without top_k."""
    totals = torch.zeros(len(requests), dtype=torch.float64, device=scaled.device)
    need = [i for i, r in enumerate(requests) if r.row.params.top_p < 1.0 and r.row.params.top_k <= 0]
    if need:
        index = integers(need, scaled.device)
        totals[index] = tree_sum(rowwise(torch.exp, scaled[index]))
    return totals


def _kept(
    values: Tensor, requests: list[SampleRequest], totals: Tensor, *, whole: bool
) -> tuple[Tensor, Tensor]:
    """Which candidates the filters keep, and whether the rest of the vocabulary could not have been kept too.

    Args:
        values: [rows, count] scaled logits, descending from 0.
        requests: One per row.
        totals: [rows] weight of the vocabulary, for rows with top_p and without top_k.
        whole: Whether the candidates are the whole vocabulary.

    Returns:
        [rows, count] bool and [rows] bool.
    """
    count, device = values.shape[1], values.device
    params = [request.row.params for request in requests]
    limits = integers([p.top_k if p.top_k > 0 else NO_LIMIT for p in params], device)[:, None]
    keep = torch.arange(count, device=device) < limits
    weights = rowwise(torch.exp, values)
    front = running_sum(torch.where(keep, weights, 0.0))
    # With top_k the distribution that top_p cuts is that of the k tokens; `front` ends with their sum.
    total = torch.where(limits[:, 0] < NO_LIMIT, front[:, -1], totals)[:, None]
    top_p = _column([p.top_p for p in params], device)
    before = torch.nn.functional.pad(front[:, :-1], (1, 0))
    keep &= (before < top_p * total) | (top_p == 1.0)
    keep &= weights >= _column([p.min_p for p in params], device)
    keep &= values > float("-inf")
    if whole:
        return keep, torch.ones(len(requests), dtype=torch.bool, device=device)
    # Among the columns equal to the last candidate the choice of candidates was open: a cut must lie above them.
    safe = ~(keep & (values == values[:, -1:])).any(dim=1)
    total_known = (limits[:, 0] <= count) | (limits[:, 0] == NO_LIMIT) | (top_p[:, 0] == 1.0)
    exhausted = values[:, -1] == float("-inf")
    return keep, (safe & total_known) | exhausted


def logprobs(logits: Tensor, requests: Sequence[LogprobRequest], tokens: Tensor) -> Logprobs:
    """Log-probabilities under the model's own distribution, before temperature and penalties.

    Ranks and alternatives follow the order of the whole module, so the greedy token of unchanged logits has rank 1.

    Args:
        logits: [num_logit_rows, vocab_size] float32.
        requests: Not empty.
        tokens: [len(requests)] int64, one token each.
    """
    num_top = tuple(request.num_top for request in requests)
    most = max(1, *num_top)
    tiles = []
    for first in range(0, len(requests), _TILE_ROWS):
        index = integers([r.logit_row for r in requests[first : first + _TILE_ROWS]], logits.device)
        tiles.append(_logprob_tile(logits[index].double(), tokens[first : first + _TILE_ROWS], most))
    chosen, ranks, top_ids, top = (torch.cat(parts) for parts in zip(*tiles, strict=True))
    return Logprobs(tokens, chosen, ranks, top_ids, top, num_top)


def _logprob_tile(rows: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logprob, rank, top ids, top logprobs) of a tile; rows [rows, vocab_size] float64."""
    most = min(most, rows.shape[1])
    norm = log_normalizer(rows)
    chosen = rows.gather(1, tokens[:, None])
    columns = torch.arange(rows.shape[1], device=rows.device)
    ahead = (rows > chosen) | ((rows == chosen) & (columns < tokens[:, None]))
    values, ids = ranked(rows, min(most + _FIRST_CANDIDATES, rows.shape[1]))
    if bool((values[:, most - 1] == values[:, -1]).any()):
        values, ids = ranked(rows, rows.shape[1])
    return chosen[:, 0] - norm, ahead.sum(dim=1) + 1, ids[:, :most], values[:, :most] - norm[:, None]
