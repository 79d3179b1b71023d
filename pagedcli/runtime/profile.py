"""Measures what a model takes of a GPU before its KV pool is made. May import torch (through the worker).

The largest step that the settings allow is carried out once, by a worker whose pool just holds it; then it records its
decode steps. What goes to CUDA itself (graphs, its context) is seen only from outside, by the memory that is free.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pagedcli.core.plan import Admission, PlanEntry, StepPlan
from pagedcli.core.sampling import MAX_LOGPROBS, SamplingParams
from pagedcli.runtime.gpu_memory import GpuUse, out_of_memory
from pagedcli.runtime.graphs import Captures
from pagedcli.runtime.worker import Worker

_MORE_ROOM = "lower --max-num-batched-tokens, --max-num-seqs or --max-model-len, or free the GPU"


def measure(
    device: str,
    make_worker: Callable[[int], Worker],
    plan: StepPlan,
    *,
    captures: Captures | None = None,
    cuda: Any = torch.cuda,
) -> GpuUse:
    """Who takes a GPU's memory, with the weights loaded and no pool.

    Args:
        device: "cuda:0" ...
        make_worker: A worker with a pool of so many blocks.
        plan: The largest step (`largest_step`).
        captures: Records the worker's decode steps; None: they are no graphs.
        cuda: `torch.cuda`, or what stands in for it in a test.

    Raises:
        ConfigError: There is not enough memory even for that.
    """
    place = torch.device(device)
    cuda.empty_cache()
    weights = cuda.memory_allocated(place)
    try:
        buffers, step, graphs = _try_out(cuda, place, make_worker, plan, captures)
    except torch.OutOfMemoryError as error:
        when = f"in the largest step that the settings allow, {plan.num_tokens} tokens"
        raise out_of_memory(place, when, _MORE_ROOM, error, cuda) from error
    # The worker is gone: what is left are the weights, what libraries keep to work in, and what is not torch's.
    cuda.empty_cache()
    buffers += max(0, cuda.memory_allocated(place) - weights)
    free, total = cuda.mem_get_info(place)
    others = max(0, total - free - cuda.memory_reserved(place))
    return GpuUse(device, total, others, weights, buffers, step, graphs)


def _try_out(
    cuda: Any,
    device: torch.device,
    make_worker: Callable[[int], Worker],
    plan: StepPlan,
    captures: Captures | None,
) -> tuple[int, int, int]:
    """Bytes of a worker's buffers, of the step at its peak beyond them, and of the graphs."""
    before = cuda.memory_allocated(device)
    worker = make_worker(sum(len(entry.admission.table) for entry in plan.entries if entry.admission))
    buffers = cuda.memory_allocated(device) - before - worker.info.kv_bytes
    step = _peak(cuda, device, partial(worker.run, plan))
    cuda.empty_cache()
    return buffers, step, 0 if captures is None else _graph_bytes(cuda, device, worker, captures)


def _peak(cuda: Any, device: torch.device, run: Callable[[], object]) -> int:
    """Bytes that `run` allocates at its peak, beyond what was allocated before."""
    cuda.synchronize(device)
    before = cuda.memory_allocated(device)
    cuda.reset_peak_memory_stats(device)
    run()
    cuda.synchronize(device)
    return int(cuda.max_memory_allocated(device) - before)


def _graph_bytes(cuda: Any, device: torch.device, worker: Worker, captures: Captures) -> int:
    before = cuda.mem_get_info(device)[0]
    worker.capture(captures)
    cuda.synchronize(device)
    cuda.empty_cache()
    return max(0, int(before - cuda.mem_get_info(device)[0]))


def largest_step(
    block_size: int, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> StepPlan:
    """A full token budget over as many sequences as may run; every row's logits asked for, every token sampled."""
    count = min(max_num_seqs, max_num_batched_tokens)
    share = min(max_num_batched_tokens // count, max_model_len)
    width = -(-share // block_size)
    params = SamplingParams(
        temperature=1.0,
        top_p=0.9,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        logprobs=MAX_LOGPROBS,
        prompt_logprobs=MAX_LOGPROBS,
    )
    entries = []
    for slot in range(count):
        table = tuple(range(slot * width, (slot + 1) * width))
        admission = Admission((0,) * share, table, share, 0, slot, params, ())
        entries.append(
            PlanEntry(
                request_id=slot,
                slot=slot,
                epoch=0,
                start=0,
                n=share,
                samples=True,
                logit_rows=tuple(range(share)),
                admission=admission,
            )
        )
    return StepPlan(step=1, entries=tuple(entries))
