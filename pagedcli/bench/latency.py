"""From the moments of answers to the figures of a benchmark: TTFT, TPOT, ITL, whole latency, throughput.

Standard library only. Failed requests are counted apart and appear in no distribution. Percentiles interpolate
linearly between the two nearest values, as numpy does by default.

    due         first token      second   ...    last token      end
     |<- TTFT ---->|<-- ITL ------>|<-- ITL -->|      |            |       TPOT = (last - first) / (tokens - 1)
     |<--------------------------- E2E ------------------------->|
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pagedcli.bench.http_answer import Answer


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the sorted `values` lie; NaN of none."""
    if not values:
        return math.nan
    at = share * (len(values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds; NaN if nothing was measured."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        """Of any values."""
        ordered = sorted(values)
        mean = math.fsum(ordered) / len(ordered) if ordered else math.nan
        return cls(mean, *(percentile(ordered, share) for share in (0.5, 0.9, 0.99)))


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a run came to.

    Attributes:
        requests: That were sent.
        failed: Of them, that got no complete answer.
        errors: How often each failure was met, by its first line.
        seconds: From the first request due to the last answer over.
        prompt_tokens: Of the served requests.
        output_tokens: Of the served requests.
        ttft_s: Time to first token.
        tpot_s: Time per output token after the first.
        itl_s: Time between two events with text.
        e2e_s: Whole latency.
    """

    requests: int
    failed: int
    errors: dict[str, int]
    seconds: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens over the whole run."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """As in a benchmark's file."""
        served, seconds = self.requests - self.failed, self.seconds or math.inf
        return {
            "requests": self.requests,
            "failed": self.failed,
            "errors": self.errors,
            "seconds": self.seconds,
            "throughput": {
                "requests_per_s": served / seconds,
                "total_tokens_per_s": (self.prompt_tokens + self.output_tokens) / seconds,
                "output_tokens_per_s": self.output_tokens / seconds,
            },
            **{name: asdict(getattr(self, name)) for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s")},
        }


def summarize(answers: Sequence[Answer]) -> LoadReport:
    """The figures of a run."""
    served = [answer for answer in answers if answer.is_served]
    failures = [answer for answer in answers if not answer.is_served]
    errors: dict[str, int] = {}
    for answer in failures:
        first_line = (answer.error or "no token came").splitlines()[0][:120]
        errors[first_line] = errors.get(first_line, 0) + 1
    per_token = [answer.tpot_s for answer in served]
    return LoadReport(
        requests=len(answers),
        failed=len(failures),
        errors=errors,
        seconds=run_seconds(answers),
        prompt_tokens=sum(answer.prompt_tokens for answer in served),
        output_tokens=sum(answer.output_tokens for answer in served),
        ttft_s=Distribution.of([answer.ttft_s for answer in served]),
        tpot_s=Distribution.of([seconds for seconds in per_token if seconds is not None]),
        itl_s=Distribution.of([gap for answer in served for gap in answer.itl_s]),
        e2e_s=Distribution.of([answer.e2e_s for answer in served]),
    )


def run_seconds(answers: Sequence[Answer]) -> float:
    """From the first request due to the last answer over."""
    if not answers:
        return 0.0
    return max(0.0, max(answer.end_s for answer in answers) - min(answer.start_s for answer in answers))
