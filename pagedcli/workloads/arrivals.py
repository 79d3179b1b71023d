"""When requests arrive: offsets in seconds from the start of a run. Standard library only and `errors`; seeded."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from pagedcli.errors import ConfigError

LEAST_RATE = 1e-4
"""Requests per second: one in some three hours."""


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


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A pattern of arrivals.

    Attributes:
        kind: poisson, fixed, bursts or ramp.
        rate: Requests a second on average; of a ramp the first.
        seed: Of Poisson arrivals.
        size: Of a burst.
        last_rate: Of a ramp.
    """

    kind: str
    rate: float
    seed: int = 0
    size: int = 8
    last_rate: float = 0.0

    @classmethod
    def parse(cls, text: str, *, rate: float, seed: int = 0) -> Arrivals:
        """From "poisson", "fixed", "bursts:SIZE" or "ramp:LAST_RATE".

        Raises:
            ConfigError: It is something else, or the rate is none.
        """
        kind, _, value = text.partition(":")
        if not LEAST_RATE <= rate < math.inf:
            raise ConfigError(f"rate {rate:g}: give requests per second, {LEAST_RATE:g} or more")
        if kind == "bursts" and (
            not value or (value.isascii() and value.isdigit() and 0 < int(value) < 10**6)
        ):
            return cls(kind, rate, seed, size=int(value or 8))
        if kind == "ramp" and _is_rate(value):
            return cls(kind, rate, seed, last_rate=float(value))
        if kind not in ("poisson", "fixed") or value:
            raise ConfigError(f"arrivals {text!r}: give poisson, fixed, bursts:SIZE or ramp:LAST_RATE")
        return cls(kind, rate, seed)

    def times(self, num_requests: int) -> list[float]:
        """When so many requests arrive, in seconds."""
        if self.kind == "poisson":
            return poisson(num_requests, self.rate, seed=self.seed)
        if self.kind == "bursts":
            return bursts(num_requests, self.rate, size=self.size)
        if self.kind == "ramp":
            return ramp(num_requests, self.rate, self.last_rate)
        return fixed_rate(num_requests, self.rate)

    def as_dict(self) -> dict[str, object]:
        """As in a benchmark's file."""
        more: dict[str, object] = {"size": self.size} if self.kind == "bursts" else {}
        if self.kind == "ramp":
            more = {"last_rate": self.last_rate}
        return {"kind": self.kind, "requests_per_s": self.rate, **more}


def _is_rate(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
