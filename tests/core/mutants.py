"""Faults on purpose: each edit of the real source must make some check fail (`test_mutants`).

An edit is (file, text, replacement); the text must occur in the file, so that a mutant can not go stale unnoticed.
`WORKLOADS` as killer means the random workloads; otherwise a test function is named.
"""

from __future__ import annotations

from dataclasses import dataclass

WORKLOADS = "workloads"
POOL, KV, ROSTER = "core/block_pool.py", "core/kv_manager.py", "core/roster.py"
SCHEDULER, BUILDER, POLICY = "core/scheduler.py", "core/builder.py", "core/policy.py"
QUEUE, LIMITS, LOOP, PACING = "core/queue.py", "core/limits.py", "engine/core.py", "core/pacing.py"


@dataclass(frozen=True)
class Mutant:
    name: str
    edits: tuple[tuple[str, str, str], ...]
    killer: str = WORKLOADS


def one(name: str, path: str, text: str, replacement: str, killer: str = WORKLOADS) -> Mutant:
    return Mutant(name, ((path, text, replacement),), killer)


MUTANTS = (
    # those of the sketch
    Mutant(
        "a request is admitted again while tokens of it are pending",
        (
            (SCHEDULER, "elif request.num_pending or self._start", "elif self._start"),
            (SCHEDULER, "assert request.num_pending == 0", "assert request is not None"),
        ),
    ),
    one("preemption forgets pending tokens", ROSTER, "request.num_computed = request.prompt_step = 0",
        "request.num_computed = request.prompt_step = request.num_pending = 0"),
    one("a request lives as long as its pending tokens", ROSTER, "if request.inflight == 0:",
        "if request.num_pending == 0:"),
    one("late results publish blocks of a run that is over", SCHEDULER,
        "if entry.epoch == request.epoch and self.kv.caching", "if self.kv.caching"),
    one("blocks of unknown tokens are published", BUILDER, "min(stop, len(request.tokens))", "stop"),
    one("a block keeps its key when it is taken", POOL, "        if key is not None:\n            del self._index[key]",
        "        if False:\n            del self._index[key]"),
    one("a shared block stays in the free list", POOL,
        "            self._unlink(block)\n            self.num_cached -= 1", "            self.num_cached -= 1"),
    one("a hit covers the last token", KV, "(len(tokens) - 1) // size * size", "len(tokens) // size * size"),
    one("hits on free blocks count as available", KV, "revived = sum(refs[block] == 0 for block in shared)",
        "revived = 0"),
    one("a preempted request loses its token in flight", SCHEDULER, "            elif error is not None:",
        "            elif entry.epoch != request.epoch:\n                pass\n            elif error is not None:"),
    one("results are applied last in, first out", LOOP, "self.flight.popleft()", "self.flight.pop()"),
    # reservations and watermark
    one("reserved blocks count as available", KV, "return self.pool.num_free - self.reserved",
        "return self.pool.num_free"),
    one("growth takes what others were promised", KV, "beyond > self.available()", "beyond > self.pool.num_free"),
    one("a reservation is not given back", KV, "        self.reserved -= request.reserved\n        request.table",
        "        request.table"),
    one("the watermark is ignored", SCHEDULER, "return self._watermark if self._roster.running else 0", "return 0",
        "test_scheduler:test_watermark_keeps_pages_free_for_those_that_run"),
    one("the watermark counts when nothing runs", SCHEDULER,
        "return self._watermark if self._roster.running else 0", "return self._watermark"),
    # order
    one("admission is last come, first served", "core/request.py", "return (self.rank, self.seq)",
        "return (self.rank, -self.seq)", "test_invariants:test_I10_admission_within_a_rank_is_by_arrival"),
    one("victims come from the head", POLICY, "for request in reversed(running):", "for request in running:",
        "test_invariants:test_I9_victims_come_from_the_tail"),
    one("nobody is ever overdue", QUEUE, "else self._passed_over + 1", "else 0",
        "test_field_cases:test_C2_flood_of_short_prompts_does_not_starve_a_waiting_long_one"),
    one("decodes do not take turns", POLICY, "return sorted(decodes, key=lambda request: request.served), min",
        "return decodes, min", "test_field_cases:test_A4_decodes_beyond_the_budget_take_turns(2)"),
    one("due decodes leave tokens to prompts", POLICY, "min(kept, budget - num_due)", "kept",
        "test_field_cases:test_A4_decodes_beyond_the_budget_take_turns(2)"),
    one("short prompts do not join", SCHEDULER, "            self._admit_short_prompts(plan)\n", "",
        "test_field_cases:test_C2_short_prompt_is_not_stuck_behind_a_huge_one"),
    # copies and forks
    one("a fork does not copy", KV, "return ((parent.table[num_shared], child.table[num_shared]),)", "return ()"),
    one("a fork copies what is computed in the same plan", SCHEDULER, "0 < parent.prompt_step < step",
        "0 < parent.prompt_step <= step"),
    one("a fork computes nothing again", KV, "num_kept = parent.num_prompt - 1", "num_kept = parent.num_prompt"),
    one("a preempted parent counts as computed", ROSTER, "request.num_computed = request.prompt_step = 0",
        "request.num_computed = 0"),
    # victims
    one("protected requests are victims", POLICY, "and request.num_preemptions < max_preemptions ", "",
        "test_field_cases:test_A3_preemptions_of_one_request_are_bounded(1)"),
    one("protected requests reserve only what they know", POLICY,
        "        return request.max_computed\n    return known", "        return known\n    return known"),
    one("a victim is taken out of the plan that is made", POLICY, "request.served < step and ", ""),
    one("a victim may gain nothing", POLICY, " and kv.gain(request) > 0", "",
        "test_invariants:test_I9_preemption_that_gains_nothing_does_not_happen"),
    # slots
    one("freed slots are not told", SCHEDULER, "plan.build(tuple(roster.freed_slots))", "plan.build(())"),
    one("freed slots are told for ever", SCHEDULER, "            roster.freed_slots.clear()\n", ""),
    # prefix index
    one("the parent is not part of a key", POOL, "return self._index.get(self.make_key(parent,",
        "return self._index.get(self.make_key(ROOT_SERIAL,"),
    one("the salt is not part of a key", KV, "request.params.cache_salt, self.pool.find", '"", self.pool.find',
        "test_invariants:test_I2_no_hit_across_salts_and_none_for_prompt_logprobs({'cache_salt': 'mine'})"),
    one("the head of a prefix is evicted first", KV, "for block in reversed(request.table):",
        "for block in request.table:",
        "test_kv_managers:test_release_lets_the_tail_of_a_prefix_be_evicted_before_its_head"),
    # prompt log-probabilities
    one("prompt log-probabilities are lost to a prefix hit", KV, " or request.prompt_logprobs is not None", ""),
    one("prompt log-probabilities go on after a preemption", ROSTER,
        "            request.prompt_logprobs = []  # the rest", "            pass  # the rest"),
    # ends
    one("the pool's capacity is off by one", LIMITS, "kv.capacity_tokens + 1)", "kv.capacity_tokens)"),
    one("the page cap is off by one", LIMITS, "kv.block_size + 1\n", "kv.block_size\n"),
    one("a page cap ends as length", LIMITS, "cap, FinishReason.PAGE_CAP", "cap, FinishReason.LENGTH"),
    one("stop ids count before min_tokens", SCHEDULER, " and request.num_output > request.params.min_tokens", "",
        "test_scheduler:test_stop_id_counts_only_after_min_tokens()"),
    one("deadlines pass unnoticed", SCHEDULER, "self._deadlines[0][0] <= now", "self._deadlines[0][0] < 0",
        "test_scheduler:test_deadline_ends_a_request_with_what_it_has"),
    # static batches and what is told
    one("ended requests are held for ever", ROSTER, "            self._release(request)\n        self.held.clear()",
        "            pass\n        self.held.clear()"),
    one("a static batch admits at any time", SCHEDULER, "self._static and not self._batch_open", "False",
        "test_scheduler:test_static_batch_admits_nobody_and_frees_nothing_until_it_ends('paged')"),
    one("KV use counts shared blocks twice", ROSTER, "self.gauges.table_tokens - self.kv.duplicate_tokens()",
        "self.gauges.table_tokens"),
    one("peaks are noted when they are over", ROSTER, "        self.note_peaks()\n        index =", "        index =",
        "test_scheduler:test_peaks_are_those_of_the_fullest_step_though_nobody_looked_then"),
    # the pace of running requests
    one("prompts may use the whole budget", SCHEDULER, "plan.budget -= held", "held = 0",
        "test_pacing:test_running_requests_keep_their_pace_beside_a_stream_of_prompts(3)"),
    one("prompts alone are held back, too", SCHEDULER, "self._pacer is None or not plan.entries",
        "self._pacer is None", "test_pacing:test_a_prompt_alone_is_not_held_back"),
    one("a guess that was too high stays", PACING, "if part > MOST_DECODES * seconds:", "if False:",
        "test_pacing:test_a_guess_that_was_too_high_does_not_keep_chunks_small"),
    one("slower is believed by and by", PACING, "measured if measured >= known else known + FASTER_SHARE",
        "known + 0.02", "test_pacing:test_causes_are_told_apart"),
    one("a preemption is taken for something else", PACING, "entry.epoch != request.token_epoch", "False",
        "test_pacing:test_preemption_is_a_cause"),
    one("no margin, and no floor", POLICY, "max(MIN_CHUNK, int(", "max(0, int(",
        "test_pacing:test_prompts_advance_however_dear_they_are"),
)  # fmt: skip
