"""How long steps take, learned from those that are done, so that prompts leave running requests their pace.

Standard library and `core` only. Time enters through `Scheduler.apply(plan, result, now)` and nowhere else (I4). The
time of a step is seen as a part for its decodes and a part for each prompt token:

    seconds = decode_s * max(1, decodes / decodes it was seen with) + token_s * prompt tokens

`decode_s` comes from steps without prompt tokens, `token_s` from all others by what is left. So the next chunk is the
last one times (wanted - decodes) / (taken - decodes), which settles where the step takes what is wanted, also when
the parts are not quite right. Slower is believed at once, faster by and by.
"""

from __future__ import annotations

import math
from enum import StrEnum

from pagedcli.core.plan import PlanEntry, StepPlan
from pagedcli.core.policy import PACE_MARGIN, prompt_budget
from pagedcli.core.request import Request

FASTER_SHARE = 0.25
"""Part of an improvement that is believed at once."""
MOST_DECODES = 0.9
"""Part of a step with prompt tokens that its decodes take at most: what one prompt token costs stays above nothing."""
FIRST_TOKEN_S = 1e-3
"""Seconds for a prompt token before any was seen: a slow machine's, so that the first chunk is a small one."""


class MissCause(StrEnum):
    """Why a token came later than `max_itl_ms` after the one before it."""

    PREFILL = "prefill"
    BATCH = "batch"
    PREEMPTION = "preemption"
    HOST = "host"


class Pacer:
    """Estimates of a step's parts, and the misses.

    Args:
        max_itl_s: Longest time wanted between two tokens of a running request.

    Attributes:
        decode_s: Time of a step without prompt tokens; 0: not known.
        token_s: Time that a prompt token adds.
        host_s: Time between two steps.
        misses: Tokens that came late, by cause.
    """

    def __init__(self, max_itl_s: float) -> None:
        self.max_itl_s = max_itl_s
        self.decode_s = 0.0
        self.token_s = FIRST_TOKEN_S
        self.host_s = 0.0
        self.misses: dict[str, int] = dict.fromkeys(map(str, MissCause), 0)
        self._num_decodes = 1
        self._has_seen_prompts = False

    def prompt_budget(self, num_decodes: int) -> int:
        """Prompt tokens that may be computed in a step with so many decodes."""
        return prompt_budget(self.max_itl_s - self.host_s, self._decodes_s(num_decodes), self.token_s)

    def _decodes_s(self, num_decodes: int) -> float:
        return self.decode_s * max(1.0, num_decodes / self._num_decodes) if num_decodes else 0.0

    def step_done(self, plan: StepPlan, seconds: float) -> None:
        """Learn from a step: `seconds` is what the device took."""
        num_decodes = sum(map(_is_decode, plan.entries))
        num_prompt = plan.num_tokens - num_decodes
        if num_prompt == 0:
            self.decode_s = _followed(self._decodes_s(num_decodes), seconds)
            self._num_decodes = num_decodes
            return
        part = self._decodes_s(num_decodes)
        if part > MOST_DECODES * seconds:
            # They cannot take more than the whole; a guess that is too high would keep chunks small for ever.
            part = self.decode_s = MOST_DECODES * seconds
            self._num_decodes = max(1, num_decodes)
        measured = (seconds - part) / num_prompt
        self.token_s = _followed(self.token_s, measured) if self._has_seen_prompts else measured
        self._has_seen_prompts = True

    def token_came(
        self, request: Request, entry: PlanEntry, plan: StepPlan, seconds: float, now: float
    ) -> None:
        """Count a token that came late, and note the time for the next one."""
        gap = now - request.token_time
        if not math.isnan(gap):
            if gap > self.max_itl_s:
                self.misses[self._cause(request, entry, plan, seconds)] += 1
            elif plan.step == request.token_step + 1:
                self.host_s = _followed(self.host_s, min(max(0.0, gap - seconds), self.max_itl_s / 2))
        request.token_time, request.token_step, request.token_epoch = now, plan.step, entry.epoch

    def _cause(self, request: Request, entry: PlanEntry, plan: StepPlan, seconds: float) -> MissCause:
        if entry.epoch != request.token_epoch:
            return MissCause.PREEMPTION
        if plan.step == request.token_step + 1 and seconds <= self.max_itl_s:
            return MissCause.HOST
        num_decodes = sum(map(_is_decode, plan.entries))
        only_decodes = num_decodes == len(plan.entries)
        too_many = self._decodes_s(num_decodes) >= self.max_itl_s * PACE_MARGIN
        if plan.step > request.token_step + 1 or only_decodes or too_many:
            return MissCause.BATCH
        return MissCause.PREFILL


def _is_decode(entry: PlanEntry) -> bool:
    return entry.n == 1 and entry.samples and entry.admission is None


def _followed(known: float, measured: float) -> float:
    """Slower at once, faster by and by."""
    return measured if measured >= known else known + FASTER_SHARE * (measured - known)
