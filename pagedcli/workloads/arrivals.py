"""When requests arrive: offsets in seconds from the start of a run. Standard library only; seeded, so repeatable."""

from __future__ import annotations

import math
import random


def together(num_requests: int) -> list[float]:
    """All at once."""
    return [0.0] * num_requests


def fixed_rate(num_requests: int, rate: float) -> list[float]:
    """One every 1/`rate` seconds, the first at once."""
    return [index / rate for index in range(num_requests)]


def poisson(num_requests: int, rate: float, *, seed: int) -> list[float]:
    """Independently of each other, `rate` a second on average; the first comes after a gap, too."""
    rng = random.Random(seed)
    now = 0.0
    arrivals = []
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        arrivals.append(now)
    return arrivals


def bursts(num_requests: int, rate: float, *, size: int) -> list[float]:
    """`size` at once, then nothing, so that `rate` a second come on average; the first burst at once."""
    return [index // size * size / rate for index in range(num_requests)]


def ramp(num_requests: int, first_rate: float, last_rate: float) -> list[float]:
    """At a rate that changes evenly over time from `first_rate` to `last_rate` a second, without chance.

    By the time t of a run of T seconds, first t + (last - first) t^2 / 2T requests have come; T is such that all have
    come at its end. Solved for t.
    """
    total_s = 2 * num_requests / (first_rate + last_rate)
    slope = (last_rate - first_rate) / total_s
    if slope == 0:
        return fixed_rate(num_requests, first_rate)
    return [
        2 * index / (first_rate + math.sqrt(max(0.0, first_rate**2 + 2 * slope * index)))
        for index in range(num_requests)
    ]
