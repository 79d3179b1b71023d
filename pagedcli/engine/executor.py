"""The contract between the engine loop and whatever computes a plan. Standard library and `core` only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagedcli.core.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """Facts about an executor, fixed when it is made.

    Attributes:
        device: "cpu", "cuda:0" ...
        dtype: Weights and activations: "float32", "bfloat16", "float16".
        threads: Compute threads (CPU), else 0.
        block_size: Tokens in a block.
        num_blocks: Usable blocks; ids are 0 to num_blocks - 1.
        max_num_seqs: Slots.
        max_model_len: Longest sequence in tokens.
        vocab_size: Rows of the head: sampled ids are below it.
        weight_bytes: Memory of the weights.
        kv_bytes: Memory of the KV pool.
        notes: What a user should know of how it was made.
    """

    device: str
    dtype: str
    threads: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    weight_bytes: int
    kv_bytes: int
    notes: tuple[str, ...] = ()


class StepHandle(Protocol):
    """A plan under way."""

    def done(self) -> bool:
        """Whether `result` would return at once."""

    def result(self) -> StepResult:
        """Wait for the plan and return its result; raises what the device raised."""


class Executor(Protocol):
    """Runs plans in the order of submission (I10), so freed blocks and slots may be reused at once without fences."""

    @property
    def info(self) -> ExecutorInfo:
        """Facts about the executor."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """Queue the plan and return at once (an inline executor computes it here)."""

    def close(self) -> None:
        """Finish what was submitted and free threads and memory; later calls do nothing."""
