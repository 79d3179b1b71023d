"""The largest step that the settings allow, to measure what it takes. May import torch (through the worker)."""

from __future__ import annotations

from pagedcli.core.plan import Admission, PlanEntry, StepPlan
from pagedcli.core.sampling import MAX_LOGPROBS, SamplingParams
from pagedcli.models.spec import ModelSpec
from pagedcli.runtime.memory import peak_bytes
from pagedcli.runtime.worker import RunsSteps, Worker


def step_bytes(
    model: RunsSteps,
    spec: ModelSpec,
    *,
    dtype: str,
    device: str,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> int:
    """GPU memory that the largest step takes at its peak, beyond weights and KV; see `Worker` for the arguments."""
    plan = largest_step(block_size, max_num_seqs, max_num_batched_tokens, max_model_len)
    worker = Worker(
        model,
        spec,
        dtype=dtype,
        device=device,
        num_blocks=sum(len(entry.admission.table) for entry in plan.entries if entry.admission),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
    )
    return peak_bytes(device, lambda: worker.run(plan))


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
