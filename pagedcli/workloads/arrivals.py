"""When requests arrive: offsets in seconds from the start of a run. Standard library only; seeded, so repeatable."""

from __future__ import annotations

import random


def together(num_requests: int) -> list[float]:
    """All at once."""
    return [0.0] * num_requests


def poisson(num_requests: int, rate: float, *, seed: int) -> list[float]:
    """Independently of each other, `rate` a second on average; the first comes after a gap, too."""
    rng = random.Random(seed)
    now = 0.0
    arrivals = []
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        arrivals.append(now)
    return arrivals
