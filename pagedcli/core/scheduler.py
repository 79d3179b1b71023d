"""Which requests run in a step, with how many tokens and which blocks; and what becomes of the results.

Standard library, `config`, `errors` and `core` only. `schedule()` makes a plan from the state alone (I4: no clock, no
randomness, no input or output, no logging); time enters through `add`, `apply` and `expire`. It never needs the value
of a token to plan the next step, so any number of plans may be in flight (I5: the output is the same).

Why nobody waits forever (P5). Whenever something is unfinished and nothing is in flight, `schedule()` returns a plan:
- Admitted prompts have their blocks reserved, so a prefill always advances once there is budget, and there is: decodes
  that use all of it end some day, and nobody is admitted meanwhile.
- A decode that needs a block takes it from the last in policy order that is not in the plan, down to itself. The first
  in policy order can take everybody's, so it runs; requests that run with everything reserved need no block and run.
- With nothing running, the first in the queue finds all blocks free (the watermark counts only while others run, and
  what can never fit was refused: I12). A fork waits for its parent only while that one runs its prefill.
- Preemptions are bounded per request (A3), and so is how often the longest waiting one is passed over (`queue`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from pagedcli.config import SchedulerConfig
from pagedcli.core import policy
from pagedcli.core.blocked import Blocked
from pagedcli.core.builder import PlanBuilder
from pagedcli.core.events import event_of_items, make_event
from pagedcli.core.kv_manager import KVManager
from pagedcli.core.limits import set_limits
from pagedcli.core.pacing import Pacer
from pagedcli.core.plan import PlanEntry, StepPlan, StepResult, TokenEvent
from pagedcli.core.request import FinishReason, Request
from pagedcli.core.roster import Roster
from pagedcli.core.snapshot import RequestView, Snapshot, take_snapshot, view_request
from pagedcli.core.stats import SchedulerStats
from pagedcli.core.waiting import Doors
from pagedcli.errors import RequestError


class Scheduler:
    """Continuous batching over a KV manager, under one token budget per step.

    Args:
        config: Budget, slots, policy, batching; `depth` is the engine loop's.
        kv: Who allocates; the scheduler is its only user.
        max_model_len: Tokens of the longest sequence.
        model_limit: Tokens that the model was made for, if known: no setting can make sequences longer.
        watermark: Part of the pool kept free when a request is admitted while others run (`CacheConfig.watermark`).

    Attributes:
        started: Requests that start to run, for the first time or again, with the plan that was made last.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        *,
        max_model_len: int,
        model_limit: int | None = None,
        watermark: float = 0.0,
    ) -> None:
        self.config = config
        self.kv = kv
        self.max_model_len = max_model_len
        self.model_limit = model_limit
        self._policy = policy.POLICIES[config.policy]
        self._static = config.batching == "static"
        self._pacer = Pacer(config.max_itl_ms / 1000) if config.max_itl_ms is not None else None
        self._roster = Roster(kv, self._policy, config.max_num_seqs, hold_ended=self._static)
        self._counters = self._roster.counters
        if self._pacer is not None:
            self._counters.itl_misses = self._pacer.misses
        self._watermark = math.ceil(watermark * kv.num_blocks)
        self._batch_open = True
        self._plan = PlanBuilder(config.max_num_batched_tokens, kv, self._counters)
        self._deadlines: list[tuple[float, int]] = []
        self._step = 0  # of the last plan that was issued
        self.started: Sequence[int] = ()
        self._now = math.nan

    # ---- requests come and go

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._roster.running or self._roster.waiting.by_arrival)

    def add(self, request: Request, now: float) -> None:
        """Accept a request.

        Raises:
            RequestError: It can never fit (I12); nothing was changed.
        """
        self._now = now
        try:
            set_limits(request, self.kv, self.max_model_len, self.model_limit)
        except RequestError:
            self._counters.rejected += 1
            raise
        if math.isnan(request.arrival):
            request.arrival = now
        if request.params.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.arrival + request.params.deadline_s, request.id))
        if request.params.prompt_logprobs is not None and request.fork_of is None:
            request.prompt_logprobs = []  # sample 0 delivers them for all samples of its prompt
        self._roster.add(request)

    def abort(self, request_id: int) -> None:
        """End a request whose results nobody wants any more; without effect if it has ended."""
        self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: int, reason: FinishReason) -> None:
        """End a request from outside (stop text, client gone); tokens in flight for it are dropped (I7)."""
        request = self._roster.requests.get(request_id)
        if request is not None and request.finish is None:
            self._roster.end(request, reason)

    def expire(self, now: float) -> list[TokenEvent]:
        """End the requests whose deadline has come, with what they have."""
        self._now = now
        events = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self._roster.requests.get(heapq.heappop(self._deadlines)[1])
            if request is not None and request.finish is None:
                self._roster.end(request, FinishReason.DEADLINE)
                events.append(make_event(request, None))
        return events

    # ---- planning a step

    def schedule(self) -> StepPlan | None:
        """Plan the next step, or None if there is nothing to issue."""
        roster, plan = self._roster, self._plan
        if not roster.running:
            self._batch_open = True
        plan.begin(self._step + 1)
        self._serve_decodes(plan, kept=plan.budget // 2)
        if len(plan.entries) < len(roster.running) or (roster.waiting.by_arrival and roster.free_slots):
            held = self._hold_back(plan)
            self._admit_short_prompts(plan)
            self._serve_prefills(plan)
            self._admit_in_order(plan)
            plan.budget += held
            self._serve_decodes(plan)
        elif plan.budget:
            self._batch_open = False  # everybody decodes and nobody can join: the usual step
        return self._close(plan)

    def _serve_decodes(self, plan: PlanBuilder, kept: int = 0) -> None:
        """Decodes come first, so that no prompt holds them back (A4); those that are not due leave `kept` tokens."""
        step, decodes = plan.step, []
        for request in self._roster.running:
            start = request.num_computed
            is_decoding = request.num_prompt <= start < request.max_computed and (
                start + 1 == len(request.tokens) + request.num_pending
            )  # `Request.is_decoding`, without a call for each
            if is_decoding and request.served < step:
                decodes.append(request)
        if len(decodes) > plan.budget - kept:
            due_step = step - self.config.decode_interval
            decodes, kept = policy.decode_order(decodes, plan.budget, kept, due_step)
        if decodes:
            plan.issue_decodes(decodes, kept, self._find_room)

    def _find_room(self, plan: PlanBuilder, request: Request) -> bool:
        """Get a block for one more token, by preemption if need be (I9); False if the request can not run now."""
        while self.kv.grow(request, request.num_computed + 1) is not None:
            victim = policy.choose_victim(
                self._roster.running, request, plan.step, self.config.max_preemptions, self.kv
            )
            if victim is None:
                return False
            self._roster.preempt(victim)
            plan.preempted = True
            if victim is request:
                return False
        return True

    def _hold_back(self, plan: PlanBuilder) -> int:
        """Take from the budget what prompts may not use, so that the decodes of this step keep their pace."""
        if self._pacer is None or not plan.entries:
            return 0
        held = max(0, plan.budget - self._pacer.prompt_budget(len(plan.entries)))
        plan.budget -= held
        return held

    def _admit_short_prompts(self, plan: PlanBuilder) -> None:
        """Where prefills would take the whole budget, shorter prompts may have up to half of it (C2)."""
        prefills = [request.remaining for request in self._prefills(plan)]
        if not prefills or sum(prefills) < plan.budget:
            return
        self._roster.waiting.refresh(self.kv.match)
        least_budget = plan.budget - plan.budget // 2
        is_first = True
        for request in self._roster.waiting.window(policy.JOIN_WINDOW):
            room = plan.budget - least_budget
            if room == 0 or not self._may_admit(plan):
                return
            if self._joins(plan, request, room, prefills, is_first):
                if self._start(plan, request, room) is not None:
                    return
                prefills.append(request.remaining)
                is_first = False

    def _joins(
        self, plan: PlanBuilder, request: Request, room: int, prefills: list[int], is_first: bool
    ) -> bool:
        """Whether a waiting request may start now, ahead of its turn, beside prefills that go on for long."""
        if request.num_pending or self._waits_for_parent(request, plan.step):
            return False
        if self._roster.waiting.overdue:
            return request is self._roster.waiting.first()
        need = len(request.tokens) - self.kv.match(request)
        return policy.may_join(need, room, prefills, is_first=is_first)

    def _serve_prefills(self, plan: PlanBuilder) -> None:
        """Prompts that are being computed share the budget; their blocks are reserved."""
        prefills = self._prefills(plan)
        shares = policy.split_budget(plan.budget, [request.remaining for request in prefills])
        for request, share in zip(prefills, shares, strict=True):
            if share:
                self._extend(request, share)
                plan.issue(request, share)

    def _prefills(self, plan: PlanBuilder) -> list[Request]:
        running = self._roster.running
        return [r for r in running if r.served < plan.step and not r.is_decoding and r.remaining]

    def _admit_in_order(self, plan: PlanBuilder) -> None:
        """Whoever is first in the queue starts with the budget that is left, until one can not (I8, I10)."""
        if self._may_admit(plan):
            self._roster.waiting.refresh(self.kv.match)
        forks: set[Request] = set()
        while self._may_admit(plan) and (request := self._roster.waiting.first(forks)) is not None:
            if self._waits_for_parent(request, plan.step):
                forks.add(request)
            elif request.num_pending or self._start(plan, request, plan.budget) is not None:
                break
        if plan.budget and not forks:
            self._batch_open = False

    def _close(self, plan: PlanBuilder) -> StepPlan | None:
        roster, counters = self._roster, self._counters
        self.started = plan.started
        built = plan.build(tuple(roster.freed_slots))
        if built is not None:
            roster.freed_slots.clear()
            self._step = plan.step
            num_tokens = self.config.max_num_batched_tokens - plan.budget
            counters.steps += 1
            counters.computed_tokens += num_tokens
            roster.gauges.table_tokens += num_tokens
        return built

    def _may_admit(self, plan: PlanBuilder) -> bool:
        """A place and budget are there; memory that was just taken from somebody is not handed on at once."""
        if plan.budget == 0 or not self._roster.free_slots:
            return False
        batch_closed = self._static and not self._batch_open
        return not self._roster.running or not (plan.preempted or batch_closed)

    def _start(self, plan: PlanBuilder, request: Request, room: int) -> Blocked | None:
        """Admit a request and issue its first chunk of at most `room` tokens, or say why not."""
        assert request.num_pending == 0, "I8: tokens of its last run are in flight"
        num_tokens = policy.reservation(request, self.config.max_preemptions)
        parent = self._roster.running_parent(request)
        if parent is None:
            outcome: Blocked | tuple[tuple[int, int], ...] = (
                self.kv.admit(request, num_tokens, self._spare()) or ()
            )
        else:
            outcome = self.kv.fork(request, parent, num_tokens, self._spare())
        if isinstance(outcome, Blocked):
            return outcome
        plan.copy(outcome)
        self._roster.enter(request, self._now)
        share = min(request.remaining, room)
        self._extend(request, share)
        plan.issue(request, share, admitted=True)
        return None

    def _extend(self, request: Request, n: int) -> None:
        blocked = self.kv.grow(request, request.num_computed + n)
        assert blocked is None, f"the known length of request {request.id} is reserved, yet it {blocked}"

    def _spare(self) -> int:
        return self._watermark if self._roster.running else 0

    def _waits_for_parent(self, request: Request, step: int) -> bool:
        """Its parent's prompt must be issued in an earlier plan: copies are done before the entries of a plan."""
        parent = self._roster.running_parent(request)
        return parent is not None and not 0 < parent.prompt_step < step

    # ---- results

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Take in what came of a plan, in the order in which plans were made."""
        self._now = now
        if self._pacer is not None:
            self._pacer.step_done(plan, result.seconds)
        events = []
        _, sampled, logprobs, prompts, seconds, errors = result
        assert len(plan.entries) == len(sampled) == len(logprobs) == len(prompts), "a result for each entry"
        assert not errors or len(errors) == len(sampled), "an error, or none, for each entry"
        requests, pacer, num_sampled = self._roster.requests, self._pacer, 0
        for row, entry in enumerate(plan.entries):
            request_id, _, _, start, n, samples, _, _, _ = entry  # at once: this loop is most of a step
            request, token = requests[request_id], sampled[row]
            error = errors[row] if errors else None
            request.inflight -= 1
            request.num_pending -= samples
            if request.finish is not None:
                self._counters.dropped_tokens += samples
                self._roster.forget_when_done(request)
            elif error is not None:
                events.append(self._fail(request, error))
            else:
                if request.prompt_logprobs is not None and entry.epoch == request.prompt_epoch:
                    request.prompt_logprobs.extend(prompts[row])
                if samples:
                    # A preempted request keeps the token as well: the uninterrupted run would have given it.
                    num_sampled += 1
                    tokens = request.tokens
                    tokens.append(token)
                    if pacer is not None:
                        pacer.token_came(request, entry, plan, seconds, now)
                    if start + n >= request.publish_at:
                        self._publish_issued(request, entry)
                    if token in request.stop_ids or len(tokens) >= request.max_len:
                        self._end_with(request, token)
                    if request.prompt_logprobs is None:  # `make_event`, without a call for each
                        index, finish = len(tokens) - request.num_prompt - 1, request.finish
                        cached, first = request.num_cached, request.first_scheduled
                        items = (request_id, token, index, logprobs[row], None, finish, None, cached, first)
                        events.append(event_of_items(items))
                    else:
                        events.append(make_event(request, token, logprobs[row]))
                elif start + n == request.max_len:
                    self._roster.end(request, request.limit_reason)
                    events.append(make_event(request, None))
        self._counters.generated_tokens += num_sampled
        return events

    def _publish_issued(self, request: Request, entry: PlanEntry) -> None:
        """I11: blocks that became known just now."""
        if entry.epoch == request.epoch and self.kv.caching:
            self.kv.publish(request, entry.start + entry.n)

    def _end_with(self, request: Request, token: int) -> None:
        """End a request whose last token is a stop token that counts, or the last that it may have."""
        if token in request.stop_ids and request.num_output > request.params.min_tokens:
            self._roster.end(request, FinishReason.STOP)
        elif len(request.tokens) >= request.max_len:
            self._roster.end(request, request.limit_reason)

    def _fail(self, request: Request, error: str) -> TokenEvent:
        self._counters.failed += 1
        self._roster.end(request, FinishReason.ABORT)
        return make_event(request, None, error=error)

    # ---- looking in

    @property
    def stats(self) -> SchedulerStats:
        """Counters and gauges now, as a value."""
        return self._roster.stats()

    def snapshot(self) -> Snapshot:
        """Every block and every request, as a value."""
        return take_snapshot(self._step, self._roster, self._waiting_views())

    def blocked(self, request_id: int) -> Blocked | None:
        """Why a request waits; None if it runs, has ended or is not known."""
        views = {view.id: view.blocked for view in self._waiting_views()}
        return views.get(request_id)

    def check(self) -> None:
        """Assert the invariants that can be seen from outside a step; for tests and debugging."""
        self._roster.check()

    def _waiting_views(self) -> tuple[RequestView, ...]:
        roster, next_step = self._roster, self._step + 1
        doors = Doors(
            kv=self.kv,
            roster=roster,
            batch_closed=bool(self._static and roster.running and not self._batch_open),
            spare=self._spare(),
            max_preemptions=self.config.max_preemptions,
            budget=self._plan.budget,
        )
        views = []
        for ahead, request in enumerate(roster.waiting):
            waits_for_parent = self._waits_for_parent(request, next_step)
            reason = doors.why_closed(request, ahead, waits_for_parent=waits_for_parent)
            views.append(view_request(request, reason))
        return tuple(views)
