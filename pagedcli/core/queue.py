"""The waiting requests in policy order. Standard library and `core` only.

I10: within one policy rank, admission is by arrival. The exceptions are bounded: after `max_passed_over` admissions
that were not the longest waiting request's, it is the next, whatever its rank (P5).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from itertools import islice

from pagedcli.core.policy import FIRST_RANK, PREFIX_WINDOW, Policy
from pagedcli.core.request import Request


def _arrival(request: Request) -> int:
    return request.seq


def _policy_order(request: Request) -> tuple[int, int]:
    return request.sort_key


class WaitingQueue:
    """Requests that are not running, sorted twice: by arrival and by the policy.

    Attributes:
        by_arrival: All of them, the oldest first.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.by_arrival: list[Request] = []
        self._in_order: list[Request] = []
        self._by_prefix: list[Request] = []
        self._passed_over = 0

    def __len__(self) -> int:
        return len(self.by_arrival)

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they are considered."""
        first = [self.by_arrival[0]] if self.overdue else []
        ahead = first + [request for request in self._by_prefix if request not in first]
        yield from ahead
        yield from (
            (request for request in self._in_order if request not in ahead) if ahead else self._in_order
        )

    @property
    def overdue(self) -> bool:
        """Whether the request that has waited longest was passed over as often as allowed."""
        return self._passed_over >= self._policy.max_passed_over and bool(self.by_arrival)

    def push(self, request: Request) -> None:
        """Add a new or a preempted request; a preempted one keeps its place by arrival."""
        insort(self.by_arrival, request, key=_arrival)
        insort(self._in_order, request, key=_policy_order)

    def remove(self, request: Request) -> None:
        """Take out a request that ended while it waited."""
        del self.by_arrival[bisect_left(self.by_arrival, request.seq, key=_arrival)]
        del self._in_order[bisect_left(self._in_order, request.sort_key, key=_policy_order)]
        if request in self._by_prefix:
            self._by_prefix.remove(request)

    def first(self, skipped: Collection[Request] = ()) -> Request | None:
        """The next to be admitted, of those that are not skipped."""
        return next((request for request in self if request not in skipped), None)

    def window(self, size: int) -> list[Request]:
        """The first few, in order."""
        return list(islice(self, size))

    def admit(self, request: Request) -> None:
        """Take out a request that starts to run, and count whom it passed over."""
        is_oldest = request is self.by_arrival[0]
        overdue = self.overdue
        self.remove(request)
        self._passed_over = 0 if is_oldest else self._passed_over + 1
        if is_oldest and overdue:
            request.rank = FIRST_RANK

    def refresh(self, match: Callable[[Request], int]) -> None:
        """Order the first of them anew by cached prefix, longest first, where the policy says so."""
        if self._policy.by_prefix:
            matched = [(-match(request), request.seq, request) for request in self.by_arrival[:PREFIX_WINDOW]]
            self._by_prefix = [request for _, _, request in sorted(matched, key=lambda item: item[:2])]
