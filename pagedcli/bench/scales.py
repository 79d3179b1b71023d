"""How much `paged bench compare` runs, in whole and with `--short`. Plain values, standard library only."""

from __future__ import annotations

from dataclasses import dataclass

ONE_PAGE = 256
"""The page that holds a whole request of the experiment with page sizes."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run. Lengths are tokens, ranges closed.

    Attributes:
        rounds: Turns over the arms of the main comparison, the batches and the policies.
        many_rounds: The same of those whose arms are quick and differ by little: page sizes, and one at a time.
        workload: Of the main comparison; see `workloads.parse`.
        requests: Of that workload.
        pool_tokens: The memory of the main comparison.
        longest: The longest sequence, where the model allows it.
        context_pool: Memory of the experiment with one long request.
        context_short: Prompt and output of the short ones beside it.
        batches: Requests at once.
        batch_requests: Requests of the experiment with batches.
        batch_lengths: Prompt and output of these, and of those with page sizes.
        pages: Page sizes.
        page_prompt: Prompts of the experiment with page sizes.
        page_output: Outputs of it.
        num_short: Short requests of the experiment with long ones.
        short: Their prompt and output.
        num_long: Long requests.
        long: Their prompt and output.
        single_requests: Requests that are run one at a time.
        single: Their prompt and output.
    """

    rounds: int
    many_rounds: int
    workload: str
    requests: int
    pool_tokens: int
    longest: int
    context_pool: int
    context_short: tuple[int, int]
    batches: tuple[int, ...]
    batch_requests: int
    batch_lengths: tuple[int, int]
    pages: tuple[int, ...]
    page_prompt: tuple[int, int]
    page_output: tuple[int, int]
    num_short: int
    short: tuple[int, int]
    num_long: int
    long: tuple[int, int]
    single_requests: int
    single: tuple[int, int]


FULL = Scale(
    rounds=3,
    many_rounds=6,
    workload="shared-prefix:128:16-192:16-192",
    requests=24,
    pool_tokens=6144,
    longest=2048,
    context_pool=2048,
    context_short=(32, 48),
    batches=(1, 2, 4, 8, 16, 32),
    batch_requests=32,
    batch_lengths=(32, 20),
    pages=(8, 16, 32, 64, ONE_PAGE),
    page_prompt=(32, 160),
    page_output=(32, 96),
    num_short=12,
    short=(32, 16),
    num_long=4,
    long=(512, 96),
    single_requests=4,
    single=(32, 32),
)
SHORT = Scale(
    rounds=3,
    many_rounds=3,
    workload="shared-prefix:64:16-48:6-20",
    requests=8,
    pool_tokens=2048,
    longest=1024,
    context_pool=1024,
    context_short=(16, 24),
    batches=(1, 2, 4, 8, 16),
    batch_requests=16,
    batch_lengths=(16, 4),
    pages=(8, 16, 32, ONE_PAGE),
    page_prompt=(32, 96),
    page_output=(8, 16),
    num_short=6,
    short=(16, 6),
    num_long=2,
    long=(192, 24),
    single_requests=1,
    single=(16, 24),
)
