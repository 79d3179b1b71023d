"""An engine built over a loaded model, and lists of requests run through it. May import any layer below `bench`.

The requests go the way that users' requests go (queue, scheduler, executor, output stage with its detokenizer), as
token ids, greedy, end of text ignored, all at once.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pagedcli.api.backend import Backend, make_executor
from pagedcli.config import CacheConfig, SchedulerConfig
from pagedcli.core.allocation import make_kv
from pagedcli.core.sampling import SamplingParams
from pagedcli.core.scheduler import Scheduler
from pagedcli.engine.client import EngineSettings, EngineThread
from pagedcli.engine.outputs import Delta
from pagedcli.engine.prompt import RequestSpec, TextCodec
from pagedcli.errors import PagedError
from pagedcli.runtime.executors import Launches
from pagedcli.workloads.requests import WorkloadRequest

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class RunTimes:
    """One run of a list of requests.

    Attributes:
        seconds: From the first request handed over to the last answer.
        outputs: Token ids of each request.
    """

    seconds: float
    outputs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class OpenEngine:
    """An engine's thread and the worker under it."""

    client: EngineThread
    worker: Launches

    def run(self, requests: Sequence[WorkloadRequest]) -> RunTimes:
        """Hand over all requests, which reach the engine in one turn, and wait for all answers."""
        answers: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        specs = [_spec(request) for request in requests]
        start = time.perf_counter()
        with self.client.together():
            ids = [self.client.add(spec, answers.put) for spec in specs]
        outputs: dict[str, tuple[int, ...]] = {}
        while len(outputs) < len(ids):
            delta = answers.get(timeout=TIMEOUT_S)
            assert delta.output is not None
            if delta.output.error is not None:
                raise PagedError(f"a request failed: {delta.output.error}")
            outputs[delta.request_id] = tuple(delta.output.samples[0].token_ids)
        return RunTimes(time.perf_counter() - start, tuple(outputs[name] for name in ids))


@contextmanager
def open_engine(
    backend: Backend,
    codec: TextCodec,
    *,
    depth: int,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    max_model_len: int,
) -> Iterator[OpenEngine]:
    """Start an engine over a loaded model and close it."""
    assert cache.num_pages is not None
    worker = backend.worker(
        num_blocks=cache.num_pages,
        block_size=cache.page_size,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=max_model_len,
    )
    kv = make_kv(cache, cache.num_pages, max_model_len)
    core = Scheduler(scheduler, kv, max_model_len=max_model_len, watermark=cache.watermark)
    client = EngineThread(core, make_executor(worker, depth), codec, EngineSettings(0, depth, None)).start()
    try:
        yield OpenEngine(client, worker)
    finally:
        client.close()


def _spec(request: WorkloadRequest) -> RequestSpec:
    params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
    return RequestSpec(prompt=request.prompt_token_ids, params=params, stream=False)
