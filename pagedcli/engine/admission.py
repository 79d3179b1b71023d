"""How many requests may wait before they first run, and what is said to those that come beyond it.

Standard library and `errors` only. The limits are about memory and honesty: a request that would wait for minutes is
better refused at once, with the time after which it is worth trying again. Not locked: the engine's client calls
every method under its own lock, so that two requests cannot take the last place.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pagedcli.errors import RequestError

RATE_WINDOW = 64
"""Starts over which the rate is taken that `Retry-After` follows from."""
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait at most; None: no limit.

    Attributes:
        max_requests: Requests that were accepted and have not run yet.
        max_tokens: Tokens of their prompts. A single request is never too much.
    """

    max_requests: int | None = None
    max_tokens: int | None = None


class WaitingRoom:
    """The requests that were accepted and have not run yet.

    Attributes:
        num_tokens: Tokens of their prompts.
    """

    def __init__(self, limits: QueueLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.num_tokens = 0
        self._clock = clock
        self._tokens: dict[str, int] = {}
        self._starts: deque[float] = deque([clock()], maxlen=RATE_WINDOW)

    @property
    def num_requests(self) -> int:
        """Requests that wait."""
        return len(self._tokens)

    @property
    def is_full(self) -> bool:
        """Whether a request of one token would be refused."""
        return self._shortage(1) is not None

    def enter(self, request_id: str, num_tokens: int) -> None:
        """Take a place.

        Raises:
            RequestError: There is none: 429 with `retry_after_s`.
        """
        shortage = self._shortage(num_tokens)
        if shortage is not None:
            raise RequestError(
                f"{shortage}: try again in {self.retry_after_s():.0f} s",
                code="queue_full",
                status=429,
                retry_after_s=self.retry_after_s(),
            )
        self._tokens[request_id] = num_tokens
        self.num_tokens += num_tokens

    def start(self, request_id: str) -> None:
        """A request runs for the first time; without effect when it runs again."""
        if request_id in self._tokens:
            self._starts.append(self._clock())
            self.leave(request_id)

    def leave(self, request_id: str) -> None:
        """A request waits no more, for whatever reason."""
        self.num_tokens -= self._tokens.pop(request_id, 0)

    def retry_after_s(self) -> float:
        """Seconds in which one request starts, at the rate of the last ones and of the silence since; whole seconds."""
        spans = max(1, len(self._starts) - 1)
        mean = (self._clock() - self._starts[0]) / spans
        return float(math.ceil(min(MAX_RETRY_S, max(MIN_RETRY_S, mean))))

    def _shortage(self, num_tokens: int) -> str | None:
        max_requests, max_tokens = self.limits.max_requests, self.limits.max_tokens
        if max_requests is not None and self.num_requests >= max_requests:
            return f"{self.num_requests} requests wait, the queue takes {max_requests}"
        if max_tokens is not None and self._tokens and self.num_tokens + num_tokens > max_tokens:
            waiting = f"{self.num_tokens} prompt tokens wait, the queue takes {max_tokens}"
            return f"{waiting} and this request has {num_tokens}"
        return None
