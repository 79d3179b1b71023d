"""Runs requests through scheduler, executor and a loaded model, and gathers what comes out of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagedcli.config import SchedulerConfig
from pagedcli.core.kv_manager import PagedKV
from pagedcli.core.plan import TokenLogprob
from pagedcli.core.request import Request
from pagedcli.core.scheduler import Scheduler
from pagedcli.engine.core import EngineCore
from pagedcli.engine.executor import Executor
from pagedcli.models.load import Model
from pagedcli.ops.torch_ops import TorchOps
from pagedcli.runtime.executors import InlineExecutor, Launches, ThreadExecutor
from pagedcli.runtime.samplers import Sampler, sampler_for
from pagedcli.runtime.worker import Worker


@dataclass(frozen=True)
class Setup:
    """How a set of requests is run."""

    block_size: int = 16
    num_blocks: int = 200
    budget: int = 2048
    max_num_seqs: int = 8
    depth: int = 1
    caching: bool = True


@dataclass
class Answer:
    """All that a request gave; compared with `==`."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None


@dataclass
class Run:
    """Answers by request id, and what happened on the way."""

    answers: dict[int, Answer]
    num_preemptions: int
    num_cached: int
    num_steps: int


def run_requests(
    model: Model,
    requests: Sequence[Request],
    setup: Setup,
    max_model_len: int,
    sampler: Sampler | None = None,
) -> Run:
    """Run fresh copies of the requests to the end; `sampler` in the place of the one that goes with the ops."""
    requests = [fresh(request) for request in requests]
    config = SchedulerConfig(
        max_num_seqs=setup.max_num_seqs, max_num_batched_tokens=setup.budget, depth=setup.depth
    )
    kv = PagedKV(setup.num_blocks, setup.block_size, caching=setup.caching)
    scheduler = Scheduler(config, kv, max_model_len=max_model_len)
    worker = make_worker(
        model,
        num_blocks=setup.num_blocks,
        block_size=setup.block_size,
        max_num_seqs=setup.max_num_seqs,
        max_model_len=max_model_len,
        sampler=sampler,
    )
    executor: Executor = ThreadExecutor(worker) if setup.depth > 1 else InlineExecutor(worker)
    core = EngineCore(scheduler, executor, setup.depth, clock=lambda: 0.0)
    answers = {request.id: Answer() for request in requests}
    for request in requests:
        scheduler.add(request, 0.0)
    while core.has_work:
        for event in core.step():
            answer = answers[event.request_id]
            assert event.error is None, event.error
            if event.token is not None:
                answer.tokens.append(event.token)
                answer.logprobs.append(event.logprob)
            if event.prompt_logprobs is not None:
                answer.prompt_logprobs = event.prompt_logprobs
            if event.finish is not None:
                answer.finish = str(event.finish)
    executor.close()
    scheduler.check()
    return Run(
        answers,
        num_preemptions=sum(request.num_preemptions for request in requests),
        num_cached=sum(request.num_cached for request in requests),
        num_steps=scheduler.stats.counters.steps,
    )


def make_worker(model: Model, *, sampler: Sampler | None = None, **sizes: int) -> Launches:
    """The worker of the backend that loaded the model."""
    if isinstance(model.ops, TorchOps):
        sampler = sampler or sampler_for(model.ops, model.spec.vocab_size)
        return Worker(model, model.spec, dtype=model.ops.dtype, threads=1, sampler=sampler, **sizes)
    from pagedcli.ops.native_ops import NativeOps
    from pagedcli.runtime.native_worker import make_native_worker

    assert isinstance(model.ops, NativeOps)
    return make_native_worker(model, model.ops, **sizes)


def fresh(request: Request) -> Request:
    """The request as it was before it ran."""
    return Request(
        request.id,
        list(request.tokens[: request.num_prompt]),
        request.num_prompt,
        request.params,
        request.stop_ids,
        request.seed,
        request.sample_index,
        request.fork_of,
    )


def alone(model: Model, requests: Sequence[Request], max_model_len: int) -> dict[int, Answer]:
    """Each request by itself in one prefill, without cached prefixes and forks."""
    answers: dict[int, Answer] = {}
    for request in requests:
        single = fresh(request)
        single.fork_of = None
        answers |= run_requests(model, [single], Setup(caching=False), max_model_len).answers
    return answers
