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


class EngineCore:
    """Scheduler and executor, joined by a queue of plans in flight.

    Attributes:
        flight: Plans submitted and not applied, oldest first.
        submitted: What the last `step` submitted; None: nothing.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        depth: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self.clock = clock
        self.flight: deque[tuple[StepPlan, StepHandle]] = deque()
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
            self.flight.append((plan, self.executor.submit(plan)))
        if self.flight and (len(self.flight) >= self.depth or plan is None):
            plan, handle = self.flight.popleft()
            events += self.scheduler.apply(plan, handle.result(), self.clock())
        return events
