"""Who waits, who runs, and how a request changes from one to the other. Standard library and `core` only.

Decides nothing. I7: a request stays known until no plan entry of it is in flight, also when it has ended.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from pagedcli.core.kv_manager import KVManager
from pagedcli.core.policy import Policy
from pagedcli.core.queue import WaitingQueue
from pagedcli.core.request import NEVER, FinishReason, Request
from pagedcli.core.stats import Counters, Gauges, SchedulerStats


def _policy_order(request: Request) -> tuple[int, int]:
    return request.sort_key


class Roster:
    """All requests of a scheduler.

    Attributes:
        requests: By id, every request that lives or has entries in flight.
        running: Requests with a slot, in policy order.
        waiting: Requests without.
        held: Under static batching, ended requests that keep slot and blocks until nothing runs any more.
        free_slots: Slots that can be given out.
        freed_slots: Slots given back since the last plan.
    """

    def __init__(self, kv: KVManager, policy: Policy, max_num_seqs: int, *, hold_ended: bool) -> None:
        self.kv = kv
        self.counters = Counters()
        self.gauges = Gauges()
        self.requests: dict[int, Request] = {}
        self.running: list[Request] = []
        self.waiting = WaitingQueue(policy)
        self.held: list[Request] = []
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.freed_slots: list[int] = []
        self._policy = policy
        self._hold_ended = hold_ended
        self._last_seq = 0

    def add(self, request: Request) -> None:
        """A new request waits."""
        assert request.id not in self.requests, f"request id {request.id} is in use"
        self._last_seq += 1
        request.seq = self._last_seq
        request.rank = self._policy.rank(request)
        self.requests[request.id] = request
        self.waiting.push(request)
        self.counters.added += 1

    def enter(self, request: Request, now: float) -> None:
        """A waiting request that has got its blocks starts to run."""
        self.waiting.admit(request)
        request.slot = self.free_slots.pop()
        insort(self.running, request, key=_policy_order)
        self.gauges.table_tokens += request.num_computed
        if request.epoch == 0:
            request.first_scheduled = now
            request.num_cached = request.num_computed
            self.counters.prefix_query_tokens += request.num_prompt
            self.counters.prefix_hit_tokens += request.num_computed

    def preempt(self, request: Request) -> None:
        """A running request loses its blocks and waits; what is in flight for it still counts (I7)."""
        self._leave_running(request)
        self._release(request)
        request.epoch += 1
        request.peak_computed = max(request.peak_computed, request.num_computed)
        request.num_preemptions += 1
        self.counters.preemptions += 1
        if request.prompt_logprobs is not None and request.prompt_step == 0:
            request.prompt_logprobs = []  # the rest of its prompt was never issued: all of it is computed again
            request.prompt_epoch = request.epoch
        request.num_computed = request.prompt_step = 0
        self.waiting.push(request)
        if not self.running:
            self._release_held()

    def end(self, request: Request, reason: FinishReason) -> None:
        """A request ends; its blocks are free at once, since executors run plans in order (I10)."""
        request.finish = reason
        self.counters.finished[reason] += 1
        if request.slot < 0:
            self.waiting.remove(request)
        else:
            self._leave_running(request)
            if self._hold_ended and self.running:
                self.held.append(request)
            else:
                self._release(request)
        if not self.running:
            self._release_held()
        self.forget_when_done(request)

    def forget_when_done(self, request: Request) -> None:
        """Drop an ended request that has nothing in flight (I7)."""
        if request.inflight == 0:
            del self.requests[request.id]

    def running_parent(self, request: Request) -> Request | None:
        """The running sample 0 whose prompt a request that never ran can share."""
        if request.fork_of is None or request.epoch > 0:
            return None
        parent = self.requests.get(request.fork_of)
        return parent if parent is not None and parent.is_running else None

    def holders(self) -> list[Request]:
        """Requests that hold blocks."""
        return self.running + self.held

    def stored_tokens(self) -> int:
        """Tokens whose KV is stored for requests that hold blocks, shared ones counted once."""
        return self.gauges.table_tokens - self.kv.duplicate_tokens()

    def note_peaks(self) -> None:
        """Raise the peaks. They are looked at only here: values only grow until something is given back."""
        self.gauges.note(len(self.running), self.stored_tokens(), self.kv.allocated_tokens())

    def stats(self) -> SchedulerStats:
        """Counters and gauges now, as a value."""
        self.note_peaks()
        gauges = self.gauges
        return SchedulerStats(
            counters=self.counters.copy(),
            running=len(self.running),
            waiting=len(self.waiting),
            stored_tokens=self.stored_tokens(),
            allocated_tokens=self.kv.allocated_tokens(),
            peak_running=gauges.peak_running,
            peak_allocated_tokens=gauges.peak_allocated_tokens,
            peak_stored_tokens=gauges.peak_stored_tokens,
            blocks=self.kv.counts(),
        )

    def check(self) -> None:
        """Assert what must hold between any two calls of the scheduler."""
        holders = self.holders()
        self.kv.check({r.id: r.table for r in holders}, sum(r.reserved for r in holders))
        assert self.gauges.table_tokens == sum(r.num_computed for r in holders), "table_tokens"
        slots = sorted(self.free_slots + [r.slot for r in holders])
        assert slots == list(range(len(slots))), f"slots are lost or held twice: {slots}"
        assert self.running == sorted(self.running, key=_policy_order), "I10: running is not in policy order"
        listed = sorted(r.id for r in [*self.running, *self.waiting])
        living = sorted(r.id for r in self.requests.values() if r.finish is None)
        assert listed == living, f"{listed} are listed, {living} live"
        for request in self.requests.values():
            self._check_request(request)

    def _check_request(self, request: Request) -> None:
        name = f"request {request.id}"
        assert 0 <= request.num_pending <= request.inflight, f"I6: {name}"
        assert bool(request.table) == (request.slot >= 0), (
            f"{name}: blocks without slot or slot without blocks"
        )
        if request.finish is not None:
            assert request.inflight > 0, f"I7: {name} should be forgotten"
            return
        assert request.num_computed <= request.max_computed, f"{name} computes beyond its limit"
        assert request.num_computed <= len(request.table) * self.kv.block_size, (
            f"I3: {name} outgrew its table"
        )
        known_and_issued = min(len(request.tokens), request.num_computed)
        assert len(request.keys) * self.kv.block_size <= known_and_issued, f"I11: {name} published too much"
        if request.is_running:
            next_block = (len(request.keys) + 1) * self.kv.block_size
            expected = next_block if self.kv.caching else NEVER
            assert request.publish_at == expected, f"I11: {name} publishes at {request.publish_at}"

    def _leave_running(self, request: Request) -> None:
        self.note_peaks()
        index = bisect_left(self.running, request.sort_key, key=_policy_order)
        assert self.running[index] is request, f"request {request.id} is not running"
        del self.running[index]

    def _release(self, request: Request) -> None:
        self.gauges.table_tokens -= request.num_computed
        self.kv.release(request)
        self.free_slots.append(request.slot)
        self.freed_slots.append(request.slot)
        request.slot = -1
        request.num_sent = 0

    def _release_held(self) -> None:
        if self.held:
            self.note_peaks()
        for request in self.held:
            self._release(request)
        self.held.clear()
