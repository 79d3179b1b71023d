"""Hands a workload to a running engine at the moments of its arrivals and collects what comes of it.

May import `core`, `engine` and `workloads`. One thread hands over and collects; gauges are taken on the engine's.
"""

from __future__ import annotations

import heapq
import queue
import time
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
from pagedcli.workloads.requests import WorkloadRequest, prompt_after

MAX_SAMPLES = 1 << 17
"""Samples of a run; a longer one keeps every second of them, and so on."""


@dataclass(slots=True)
class _Sent:
    """A request that was handed over."""

    index: int
    prompt: tuple[int, ...]
    arrival_s: float
    tokens: RequestTokens
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
        self._pending: list[tuple[float, int]] = []  # a heap: what arrives first is sent first
        self._followers: dict[str, list[int]] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}
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
        for index, item in enumerate(self._workload):
            if item.follows is None:
                self._due(index, item.arrival_s)
            else:
                self._followers.setdefault(item.follows, []).append(index)
        while self._pending or self._open:
            self._send_due()
            if not self._open:
                if self._pending:
                    self._sleep(max(0.0, self._until_next()))
                continue
            wait = max(0.0, self._until_next()) if self._pending else None
            try:
                self._take(*self._answers.get(timeout=wait))
            except queue.Empty:
                continue

    def _due(self, index: int, arrival_s: float) -> None:
        """A request is to be sent at that moment."""
        heapq.heappush(self._pending, (arrival_s, index))

    def _until_next(self) -> float:
        return self._start + self._pending[0][0] - self._clock()

    def _send_due(self) -> None:
        """Hand over everything that has arrived; what arrives together reaches the engine in one turn."""
        if not self._pending or self._until_next() > 0:
            return
        with self._client.together():
            while self._pending and (early := self._until_next()) <= 0:
                self._late_s = max(self._late_s, -early)
                arrival_s, index = heapq.heappop(self._pending)
                self._send(index, arrival_s)

    def _send(self, index: int, arrival_s: float) -> None:
        item = self._workload[index]
        prompt = self._prompts.pop(index, item.prompt_token_ids)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=item.max_tokens,
            ignore_eos=True,
            stop_token_ids=(self._recorder.stop_token,),
        )
        spec = RequestSpec(prompt=prompt, params=params, stream=False)
        sent = _Sent(index, prompt, arrival_s, self._recorder.expect(len(prompt), item.output_tokens))
        try:
            self._require_in_vocabulary(item.id, prompt)
            self._client.add(spec, self._sink(sent))
        except RequestError as error:
            self._recorder.forget_last()
            self._finish(sent, str(error), self._clock())
            return
        self._open[index] = sent

    def _require_in_vocabulary(self, name: str, prompt: Sequence[int]) -> None:
        """The engine is told of one token more than there is."""
        largest, size = max(prompt, default=0), self._recorder.stop_token
        if largest >= size:
            raise RequestError(f"{name}: token id {largest}: the vocabulary has ids 0 to {size - 1}")

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
        for index in self._followers.pop(request.id, ()):
            self._next_turn(index, sent, now - self._start)

    def _next_turn(self, index: int, earlier: _Sent, now: float) -> None:
        """What follows a request is due once that is over; after a failed one it keeps its stand-in for the answer."""
        item = self._workload[index]
        if not self._finished[earlier.index].error:
            self._prompts[index] = prompt_after(item, earlier.prompt, earlier.tokens.ids)
        self._due(index, now + item.think_s)

    def _request(self, sent: _Sent, end_s: float | None, error: str | None) -> RequestRun:
        output = sent.output
        return RequestRun(
            id=self._workload[sent.index].id,
            arrival_s=sent.arrival_s,
            prompt_tokens=len(sent.prompt),
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
