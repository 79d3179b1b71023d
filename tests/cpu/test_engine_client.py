"""The engine's thread: many callers, aborts at any moment, failures, closing, seeds, forks, deadlines."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import random
import threading
import time
from collections.abc import Iterator

import pytest

from pagedcli.core.plan import StepPlan, StepResult
from pagedcli.core.request import FinishReason
from pagedcli.core.sampling import SamplingParams
from pagedcli.engine.client import EngineThread
from pagedcli.engine.outputs import Delta, RequestOutput
from pagedcli.engine.prompt import RequestSpec
from pagedcli.errors import EngineDead, RequestError
from tests.fakes import FakeExecutor, fake_engine, scripted

LONG = SamplingParams(max_tokens=150)


@contextlib.contextmanager
def running(executor: FakeExecutor | None = None, **settings: object) -> Iterator[EngineThread]:
    engine = fake_engine(executor, **settings)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.close()


def submit(engine: EngineThread, spec: RequestSpec) -> tuple[str, queue.SimpleQueue[Delta]]:
    deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    return engine.add(spec, deltas.put), deltas


def last(deltas: queue.SimpleQueue[Delta]) -> RequestOutput:
    while True:
        delta = deltas.get(timeout=30)
        if delta.output is not None:
            return delta.output


def answer(engine: EngineThread, prompt: str, params: SamplingParams) -> RequestOutput:
    return last(submit(engine, RequestSpec(prompt, params=params))[1])


@dataclasses.dataclass
class GatedExecutor(FakeExecutor):
    """Waits at each step until the test lets it go on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gate = threading.Semaphore(0)

    def _run(self, plan: StepPlan) -> StepResult:
        assert self.gate.acquire(timeout=30)
        return super()._run(plan)

    def open(self) -> None:
        self.gate.release(10**6)


def test_depths_give_the_same_texts_under_preemption_forks_and_stops() -> None:
    def texts(depth: int) -> list[list[str]]:
        rng = random.Random(7)
        executor = FakeExecutor(num_blocks=24, block_size=4, max_model_len=90, threaded=depth > 1)
        with running(executor, depth=depth, max_num_batched_tokens=24, seed=5) as engine:
            waiting = []
            for _ in range(60):
                params = SamplingParams(
                    max_tokens=rng.randrange(1, 40),
                    n=rng.choice([1, 2]),
                    temperature=rng.choice([0.0, 1.0]),
                    stop=rng.choice([(), ("a", "oo"), ("sh",)]),
                )
                prompt = "abcdefgh" * rng.randrange(1, 4) + str(rng.randrange(5))
                waiting.append(submit(engine, RequestSpec(prompt, params=params))[1])
            outputs = [last(deltas) for deltas in waiting]
            assert engine.stats().num_preemptions > 0
        return [[sample.text for sample in output.samples] for output in outputs]

    expected = texts(1)
    assert texts(2) == expected
    assert texts(3) == expected


def test_many_threads_add_and_abort_and_each_request_is_answered_once() -> None:
    executor = FakeExecutor(num_blocks=40, block_size=4, max_model_len=100, threaded=True)
    answers: dict[str, int] = {}
    lock = threading.Lock()

    def sink(delta: Delta) -> None:
        if delta.output is not None:
            with lock:
                answers[delta.request_id] = answers.get(delta.request_id, 0) + 1

    def work(engine: EngineThread, number: int) -> None:
        rng = random.Random(number)
        for index in range(40):
            params = SamplingParams(max_tokens=rng.randrange(1, 30), n=rng.choice([1, 2]))
            spec = RequestSpec("p" * rng.randrange(1, 20), params=params, request_id=f"{number}-{index}")
            name = engine.add(spec, sink)
            if rng.random() < 0.4:
                engine.abort(name)
                engine.abort(name)
            if rng.random() < 0.2:
                engine.stats()
                engine.blocked()

    with running(executor, max_num_batched_tokens=32) as engine:
        threads = [threading.Thread(target=work, args=(engine, number)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert engine.drain(timeout_s=60)
        assert answers == dict.fromkeys((f"{n}-{i}" for n in range(6) for i in range(40)), 1)
        counts = engine.snapshot().counts
        assert (counts.used, counts.reserved) == (0, 0)
        stats = engine.stats()
        assert stats.num_unfinished == 0
        assert sum(stats.requests_finished.values()) + stats.requests_aborted == 240


def test_an_abort_frees_the_pages_within_two_steps_and_keeps_what_was_said() -> None:
    executor = GatedExecutor(threaded=True, max_num_seqs=2)
    with running(executor) as engine:
        name, deltas = submit(engine, RequestSpec("p" * 40, params=LONG))
        executor.gate.release(3)
        first = [deltas.get(timeout=60) for _ in range(2)]
        assert engine.abort(name)
        executor.open()
        output = last(deltas)
        assert output.finish_reason is FinishReason.ABORT
        assert output.error is None
        assert output.text.startswith("".join(delta.text for delta in first))
        assert engine.drain(10)
        assert engine.snapshot().counts.used == 0
        assert len(executor.plans) <= 7
        assert engine.abort(name) is False
        assert engine.stats().requests_aborted == 1


@pytest.mark.parametrize("end_at", [1, 2, 9])
@pytest.mark.parametrize("dies", [False, True])
def test_a_request_that_nobody_reads_is_ended_with_all_its_tokens(end_at: int, dies: bool) -> None:
    """Between its first token and its end the output stage is told nothing: it must catch up."""

    class Ending(FakeExecutor):
        def _run(self, plan: StepPlan) -> StepResult:
            result = super()._run(plan)
            if plan.step == end_at and not dies:
                engine.abort("r")  # the inbox is read before the next step
            return result

    params = SamplingParams(max_tokens=100, n=2, temperature=1.0, seed=3)
    with running() as whole:
        expected = answer(whole, "prompt", params)
    with running(Ending(fail_at=end_at + 1 if dies else None), depth=1) as engine:
        deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        engine.add(RequestSpec("prompt", params=params, request_id="r", stream=False), deltas.put)
        delta = deltas.get(timeout=30)
    assert delta.output is not None, "only the last delta goes to whoever does not stream"
    assert isinstance(delta.output.error, EngineDead) == dies
    assert len(delta.output.samples[0].token_ids) == end_at
    for sample, alone in zip(delta.output.samples, expected.samples, strict=True):
        assert sample.token_ids == alone.token_ids[: len(sample.token_ids)]
        assert sample.text == alone.text[: len(sample.token_ids)]


def test_a_dead_executor_is_told_to_everybody_and_to_every_later_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = FakeExecutor(fail_at=6, threaded=True)
    engine = fake_engine(executor)
    with engine.together():  # else it may die before all of them are there
        waiting = [submit(engine, RequestSpec("p" * 5 * n, params=LONG))[1] for n in range(1, 20)]
    outputs = [last(deltas) for deltas in waiting]
    assert engine.drain(10)
    for output in outputs:
        assert isinstance(output.error, EngineDead)
        assert "the fake device is on fire" in str(output.error)
        assert isinstance(output.error.__cause__, RuntimeError)
    assert any(output.samples[0].text for output in outputs)
    assert isinstance(engine.dead, EngineDead)
    with pytest.raises(EngineDead, match="on fire"):
        engine.add(RequestSpec("late"), waiting[0].put)
    with pytest.raises(EngineDead, match="on fire"):
        engine.snapshot()
    assert engine.stats().num_unfinished == 0
    engine.close()
    assert executor.closed
    assert "on fire" in caplog.text


def test_a_request_that_was_still_in_the_inbox_when_the_engine_died_is_answered_too() -> None:
    executor = GatedExecutor(fail_at=1, threaded=True)
    engine = fake_engine(executor, depth=1)
    _, first = submit(engine, RequestSpec("a"))
    while not executor.plans:
        time.sleep(0.001)
    _, second = submit(engine, RequestSpec("b"))
    executor.open()
    for deltas in (first, second):
        output = last(deltas)
        assert isinstance(output.error, EngineDead)
    assert output.usage.prompt_tokens == 1
    engine.close()


def test_a_stop_text_ends_the_computation() -> None:
    executor = FakeExecutor(scripted({"p": "abc" * 60}), threaded=True, step_seconds=0.002)
    with running(executor) as engine:
        assert answer(engine, "p", SamplingParams(max_tokens=150, stop=("ca",))).text == "ab"
        assert engine.snapshot().counts.used == 0
        time.sleep(0.05)
        assert len(executor.plans) <= 6


def test_the_failure_of_one_request_in_a_step_costs_that_request_only() -> None:
    @dataclasses.dataclass
    class Picky(FakeExecutor):
        def _run(self, plan: StepPlan) -> StepResult:
            result = super()._run(plan)
            bad = [entry.request_id == 1 and self.plans.index(plan) > 3 for entry in plan.entries]
            if not any(bad):
                return result
            return result._replace(
                tokens=tuple(-1 if b else t for b, t in zip(bad, result.tokens, strict=True)),
                errors=tuple("logits are not finite" if b else None for b in bad),
            )

    with running(Picky()) as engine:
        params = SamplingParams(max_tokens=20)
        waiting = [submit(engine, RequestSpec(prompt, params=params))[1] for prompt in ("a", "b", "c")]
        outputs = [last(deltas) for deltas in waiting]
        assert [output.error is None for output in outputs] == [True, False, True]
        assert isinstance(outputs[1].error, RequestError)
        assert (outputs[1].error.status, str(outputs[1].error)) == (500, "logits are not finite")
        assert len(outputs[0].samples[0].token_ids) == 20
        assert engine.snapshot().counts.used == 0


def test_a_sink_that_raises_loses_its_request_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def broken(delta: Delta) -> None:
        raise ValueError("sink")

    with running() as engine:
        name = engine.add(RequestSpec("a", params=LONG), broken)
        assert len(answer(engine, "b", LONG).samples[0].token_ids) == 150
        assert engine.abort(name) is False
        assert engine.snapshot().counts.used == 0
        assert engine.dead is None
        assert engine.stats().requests_aborted == 1
    assert caplog.text.count(name) == 2  # the token's delta, and the last one, that of the abort


def test_a_sink_may_call_the_engine() -> None:
    with running() as engine:
        outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        params = SamplingParams(max_tokens=1)

        def again(delta: Delta) -> None:
            assert delta.output is not None
            outputs.put(delta.output)
            engine.stats()
            engine.snapshot()
            engine.abort("unknown")
            if outputs.qsize() < 3:  # the id is free again as soon as the last delta comes
                engine.add(RequestSpec("x", params=params, request_id=delta.request_id), again)
            else:
                engine.close()

        engine.add(RequestSpec("x", params=params, request_id="same"), again)
        assert engine.drain(60)
        deadline = time.monotonic() + 60
        while outputs.qsize() < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert outputs.qsize() == 3
        with pytest.raises(EngineDead, match="closed"):
            submit(engine, RequestSpec("late"))


def test_ids_of_unfinished_requests_are_not_taken_twice() -> None:
    executor = GatedExecutor(threaded=True)
    with running(executor) as engine:
        _, deltas = submit(engine, RequestSpec("a", request_id="one"))
        with pytest.raises(RequestError, match="'one'") as caught:
            submit(engine, RequestSpec("b", request_id="one"))
        assert caught.value.code == "duplicate_id"
        executor.open()
        assert last(deltas).request_id == "one"
        assert last(submit(engine, RequestSpec("b", request_id="one"))[1]).error is None


def test_close_aborts_and_close_with_drain_serves() -> None:
    for drain, reason in ((False, FinishReason.ABORT), (True, FinishReason.LENGTH)):
        executor = FakeExecutor(threaded=True, step_seconds=0.001)
        engine = fake_engine(executor)
        waiting = [submit(engine, RequestSpec(prompt, params=LONG))[1] for prompt in "abcdefghijkl"]
        engine.close(drain=drain)
        assert {last(deltas).finish_reason for deltas in waiting} == {reason}
        assert executor.closed
        assert engine.snapshot().counts.used == 0
        with pytest.raises(EngineDead, match="closed"):
            submit(engine, RequestSpec("late"))
        engine.close()


def test_the_thread_sleeps_when_there_is_no_work() -> None:
    with running() as engine:
        answer(engine, "a", SamplingParams(max_tokens=3))
        assert engine._thread.native_id is not None
        clock, spent, until = (
            (~engine._thread.native_id << 3) | 6,
            -1.0,
            time.monotonic() + 60,
        )  # Linux's of a thread
        while spent != (spent := time.clock_gettime(clock)):
            assert time.monotonic() < until, "it goes on computing"
            time.sleep(0.3)
        assert spent > 0
        before = engine.stats()
        time.sleep(0.3)
        after = engine.stats()
        assert after.gap_seconds.no_work - before.gap_seconds.no_work > 0.2
        assert after.executor_seconds == before.executor_seconds


def test_deadline_and_page_cap_end_a_request_with_what_it_has() -> None:
    executor = FakeExecutor(threaded=True, block_size=4)
    with running(executor, clock=lambda: 0.01 * len(executor.plans)) as engine:  # as if a step took 10 ms
        output = answer(engine, "abc", SamplingParams(max_tokens=150, deadline_s=0.3))
        assert output.finish_reason is FinishReason.DEADLINE
        assert 0 < len(output.samples[0].token_ids) < 60
        assert output.seconds.total < 0.6
        capped = answer(engine, "abc", SamplingParams(max_tokens=150, max_pages=3))
        assert capped.finish_reason is FinishReason.PAGE_CAP
        assert len(capped.samples[0].token_ids) == 3 * 4 + 1 - 3
        engine.drain(10)
        assert engine.snapshot().counts.used == 0


def test_samples_of_a_prompt_share_its_pages_and_differ() -> None:
    executor = FakeExecutor(num_blocks=20, block_size=16, threaded=True)
    with running(executor) as engine:
        prompt = "p" * 100  # 7 pages: four unshared prompts would need 28
        output = answer(engine, prompt, SamplingParams(n=4, temperature=1.0, max_tokens=12))
        assert len({sample.text for sample in output.samples}) == 4
        assert [sample.index for sample in output.samples] == [0, 1, 2, 3]
        assert output.usage.prompt_tokens == 100
        assert output.usage.completion_tokens == 48
        assert output.num_preemptions == 0
        assert sum(len(plan.copies) for plan in executor.plans) == 3
        assert sum(plan.num_tokens for plan in executor.plans) == 100 + 3 * 1 + 4 * 11
        greedy = answer(engine, prompt, SamplingParams(n=2, max_tokens=12))
        assert greedy.samples[0].text == greedy.samples[1].text


def sampled(engine: EngineThread, prompt: str = "p", seed: int | None = None) -> str:
    return answer(engine, prompt, SamplingParams(temperature=1.0, max_tokens=20, seed=seed)).text


def test_seeds() -> None:
    with running(seed=1) as engine:
        first, second = sampled(engine), sampled(engine)
        assert first != second
        mine = sampled(engine, seed=-5)
        assert mine == sampled(engine, seed=-5)
        assert mine != sampled(engine, seed=6)
    with running(seed=1) as engine:
        assert (sampled(engine), sampled(engine)) == (first, second)
        others = [submit(engine, RequestSpec("x" * n, params=LONG))[1] for n in range(1, 9)]
        assert sampled(engine, seed=-5) == mine
        assert all(last(deltas).error is None for deltas in others)
    with running(seed=2) as engine:
        assert sampled(engine) != first


def test_why_requests_wait_and_who_holds_what() -> None:
    executor = GatedExecutor(threaded=True, num_blocks=10, block_size=16, max_num_seqs=8)
    with running(executor, depth=1) as engine:
        _, one = submit(
            engine, RequestSpec("a" * 120, params=SamplingParams(max_tokens=20), request_id="one")
        )
        _, two = submit(engine, RequestSpec("b" * 60, params=SamplingParams(max_tokens=5), request_id="two"))
        executor.gate.release(3)
        one.get(timeout=60)
        reasons: list[str] = []  # two pages are free, and one of them is the watermark
        reader = threading.Thread(target=lambda: reasons.append(str(engine.blocked()["two"])))
        reader.start()
        executor.gate.release(2)
        reader.join(60)
        executor.open()
        assert reasons == ["needs 4 pages, 1 are available"]
        assert last(one).error is None
        assert last(two).error is None
        assert engine.blocked() == {}


def test_stats_count_tokens_by_hand() -> None:
    with running(FakeExecutor(scripted({"x" * 20: "hello"}), threaded=True)) as engine:
        for _ in range(3):
            assert answer(engine, "x" * 20, SamplingParams()).text == "hello"
        with pytest.raises(RequestError):
            answer(engine, "y" * 300, SamplingParams())
        engine.drain(10)
        deadline = time.monotonic() + 60
        while engine.stats().num_running and time.monotonic() < deadline:
            time.sleep(0.01)
        stats = engine.stats()
    assert stats.generated_tokens == 3 * 6  # with the end-of-sequence token
    assert stats.prompt_tokens == 60
    assert stats.cached_tokens == 2 * 16
    assert stats.prefix_hit_rate == pytest.approx(32 / 60)
    assert stats.requests_finished == {"stop": 3}
    assert stats.requests_rejected == {"prompt_too_long": 1}
    assert stats.blocks_free + stats.blocks_cached == 64
    spent = stats.executor_seconds + sum(dataclasses.astuple(stats.gap_seconds))
    assert 0 < spent <= stats.uptime_s * 1.01


def test_a_request_that_the_pool_can_never_hold_is_refused_in_the_callers_thread() -> None:
    with running(FakeExecutor(num_blocks=5, block_size=16)) as engine:
        with pytest.raises(RequestError, match="needs 7 pages, the pool has 5") as caught:
            submit(engine, RequestSpec("x" * 100))
        assert (caught.value.code, caught.value.status) == ("prompt_too_long", 400)
        assert engine.num_unfinished == 0
        assert answer(engine, "x" * 79, SamplingParams()).finish_reason is FinishReason.LENGTH


def test_a_question_that_comes_while_the_thread_ends_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A display asks until the very end: it must not wait for a thread that looks at its inbox no more."""
    engine = fake_engine()
    answers: list[int] = []
    asker = threading.Thread(target=lambda: answers.append(engine.snapshot().counts.used), daemon=True)
    turn = engine._turn

    def last_turn() -> bool:
        goes_on = turn()
        if not goes_on:
            asker.start()
            while not engine._inbox:
                time.sleep(0.001)
        return goes_on

    monkeypatch.setattr(engine, "_turn", last_turn)
    assert last(submit(engine, RequestSpec("a", params=SamplingParams(max_tokens=1)))[1]).error is None
    engine.close()
    asker.join(60)
    assert answers == [0]
