"""The one step loop: at most `depth` plans in flight, results applied in the order of submission.

Standard library, `core` and `engine` only. Depth 1 is synchronous; depth 2 schedules step N+1 while the device runs
step N. There is no other loop and no other scheduler (I5: the output is the same at every depth).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from pagedcli.core.plan import StepPlan, TokenEvent
from pagedcli.core.scheduler import Scheduler
from pagedcli.engine.executor import Executor, StepHandle

StepDone = tuple[float, float, float, tuple[int, ...], StepPlan]
"""When a plan was submitted and when its result was read; the result's seconds and tokens; the plan."""


class EngineCore:
    """Scheduler and executor, joined by a queue of plans in flight.

    Attributes:
        on_step: Told of each step when its result is there.
        flight: Plans submitted and not applied with the time of submission, oldest first.
        submitted: What the last `step` submitted; None: nothing.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        depth: int = 1,
        clock: Callable[[], float] = time.monotonic,
        on_step: Callable[[StepDone], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self.clock = clock
        self.on_step = on_step
        self.flight: deque[tuple[float, StepPlan, StepHandle]] = deque()
        self.submitted: StepPlan | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.flight or self.scheduler.has_work)

    def step(self) -> list[TokenEvent]:
        """Submit a plan if fewer than `depth` are in flight; wait for the oldest when no other can be submitted."""
        scheduler, flight, clock = self.scheduler, self.flight, self.clock
        events = scheduler.expire(clock())
        plan = self.submitted = scheduler.schedule() if len(flight) < self.depth else None
        if plan is not None:
            flight.append((clock(), plan, self.executor.submit(plan)))
        if flight and (plan is None or len(flight) >= self.depth):
            submitted, plan, handle = self.flight.popleft()
            result, now = handle.result(), clock()
            if self.on_step is not None:
                self.on_step((submitted, now, result.seconds, result.tokens, plan))
            events += scheduler.apply(plan, result, now)
        return events
