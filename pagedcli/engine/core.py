"""The one step loop: at most `depth` plans in flight, results applied in the order of submission.

Standard library, `core` and `engine` only. Depth 1 is synchronous; depth 2 schedules step N+1 while the device runs
step N. There is no other loop and no other scheduler (I5: the output is the same at every depth).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from pagedcli.core.plan import StepPlan, StepResult, TokenEvent
from pagedcli.core.scheduler import Scheduler
from pagedcli.engine.executor import Executor, StepHandle

StepWatch = Callable[[float, StepResult, StepPlan], None]


class EngineCore:
    """Scheduler and executor, joined by a queue of plans in flight.

    Attributes:
        on_step: Told of each step when its result is there: when it was submitted, the result, the plan.
        flight: Plans submitted and not applied with the time of submission, oldest first.
        submitted: What the last `step` submitted; None: nothing.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        depth: int = 1,
        clock: Callable[[], float] = time.monotonic,
        on_step: StepWatch | None = None,
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
        return bool(self.flight) or self.scheduler.has_work

    def step(self) -> list[TokenEvent]:
        """Submit a plan if fewer than `depth` are in flight; wait for the oldest when no other can be submitted."""
        events = self.scheduler.expire(self.clock())
        plan = self.submitted = self.scheduler.schedule() if len(self.flight) < self.depth else None
        if plan is not None:
            self.flight.append((self.clock(), plan, self.executor.submit(plan)))
        if self.flight and (len(self.flight) >= self.depth or plan is None):
            submitted, plan, handle = self.flight.popleft()
            result = handle.result()
            if self.on_step is not None:
                self.on_step(submitted, result, plan)
            events += self.scheduler.apply(plan, result, self.clock())
        return events
