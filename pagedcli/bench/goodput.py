"""Goodput: the requests that were answered as fast as was wanted. Standard library only and `errors`.

A failed request is never good. One without a second token has no time per token, and meets a target for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagedcli.bench.http_answer import Answer
from pagedcli.errors import ConfigError

_NAMES = ("ttft", "tpot", "itl", "e2e")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}


@dataclass(frozen=True, slots=True)
class Targets:
    """Latencies that a request may have at most, in seconds; None: any.

    Attributes:
        ttft_s: To the first token.
        tpot_s: Per output token after the first.
        itl_s: Between any two tokens of the request.
        e2e_s: Of the whole answer.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Targets:
        """From "ttft:500ms,tpot:50ms,e2e:10s".

        Raises:
            ConfigError: It is something else.
        """
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition(":")
            if name not in _NAMES or f"{name}_s" in found:
                raise ConfigError(f"--goodput {text!r}: give targets such as ttft:500ms,tpot:50ms,e2e:10s")
            found[f"{name}_s"] = _seconds(text, value)
        return cls(**found)

    def are_met(self, answer: Answer) -> bool:
        """Whether a request was good."""
        if not answer.is_served:
            return False
        measured = (answer.ttft_s, answer.tpot_s, max(answer.itl_s, default=None), answer.e2e_s)
        wanted = (self.ttft_s, self.tpot_s, self.itl_s, self.e2e_s)
        return all(
            most is None or value is None or value <= most
            for value, most in zip(measured, wanted, strict=True)
        )

    def wanted(self) -> dict[str, float]:
        """Those that there are."""
        values = {f"{name}_s": getattr(self, f"{name}_s") for name in _NAMES}
        return {name: value for name, value in values.items() if value is not None}

    def report(self, answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
        """As in a benchmark's file.

        Args:
            answers: All of a run, failed ones too.
            seconds: Of the run.
        """
        good = [answer for answer in answers if self.are_met(answer)]
        return {
            "targets": self.wanted(),
            "good": len(good),
            "share": len(good) / len(answers) if answers else None,
            "requests_per_s": len(good) / seconds if seconds else 0.0,
            "output_tokens_per_s": sum(a.output_tokens for a in good) / seconds if seconds else 0.0,
        }


def _seconds(whole: str, text: str) -> float:
    number = text.rstrip("msu")
    unit = text[len(number) :]
    try:
        seconds = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"--goodput {whole!r}: {text!r} is no time: write 500ms or 2s")
    return seconds
