"""Tries once, when a model is loaded, whether its decode steps can be recorded here. May import torch, `core`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagedcli.core.plan import Admission, PlanEntry, StepPlan
from pagedcli.core.sampling import SamplingParams
from pagedcli.runtime.graphs import Captures
from pagedcli.runtime.worker import Worker

STARTS = (0, 1)
"""First tokens of the sequences, which run one after the other."""
STEPS = 3
"""Tokens of each."""


def why_not_recorded(make_worker: Callable[[tuple[int, ...]], Worker], captures: Captures) -> str | None:
    """What is wrong with recorded steps of one sequence; None: they choose the tokens of steps op by op.

    Args:
        make_worker: A worker for a sequence of `STEPS` tokens in block 0, with graphs of such sizes.
        captures: What records.
    """
    recorded = make_worker((1,))
    try:
        recorded.capture(captures)
        got = _tokens(recorded)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # Whatever CUDA has against it: the engine can do without.
        return f"recording failed ({str(error).splitlines()[0]})"
    wanted = _tokens(make_worker(()))
    return None if got == wanted else f"recorded steps chose the tokens {got}, op by op it is {wanted}"


def _tokens(worker: Worker) -> list[int]:
    return [worker.run(plan).tokens[0] for first in STARTS for plan in _plans(first)]


def _plans(first: int) -> list[StepPlan]:
    """Decode steps alone, from the first token on."""
    admission = Admission((first,), (0,), 1, 0, 0, SamplingParams(), ())
    entries = [PlanEntry(0, 0, 0, at, 1, True, (0,), (), None if at else admission) for at in range(STEPS)]
    return [StepPlan(1, (entry,), freed_slots=(0,) if entry.admission else ()) for entry in entries]
