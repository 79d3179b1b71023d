"""Golden plans: what the scheduler decides in a few small scenes, as readable JSON that a change must own up to.

To write them anew after a change of policy that is meant: `python -m tests.core.test_golden_plans`, then read the diff.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedcli.core.plan import PlanEntry, StepPlan
from tests.core.bed import Bed, numbers

FOLDER = Path(__file__).parent / "golden"


def chunked_prefill() -> Bed:
    """A long prompt is computed in chunks beside a decode; a short one comes and shares the budget."""
    bed = Bed(num_pages=20, page_size=4, max_num_batched_tokens=8, max_num_seqs=4)
    bed.add(numbers(3), max_tokens=8)
    bed.step()
    bed.add(numbers(30, 100), max_tokens=2)
    bed.step()
    bed.add(numbers(3, 200), max_tokens=2)
    return bed


def shared_prefix() -> Bed:
    """Two prompts with a common prefix in one step, and a third when the first has ended."""
    bed = Bed(num_pages=12, page_size=4, max_num_batched_tokens=64, max_num_seqs=8)
    bed.add(numbers(11), max_tokens=3)
    bed.add([*numbers(8), 90, 91], max_tokens=2)
    bed.drain()
    bed.add([*numbers(11), 1, 2], max_tokens=2)
    return bed


def three_samples() -> Bed:
    """Forks share the full block of the prompt, copy the partial one and compute its last token again."""
    bed = Bed(num_pages=20, page_size=4, max_num_batched_tokens=64, max_num_seqs=8)
    first = bed.add(numbers(7), max_tokens=4)
    for index in (1, 2):
        bed.add(numbers(7), max_tokens=4, fork_of=first, sample_index=index)
    return bed


def preemption() -> Bed:
    """Two requests outgrow the pool at depth 2; the later one loses its blocks and comes back."""
    bed = Bed(num_pages=6, page_size=2, max_num_batched_tokens=16, max_num_seqs=8, depth=2)
    bed.add(numbers(3), max_tokens=8)
    bed.add(numbers(3, 50), max_tokens=6)
    return bed


def static_batch() -> Bed:
    """The third request waits until both of the first batch have ended."""
    bed = Bed(page_size=4, batching="static", max_num_seqs=2)
    for index in range(3):
        bed.add(numbers(4, 50 * index), max_tokens=1 + 2 * index)
    return bed


SCENES: dict[str, Callable[[], Bed]] = {
    scene.__name__: scene
    for scene in (chunked_prefill, shared_prefix, three_samples, preemption, static_batch)
}


def as_json(bed: Bed) -> list[dict[str, Any]]:
    return [plan_row(plan) for plan in bed.drain().plans]


def plan_row(plan: StepPlan) -> dict[str, Any]:
    row: dict[str, Any] = {"step": plan.step}
    if plan.freed_slots:
        row["freed_slots"] = list(plan.freed_slots)
    if plan.copies:
        row["copies"] = [f"{source} -> {target}" for source, target in plan.copies]
    return {**row, "entries": [entry_line(entry) for entry in plan.entries]}


def entry_line(entry: PlanEntry) -> str:
    last = entry.start + entry.n - 1
    positions = f"position {last}" if entry.n == 1 else f"positions {entry.start} to {last}"
    line = f"request {entry.request_id} in slot {entry.slot}: {positions}" + (
        ", samples" if entry.samples else ""
    )
    if entry.admission:
        line += (
            f", admitted with {len(entry.admission.tokens)} tokens and blocks {list(entry.admission.table)}"
        )
    if entry.new_blocks:
        line += f", new blocks {list(entry.new_blocks)}"
    return line


@pytest.mark.parametrize("name", sorted(SCENES))
def test_plans_are_the_golden_ones(name: str) -> None:
    bed = SCENES[name]()
    assert as_json(bed) == json.loads((FOLDER / f"{name}.json").read_text())
    bed.assert_right()


def regenerate() -> None:
    for name, scene in SCENES.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(as_json(scene()), indent=1) + "\n")


if __name__ == "__main__":
    regenerate()
