"""A step plan in the making: entries are issued into it and the budget runs down. Standard library and `core` only.

I6: `num_pending` and `inflight` of a request are raised here and nowhere else.
"""

from __future__ import annotations

from functools import partial

from pagedcli.core.kv_manager import Copies, KVManager
from pagedcli.core.plan import Admission, PlanEntry, StepPlan
from pagedcli.core.request import Request
from pagedcli.core.stats import Counters

_FIRST_ROW = (0,)
_make_entry = partial(tuple.__new__, PlanEntry)
"""A `PlanEntry` of its items, at a third of the cost of calling the class."""


class PlanBuilder:
    """Collects what one step does.

    Attributes:
        step: Number of the plan.
        budget: Tokens that can still be issued.
        preempted: Whether a request lost its blocks while this plan was made.
    """

    def __init__(self, step: int, budget: int, kv: KVManager, counters: Counters) -> None:
        self.step = step
        self.budget = budget
        self.preempted = False
        self._kv = kv
        self._caching = kv.caching
        self._block_size = kv.block_size
        self._counters = counters
        self._entries: list[PlanEntry] = []
        self._copies: list[tuple[int, int]] = []

    @property
    def num_entries(self) -> int:
        """Requests that are served so far."""
        return len(self._entries)

    def copy(self, copies: Copies) -> None:
        """Have blocks copied before the entries are computed."""
        self._copies.extend(copies)
        self._counters.copied_blocks += len(copies)

    def issue(self, request: Request, n: int, *, admitted: bool = False) -> None:
        """Have the next n positions of a running request computed; its table holds them already (I3)."""
        start, length = request.num_computed, len(request.tokens) + request.num_pending
        stop = start + n
        assert n >= 1, "I3: an entry computes at least one position"
        samples = stop == length < request.max_len
        entry = PlanEntry(
            request.id,
            request.slot,
            request.epoch,
            start,
            n,
            samples,
            _FIRST_ROW if samples and n == 1 else _logit_rows(request, start, n, samples),
            ()
            if admitted or request.num_sent == len(request.table)
            else tuple(request.table[request.num_sent :]),
            _admission(request) if admitted else None,
        )
        self._entries.append(entry)
        request.num_sent = len(request.table)
        request.num_computed = stop
        request.inflight += 1
        request.num_pending += samples
        request.served = self.step
        self.budget -= n
        if admitted or start < request.num_prompt or start < request.peak_computed:
            self._note_progress(request, start, stop, admitted)
        request.peak_computed = max(request.peak_computed, stop)
        if self._caching:  # I11: what is known on the host and issued now
            num_known = min(stop, len(request.tokens))
            if num_known >= (len(request.keys) + 1) * self._block_size:
                self._kv.publish(request, num_known)

    def issue_decode(self, request: Request) -> None:
        """As `issue` of one position, for a request that `is_decoding`: nearly all that a busy engine issues."""
        start, table, sent = request.num_computed, request.table, request.num_sent
        stop = start + 1
        samples = stop < request.max_len
        blocks: tuple[int, ...] = ()
        if sent < len(table):
            blocks = tuple(table[sent:])
            request.num_sent = len(table)
        rows = _FIRST_ROW if samples else ()
        self._entries.append(
            _make_entry((request.id, request.slot, request.epoch, start, 1, samples, rows, blocks, None))
        )
        request.num_computed = stop
        request.inflight += 1
        request.num_pending += samples
        request.served = self.step
        self.budget -= 1
        if start < request.peak_computed:
            self._counters.recomputed_tokens += 1
        else:
            request.peak_computed = stop
        if self._caching and stop >= (len(request.keys) + 1) * self._block_size:  # I11, as in `issue`
            num_known = min(stop, len(request.tokens))
            if num_known >= (len(request.keys) + 1) * self._block_size:
                self._kv.publish(request, num_known)

    def build(self, freed_slots: tuple[int, ...]) -> StepPlan | None:
        """The plan, or None if nothing was issued."""
        if not self._entries:
            return None
        return StepPlan(self.step, tuple(self._entries), tuple(self._copies), freed_slots)

    def _note_progress(self, request: Request, start: int, stop: int, admitted: bool) -> None:
        counters = self._counters
        counters.prompt_tokens += max(0, min(stop, request.num_prompt) - start)
        counters.recomputed_tokens += max(0, min(stop, request.peak_computed) - start)
        if stop >= request.num_prompt and (admitted or start < request.num_prompt):
            request.prompt_step = self.step


def _logit_rows(request: Request, start: int, n: int, samples: bool) -> tuple[int, ...]:
    """The last row if it samples; while prompt log-probabilities are collected, every row that predicts prompt."""
    rows = () if request.prompt_logprobs is None else tuple(range(min(n, request.num_prompt - 1 - start)))
    return (*rows, n - 1) if samples else rows


def _admission(request: Request) -> Admission:
    return Admission(
        tokens=tuple(request.tokens),
        table=tuple(request.table),
        num_prompt=request.num_prompt,
        sample_index=request.sample_index,
        seed=request.seed,
        params=request.params,
        stop_ids=tuple(sorted(request.stop_ids)),
    )
