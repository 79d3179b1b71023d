"""A step plan in the making: entries are issued into it and the budget runs down. Standard library and `core` only.

I6: `num_pending` and `inflight` of a request are raised here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pagedcli.core.kv_manager import Copies, KVManager
from pagedcli.core.plan import Admission, PlanEntry, StepPlan
from pagedcli.core.request import Request
from pagedcli.core.stats import Counters

_FIRST_ROW = (0,)
_make_entry = partial(tuple.__new__, PlanEntry)
"""A `PlanEntry` of its items, at a third of the cost of calling the class."""
_make_plan = partial(tuple.__new__, StepPlan)


class PlanBuilder:
    """Collects what one step does, one step after the other.

    Attributes:
        step: Number of the plan.
        budget: Tokens that can still be issued.
        preempted: Whether a request lost its blocks while this plan was made.
        entries: What is issued so far, at most one for each request.
        started: Requests that start to run with this plan.
    """

    def __init__(self, budget: int, kv: KVManager, counters: Counters) -> None:
        self.step = 0
        self.budget = self._whole_budget = budget
        self.preempted = False
        self.entries: list[PlanEntry] = []
        self.started: list[int] = []
        self._kv = kv
        self._counters = counters
        self._copies: list[tuple[int, int]] = []

    def begin(self, step: int) -> None:
        """A new plan, with nothing in it."""
        self.step = step
        self.budget = self._whole_budget
        self.preempted = False
        self.entries = []
        if self.started:  # copies come with those that start
            self.started = []
            self._copies = []

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
        self.entries.append(entry)
        if admitted:
            self.started.append(request.id)
        request.num_sent = len(request.table)
        request.num_computed = stop
        request.inflight += 1
        request.num_pending += samples
        request.served = self.step
        self.budget -= n
        if admitted or start < request.num_prompt or start < request.peak_computed:
            self._note_progress(request, start, stop, admitted)
        if stop >= request.publish_at:
            self._publish_known(request, stop)

    def issue_decodes(
        self, decodes: list[Request], kept: int, find_room: Callable[[PlanBuilder, Request], bool]
    ) -> None:
        """As `issue` of one position for each, in one loop: nearly all that a busy engine issues.

        Args:
            decodes: Requests that are `is_decoding`: every position of theirs samples.
            kept: Tokens of the budget that stay.
            find_room: Gets a request a block for one more token, by preemption if need be; False: it cannot run now.
        """
        step, size, budget = self.step, self._kv.block_size, self.budget
        counters, add = self._counters, self.entries.append
        for request in decodes:
            if budget <= kept:
                break
            start, slot = request.num_computed, request.slot
            if slot < 0:
                continue  # preempted for one before it
            if start % size:
                blocks: tuple[int, ...] = ()  # its block is there: that of the position before it
            else:
                if start == len(request.table) * size and not find_room(self, request):
                    continue
                blocks = tuple(request.table[request.num_sent :])
                request.num_sent = len(request.table)
            add(_make_entry((request.id, slot, request.epoch, start, 1, True, _FIRST_ROW, blocks, None)))
            request.num_computed = stop = start + 1
            request.inflight += 1
            request.num_pending += 1
            budget -= 1
            if request.served + counters.max_decode_gap < step:
                counters.max_decode_gap = step - request.served
            request.served = step
            if start < request.peak_computed:
                counters.recomputed_tokens += 1
            if stop >= request.publish_at:
                self._publish_known(request, stop)
        self.budget = budget

    def build(self, freed_slots: tuple[int, ...]) -> StepPlan | None:
        """The plan, or None if nothing was issued."""
        if not self.entries:
            return None
        return _make_plan((self.step, tuple(self.entries), tuple(self._copies), freed_slots))

    def _publish_known(self, request: Request, stop: int) -> None:
        """I11: what is known on the host and issued now."""
        num_known = min(stop, len(request.tokens))
        if num_known >= request.publish_at:
            self._kv.publish(request, num_known)

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
