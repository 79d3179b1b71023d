"""Counts of a run that its displays read. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """Counts that displays read while the job runs.

    Attributes:
        total: Rows of the input, if it could be counted.
        before: Rows that an earlier run had done.
        answered: Rows served in this run.
        failed: Error rows of this run.
        in_flight: Rows read and not written.
        prompt_tokens: Of the rows served.
        cached_tokens: Of them, from the prefix cache.
        generated_tokens: Of the rows served.
        preemptions: Of the rows served.
    """

    total: int | None = None
    before: int = 0
    answered: int = 0
    failed: int = 0
    in_flight: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0

    @property
    def done(self) -> int:
        """Rows that are written."""
        return self.before + self.answered + self.failed


def expected_seconds(progress: Progress, generated_tokens: int, elapsed_s: float) -> float | None:
    """Until the last row, if the rows to come are as long as those served; None if nothing is known.

    Counts tokens, not rows: rows that run together also end together.

    Args:
        progress: Counts of rows.
        generated_tokens: Of this run, those of unfinished rows included.
        elapsed_s: Of this run.
    """
    if progress.total is None or not progress.answered or not generated_tokens:
        return None
    rows = progress.total - progress.done
    length = progress.generated_tokens / progress.answered
    under_way = max(0, generated_tokens - progress.generated_tokens)
    return elapsed_s * max(rows, rows * length - under_way) / generated_tokens
