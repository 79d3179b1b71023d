"""What the end of a run says: rates, KV use, and what contiguous pre-allocation would have reached.

May import `core` and `engine.outputs`. KV use is tokens stored over token slots allocated to running requests,
averaged over time. The contiguous figures follow from the rows themselves: if a sample holds p prompt tokens and then
one more after each of its o steps, it stores sum(p .. p + o - 1) token-steps of the o * reservation it would block.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedcli.cli.progress import Progress
from pagedcli.core.sampling import SamplingParams
from pagedcli.engine.outputs import EngineStats, RequestOutput

# From this part of the time on, what the rest is made of tells nothing.
_HARDLY_IDLE = 0.98


@dataclass(slots=True)
class KVEstimate:
    """Adds up token-steps of the rows that were served.

    Attributes:
        max_model_len: Tokens of the longest sequence; what the coarser reservation blocks for every sample.
        stored: Token-steps stored.
        by_request: Token-steps blocked if prompt + max_tokens are reserved.
        by_longest: Token-steps blocked if the longest sequence is reserved.
    """

    max_model_len: int
    stored: int = 0
    by_request: int = 0
    by_longest: int = 0

    def add(self, params: SamplingParams, output: RequestOutput) -> None:
        """Count a row."""
        prompt = output.usage.prompt_tokens
        room = self.max_model_len - prompt
        wanted = room if params.max_tokens is None else min(params.max_tokens, room)
        for sample in output.samples:
            steps = max(1, len(sample.token_ids))
            self.stored += steps * prompt + steps * (steps - 1) // 2
            self.by_request += steps * (prompt + max(wanted, 0))
            self.by_longest += steps * self.max_model_len

    @property
    def request_use(self) -> float:
        """KV use with prompt + max_tokens reserved, 0 to 1."""
        return self.stored / self.by_request if self.by_request else 0.0

    @property
    def longest_use(self) -> float:
        """KV use with the longest sequence reserved, 0 to 1."""
        return self.stored / self.by_longest if self.by_longest else 0.0


@dataclass(slots=True)
class KVUseMeter:
    """Averages the engine's KV use over the looks that displays take, weighted by the slots allocated.

    Attributes:
        stored: Tokens stored, added up over the looks.
        allocated: Token slots allocated, added up over the looks.
    """

    stored: int = 0
    allocated: int = 0

    def see(self, stats: EngineStats) -> None:
        """Count one look at the engine."""
        self.stored += stats.scheduler.stored_tokens
        self.allocated += stats.scheduler.allocated_tokens

    def use(self, stats: EngineStats) -> float | None:
        """KV use, 0 to 1; of the fullest moment if no look found anything running; None if nothing ever ran."""
        if self.allocated:
            return self.stored / self.allocated
        peak = stats.scheduler.peak_allocated_tokens
        return stats.scheduler.peak_stored_tokens / peak if peak else None


def idle_text(stats: EngineStats) -> str:
    """How busy the executor was, and the causes of what it idled."""
    from pagedcli.cli.display import idle_causes, percent

    causes = idle_causes(stats.gap_seconds)
    busy = stats.executor_busy_total
    idle = f" (of the idle time: {causes})" if causes and busy < _HARDLY_IDLE else ""
    return f"executor {percent(busy)} busy{idle}"


def summary_lines(
    progress: Progress,
    elapsed_s: float,
    stats: EngineStats,
    measured_use: float | None,
    estimate: KVEstimate,
    page_size: int,
) -> list[str]:
    """What a run says at its end."""
    pace = progress.generated_tokens / elapsed_s if elapsed_s > 0 else 0.0
    before = f", {progress.before:,} done before" if progress.before else ""
    cached = f" ({progress.cached_tokens:,} from the prefix cache)" if progress.cached_tokens else ""
    ended = progress.answered + progress.failed
    rows = f"{ended:,} {'row' if ended == 1 else 'rows'} in {elapsed_s:.1f} s"
    counts = f"{progress.answered:,} answered, {progress.failed:,} failed{before}"
    generated = f"{progress.generated_tokens:,} generated ({pace:,.1f}/s)"
    tokens = f"{progress.prompt_tokens:,} prompt tokens{cached}, {generated}"
    lines = [f"{rows}: {counts}", f"{tokens}; {stats.num_preemptions:,} preemptions; {idle_text(stats)}"]
    if measured_use is not None and estimate.stored:
        lines.append(
            f"KV use {measured_use:.1%} of the slots allocated (page {page_size}); contiguous pre-allocation would "
            f"have used {estimate.request_use:.1%} (prompt + max_tokens), {estimate.longest_use:.1%} "
            f"(longest sequence, {estimate.max_model_len:,})"
        )
    return lines
