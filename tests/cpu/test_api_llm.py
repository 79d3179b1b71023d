"""`LLM` and `AsyncLLM` on a tiny model: forms of calls, streams that are left, interrupts, cancellation, closing."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import pagedcli
from pagedcli.api.async_llm import AsyncLLM
from pagedcli.api.llm import LLM
from pagedcli.core.request import FinishReason
from pagedcli.core.sampling import SamplingParams
from pagedcli.engine.outputs import RequestOutput
from pagedcli.errors import CheckpointError, ConfigError, EngineDead, RequestError
from tests.conftest import MakeModel

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SETTINGS: dict[str, Any] = {"device": "cpu", "threads": 1, "num_pages": 100, "max_num_seqs": 8, "seed": 1}


@pytest.fixture(scope="module")
def path(tiny_checkpoint: MakeModel) -> str:
    return str(tiny_checkpoint("llama"))


@pytest.fixture(scope="module")
def llm(path: str) -> Any:
    with LLM(path, **SETTINGS) as llm:
        yield llm


def wait_until_idle(llm: LLM | AsyncLLM) -> None:
    """All pages are back soon, without anybody waiting for them."""
    deadline = time.monotonic() + 60
    while llm.engine.client.snapshot().counts.used and time.monotonic() < deadline:
        time.sleep(0.005)
    assert llm.engine.client.snapshot().counts.used == 0
    assert llm.engine.client.num_unfinished == 0


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.text for output in outputs]


def test_one_prompt_many_prompts_ids_and_chat(llm: LLM) -> None:
    (one,) = llm.generate("Hello", SHORT)
    (by_ids,) = llm.generate(llm.encode("Hello"), SHORT)
    assert one.prompt == "Hello"
    assert by_ids.prompt is None
    assert by_ids.samples == one.samples
    assert texts(llm.generate(["Hello", llm.encode("Hello")], SHORT)) == [one.text] * 2
    assert llm.generate([], SHORT) == []
    messages = [{"role": "user", "content": "hi"}]
    (answer,) = llm.chat(messages, SHORT)
    assert answer.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert texts(llm.chat([messages, messages], SHORT)) == [answer.text] * 2
    assert llm.generate(llm.encode(answer.prompt), SHORT)[0].text == answer.text
    each = [SHORT, SamplingParams(max_tokens=2, ignore_eos=True)]
    assert [len(o.samples[0].token_ids) for o in llm.generate(["a", "b"], each)] == [6, 2]
    assert llm.decode(llm.encode("Hello")) == "Hello"


def test_progress_counts_to_the_end(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    llm.generate(
        ["a", "b", ""], SHORT, errors="return", progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_refused_prompt_ends_the_call_and_nothing_runs_on(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["a" * 50, "b" * 50, ""], LONG)
    wait_until_idle(llm)


def test_an_interrupt_aborts_what_the_call_asked_for(llm: LLM) -> None:
    before = llm.stats().requests_aborted

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], [SHORT, LONG, LONG], progress=interrupt)
    wait_until_idle(llm)
    assert llm.stats().requests_aborted == before + 2
    assert llm.generate("a", SHORT)[0].error is None


@pytest.mark.parametrize("how", ["close", "with", "drop", "unused"])
def test_a_stream_that_is_left_aborts_its_request(llm: LLM, how: str) -> None:
    before = llm.stats().requests_aborted
    stream = llm.stream("The", LONG)
    if how != "unused":
        assert next(stream).index == 0
    if how == "close":
        stream.close()
        assert list(stream) == []
    elif how == "with":
        with stream:
            next(stream)
    del stream
    gc.collect()
    wait_until_idle(llm)
    assert llm.stats().requests_aborted == before + 1


def test_a_finished_stream_aborts_nothing(llm: LLM) -> None:
    before = llm.stats().requests_aborted
    deltas = list(llm.stream("The", SHORT))
    assert deltas[-1].output is not None
    assert "".join(delta.text for delta in deltas) == llm.generate("The", SHORT)[0].text
    with pytest.raises(RequestError, match="empty"):
        llm.stream("", SHORT)
    assert llm.stats().requests_aborted == before


def test_calls_from_several_threads_share_the_engine(llm: LLM) -> None:
    prompts = [[f"{name}{i}" for i in range(4)] for name in "abcd"]
    expected = [texts(llm.generate(group, SHORT)) for group in prompts]
    results: dict[int, list[str]] = {}

    def call(index: int) -> None:
        results[index] = texts(llm.generate(prompts[index], SHORT))

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[index] for index in range(4)] == expected


def test_closing(path: str) -> None:
    llm = LLM(path, **SETTINGS)
    stream = llm.stream("The", LONG)
    next(stream)
    llm.close()
    llm.close()
    *_, last = stream
    assert last.finish_reason is FinishReason.ABORT
    with pytest.raises(EngineDead, match="closed"):
        llm.generate("a", SHORT)


def test_an_llm_that_is_dropped_takes_its_thread_along(path: str) -> None:
    llm = LLM(path, **SETTINGS)
    thread = llm.engine.client._thread
    llm.generate("a", SHORT)
    del llm
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_what_cannot_be_built_is_told(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown setting 'pages'"):
        LLM(path, pages=5)
    with pytest.raises(CheckpointError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="chat_template"):
        LLM(path, chat_template=str(tmp_path / "none.jinja"))
    with pytest.raises(ConfigError, match="--kv-memory 2GiB or --num-pages"):
        LLM(path, device="cpu", gpu_memory_utilization=0.9)


def test_own_chat_template(path: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}!{{ mood }}{% endfor %}")
    with LLM(path, chat_template=str(file), **SETTINGS) as llm:
        (output,) = llm.chat([{"role": "user", "content": "hi"}], SHORT, template_args={"mood": "?"})
        assert output.prompt == "hi!?"


@pytest.mark.parametrize("allocation", ["contiguous", "first-fit"])
@pytest.mark.parametrize("batching", ["static", "continuous"])
def test_the_baselines_say_the_same(llm: LLM, path: str, allocation: str, batching: str) -> None:
    prompts = ["The", "A cat", "x" * 60]
    params = SamplingParams(max_tokens=10, n=2, temperature=1.0, seed=4, ignore_eos=True)
    expected = [output.samples for output in llm.generate(prompts, params)]
    with LLM(path, allocation=allocation, batching=batching, **SETTINGS) as other:
        assert [output.samples for output in other.generate(prompts, params)] == expected


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_depths_say_the_same(llm: LLM, path: str, depth: int) -> None:
    prompts = [f"{i} and" for i in range(6)]
    params = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=4, stop=("th",), n=2)
    expected = [output.samples for output in llm.generate(prompts, params)]
    with LLM(path, depth=depth, **SETTINGS) as other:
        assert other.engine.resolved.depth == depth
        assert [output.samples for output in other.generate(prompts, params)] == expected


def test_the_drawn_seed_repeats_a_run(path: str) -> None:
    settings = {**SETTINGS, "seed": None}
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    with LLM(path, **settings) as llm:
        assert llm.engine.resolved.seed_drawn
        seed = llm.engine.resolved.seed
        expected = texts(llm.generate(["a", "a"], params))
    assert expected[0] != expected[1]
    with LLM(path, **{**settings, "seed": seed}) as llm:
        assert not llm.engine.resolved.seed_drawn
        assert texts(llm.generate(["a", "a"], params)) == expected


def test_async_generate_chat_stream_and_completed(path: str) -> None:
    async def main() -> None:
        async with await AsyncLLM.create(path, **SETTINGS) as llm:
            outputs = await llm.generate(["Hello", "The"], SHORT)
            deltas = [delta async for delta in llm.stream("Hello", SHORT)]
            assert "".join(delta.text for delta in deltas) == outputs[0].text
            done = {
                position: output.text async for position, output in llm.as_completed(["Hello", "The"], SHORT)
            }
            assert [done[0], done[1]] == texts(outputs)
            (chat,) = await llm.chat([{"role": "user", "content": "hi"}], SHORT)
            streamed = [
                d.text async for d in llm.stream(messages=[{"role": "user", "content": "hi"}], params=SHORT)
            ]
            assert "".join(streamed) == chat.text
            with pytest.raises(RequestError, match="empty"):
                await llm.generate(["a", ""], LONG)
            with pytest.raises(RequestError, match="empty"):
                await anext(llm.stream("", SHORT))
            good, bad = await llm.generate(["a", ""], SHORT, errors="return")
            assert (good.error, type(bad.error)) == (None, RequestError)
            wait_until_idle(llm)
        with pytest.raises(EngineDead):
            await llm.generate("a", SHORT)

    asyncio.run(main())


def test_async_cancellation_frees_the_pages(path: str) -> None:
    async def read(llm: AsyncLLM) -> None:
        async for _ in llm.stream("The", LONG):
            pass

    async def main() -> None:
        async with AsyncLLM(path, **SETTINGS) as llm:
            calls: list[asyncio.Task[Any]] = [
                asyncio.create_task(llm.generate(["a", "b"], LONG)),
                asyncio.create_task(read(llm)),
            ]
            early = asyncio.create_task(llm.generate("c", LONG))
            await asyncio.sleep(0)  # the call has begun to tokenize, on a worker thread
            early.cancel()
            while llm.engine.client.num_unfinished != 3 or llm.stats().requests_aborted != 1:
                await asyncio.sleep(0.001)
            for task in calls:
                task.cancel()
            for task in (*calls, early):
                with pytest.raises(asyncio.CancelledError):
                    await task
            await asyncio.sleep(0.1)
            wait_until_idle(llm)
            assert llm.stats().requests_aborted == 4
            stream = llm.stream("The", LONG)
            await anext(stream)
            await stream.aclose()
            wait_until_idle(llm)
            assert llm.stats().requests_aborted == 5
            assert (await llm.generate("a", SHORT))[0].error is None

    asyncio.run(main())


def test_the_package_is_light_and_says_its_names() -> None:
    code = (
        "import sys, pagedcli\n"
        "heavy = [m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'tokenizers')]\n"
        "assert not heavy, heavy\n"
        "pagedcli.SamplingParams; pagedcli.RequestError\n"
        "assert 'torch' not in sys.modules and 'tokenizers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert {name for name in pagedcli.__all__ if not hasattr(pagedcli, name)} == set()
    with pytest.raises(AttributeError, match="nothing"):
        _ = pagedcli.nothing


def test_an_interpreter_that_forgets_to_close_ends(path: str) -> None:
    code = (
        "from pagedcli import LLM, SamplingParams\n"
        f"llm = LLM({path!r}, device='cpu', threads=1, num_pages=50)\n"
        "stream = llm.stream('The', SamplingParams(max_tokens=400, ignore_eos=True))\n"
        "next(stream)\n"
        "print('bye')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "bye\n", "")
