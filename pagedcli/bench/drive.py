"""Hands a workload to a running engine at the moments of its arrivals and collects what comes of it.

May import `core`, `engine` and `workloads`. One thread hands over and collects; gauges are taken on the engine's.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedcli.bench.recorder import Recorder, RequestTokens
from pagedcli.bench.run import Interrupted, RequestRun, Run, Sample, StepTimes, Watch
from pagedcli.core.sampling import SamplingParams
from pagedcli.core.scheduler import Scheduler
from pagedcli.engine.client import EngineThread
from pagedcli.engine.loop import Sink
from pagedcli.engine.outputs import Delta, EngineStats, RequestOutput
from pagedcli.engine.prompt import RequestSpec
from pagedcli.errors import EngineDead, RequestError
from pagedcli.workloads.requests import WorkloadRequest

MAX_SAMPLES = 1 << 17
"""Samples of a run; a longer one keeps every second of them, and so on."""


@dataclass(slots=True)
class _Sent:
    """A request that was handed over."""

    index: int
    tokens: RequestTokens
    end_s: float | None = None
    output: RequestOutput | None = None


class Sampler:
    """Takes gauges after each turn of the engine, on its thread; bounded memory.

    Attributes:
        samples: In order of time.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float], start: float) -> None:
        self.samples: list[Sample] = []
        self._scheduler, self._clock, self._start = scheduler, clock, start
        self._every = self._left = 1

    def __call__(self) -> None:
        """Take one, if it is due."""
        self._left -= 1
        if self._left > 0:
            return
        self._left = self._every
        stats, kv = self._scheduler.stats, self._scheduler.kv
        blocks, size = stats.blocks, kv.block_size
        self.samples.append(
            Sample(
                self._clock() - self._start,
                stats.running,
                stats.waiting,
                stats.stored_tokens,
                stats.allocated_tokens,
                (blocks.free + blocks.cached - blocks.reserved) * size,
                blocks.cached * size,
                blocks.shared * size,
                kv.largest_hole() * size,
                stats.counters.preemptions,
            )
        )
        if len(self.samples) >= MAX_SAMPLES:
            del self.samples[1::2]
            self._every *= 2


class Drive:
    """One run of a workload.

    Args:
        client: Started, and used for nothing else.
        scheduler: Its scheduler.
        recorder: Its executor.
        workload: Requests.
        clock: Of the client, too.
        watch: Told of the run.
        sleep: Waits until the next arrival while nothing runs.
    """

    def __init__(
        self,
        client: EngineThread,
        scheduler: Scheduler,
        recorder: Recorder,
        workload: Sequence[WorkloadRequest],
        clock: Callable[[], float],
        watch: Watch | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client, self._scheduler, self._recorder = client, scheduler, recorder
        self._workload, self._clock, self._watch, self._sleep = workload, clock, watch, sleep
        self._answers: queue.SimpleQueue[tuple[_Sent, float, Delta]] = queue.SimpleQueue()
        self._finished: dict[int, RequestRun] = {}
        self._open: dict[int, _Sent] = {}
        self._start = 0.0
        self._late_s = 0.0

    def run(self, times: Callable[[EngineStats], StepTimes]) -> Run:
        """Run it; `times` is asked at the end where the time went.

        Raises:
            Interrupted: By Ctrl-C; holds what was measured.
            EngineDead: The engine failed.
        """
        self._start = self._clock()
        sampler = Sampler(self._scheduler, self._clock, self._start)
        self._client.on_turn(sampler)
        if self._watch is not None:
            self._watch.started(self._client, self._workload)
        try:
            self._work_through()
            return self._result(sampler, times)
        except KeyboardInterrupt:
            raise Interrupted(self._result(sampler, times, is_interrupted=True)) from None
        finally:
            if self._watch is not None:
                self._watch.ended()

    def _work_through(self) -> None:
        order = sorted(range(len(self._workload)), key=lambda index: self._workload[index].arrival_s)
        pending = deque(order)
        while pending or self._open:
            self._send_due(pending)
            if not self._open:
                if pending:
                    self._sleep(max(0.0, self._until(pending[0])))
                continue
            wait = max(0.0, self._until(pending[0])) if pending else None
            try:
                self._take(*self._answers.get(timeout=wait))
            except queue.Empty:
                continue

    def _until(self, index: int) -> float:
        return self._start + self._workload[index].arrival_s - self._clock()

    def _send_due(self, pending: deque[int]) -> None:
        """Hand over everything that has arrived; what arrives together reaches the engine in one turn."""
        if not pending or self._until(pending[0]) > 0:
            return
        with self._client.together():
            while pending and (early := self._until(pending[0])) <= 0:
                self._late_s = max(self._late_s, -early)
                self._send(pending.popleft())

    def _send(self, index: int) -> None:
        item = self._workload[index]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=item.max_tokens,
            ignore_eos=True,
            stop_token_ids=(self._recorder.stop_token,),
        )
        spec = RequestSpec(prompt=item.prompt_token_ids, params=params, stream=False)
        sent = _Sent(index, self._recorder.expect(len(item.prompt_token_ids), item.output_tokens))
        try:
            self._require_in_vocabulary(item)
            self._client.add(spec, self._sink(sent))
        except RequestError as error:
            self._recorder.forget_last()
            self._finish(sent, str(error), self._clock())
            return
        self._open[index] = sent

    def _require_in_vocabulary(self, item: WorkloadRequest) -> None:
        """The engine is told of one token more than there is."""
        largest, size = max(item.prompt_token_ids, default=0), self._recorder.stop_token
        if largest >= size:
            raise RequestError(f"{item.id}: token id {largest}: the vocabulary has ids 0 to {size - 1}")

    def _sink(self, sent: _Sent) -> Sink:
        answers, clock = self._answers, self._clock
        return lambda delta: answers.put((sent, clock(), delta))

    def _take(self, sent: _Sent, now: float, delta: Delta) -> None:
        output = delta.output
        if output is None:
            return
        if isinstance(output.error, EngineDead):
            raise output.error
        del self._open[sent.index]
        sent.output = output
        self._finish(sent, None if output.error is None else str(output.error), now)

    def _finish(self, sent: _Sent, error: str | None, now: float) -> None:
        wanted, got = self._workload[sent.index].output_tokens, len(sent.tokens.ids)
        if error is None and got < wanted:
            error = (
                f"ended after {got} of {wanted} tokens: sequences have {self._scheduler.max_model_len} at most "
                f"(--max-model-len, --num-pages)"
            )
        request = self._request(sent, now - self._start, error)
        self._finished[sent.index] = request
        if self._watch is not None:
            self._watch.answered(request)

    def _request(self, sent: _Sent, end_s: float | None, error: str | None) -> RequestRun:
        item, output = self._workload[sent.index], sent.output
        return RequestRun(
            id=item.id,
            arrival_s=item.arrival_s,
            prompt_tokens=len(item.prompt_token_ids),
            cached_tokens=0 if output is None else output.usage.cached_tokens,
            token_times=tuple([moment - self._start for moment in sent.tokens.times]),
            token_ids=tuple(sent.tokens.ids),
            end_s=end_s,
            preemptions=0 if output is None else output.num_preemptions,
            error=error,
        )

    def _result(
        self, sampler: Sampler, times: Callable[[EngineStats], StepTimes], *, is_interrupted: bool = False
    ) -> Run:
        stats = self._client.stats()
        now = self._clock() - self._start
        unfinished = {index: self._request(sent, None, None) for index, sent in self._open.items()}
        requests = {**self._finished, **unfinished}
        ends = [request.end_s for request in self._finished.values() if request.end_s is not None]
        return Run(
            seconds=now if is_interrupted or not ends else max(ends),
            requests=tuple(requests[index] for index in sorted(requests)),
            samples=tuple(sampler.samples),
            steps=tuple(step._replace(t=step.t - self._start) for step in self._recorder.steps),
            counters=stats.scheduler.counters,
            times=times(stats),
            page_size=self._scheduler.kv.block_size,
            num_pages=self._scheduler.kv.num_blocks,
            late_s=self._late_s,
            is_interrupted=is_interrupted,
        )
