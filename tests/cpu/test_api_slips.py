"""What callers get wrong in Python: each slip is one `PagedError`, and forms that mean something are taken."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedcli.api.async_llm import AsyncLLM
from pagedcli.api.llm import LLM
from pagedcli.api.settings import config_from_settings
from pagedcli.config import EngineConfig
from pagedcli.core.sampling import SamplingParams
from pagedcli.errors import ConfigError, EngineDead, RequestError
from tests.conftest import MakeModel

SHORT = SamplingParams(max_tokens=2, ignore_eos=True)
SETTINGS: dict[str, Any] = {"device": "cpu", "threads": 1, "num_pages": 64, "max_num_seqs": 4, "seed": 1}
CHAT = [{"role": "user", "content": "hi"}]
FORK_SECONDS = 30


@pytest.fixture(scope="module")
def path(tiny_checkpoint: MakeModel) -> Path:
    return tiny_checkpoint("llama")


@pytest.fixture(scope="module")
def llm(path: Path) -> Any:
    with LLM(path, **SETTINGS) as llm:
        yield llm


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None,), "prompts is of type NoneType: give text, token ids, or a list"),
        ((5,), "prompts is of type int"),
        ((b"abc",), "prompts is of type bytes"),
        (({"a": 1},), "prompts is of type dict"),
        (([True],), "neither text nor a list of token ids"),
        (([b"abc"],), "neither text nor a list of token ids"),
        (([5, "a"],), "neither text nor a list of token ids"),
        (("a", {"max_tokens": 1}), "params is of type dict: give SamplingParams"),
        (("a", 5), "params is of type int: give SamplingParams"),
        ((["a"], [{"n": 1}]), "params is of type dict: give SamplingParams"),
        ((["a", "b"], [SHORT]), "1 sampling parameters for 2 prompts"),
    ],
)
def test_wrong_types_are_named(llm: LLM, arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(*arguments)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda llm: llm.generate("a", SHORT, errors="ignore"),
            'errors is \'ignore\': give "raise" or "return"',
        ),
        (lambda llm: llm.chat(None), "messages is of type NoneType"),
        (lambda llm: llm.chat("hi"), "messages is of type str"),
        (lambda llm: llm.chat({"role": "user"}), "messages is of type dict"),
        (lambda llm: llm.chat(CHAT, template_args={"messages": 1}), "messages is set by the request itself"),
        (lambda llm: llm.chat(CHAT, template_args=5), "template_args must be a mapping"),
        (lambda llm: llm.chat(CHAT, template_args={5: 1}), "template_args must be a mapping"),
        (lambda llm: llm.stream("a", {"max_tokens": 1}), "params is of type dict"),
    ],
)
def test_wrong_calls_are_named(llm: LLM, call: Callable[[LLM], Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        call(llm)


def test_every_iterable_of_prompts_is_taken(llm: LLM) -> None:
    expected = llm.generate([[5, 6]], SHORT)[0].samples
    for prompts in ((5, 6), range(5, 7), np.array([5, 6]), [np.int64(5), np.int64(6)], np.array([[5, 6]])):
        (output,) = llm.generate(prompts, SHORT)  # type: ignore[arg-type]
        assert output.samples == expected
    texts = [
        output.prompt for output in llm.generate((text for text in ("a", "b")), (p for p in [SHORT] * 2))
    ]  # type: ignore[arg-type]
    assert texts == ["a", "b"]


def test_the_asynchronous_calls_refuse_the_same(path: Path) -> None:
    async def main() -> None:
        async with await AsyncLLM.create(path, **SETTINGS) as llm:
            for call in (
                llm.generate(None),  # type: ignore[arg-type]
                llm.generate("a", {"n": 1}),  # type: ignore[arg-type]
                llm.generate("a", errors="ignore"),  # type: ignore[arg-type]
                llm.chat(CHAT, template_args={"template": 1}),
            ):
                with pytest.raises(RequestError):
                    await call

    asyncio.run(main())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_pages": "x"}, "num_pages is 'x': give a whole number"),
        ({"num_pages": True}, "num_pages is True: give a whole number"),
        ({"kv_memory_bytes": "lots"}, "kv_memory_bytes is 'lots': give a size"),
        ({"model": 5}, "model is 5: give text"),
        ({"dtype": "float23"}, "dtype is 'float23': choose one of"),
        ({"prefix_caching": "no"}, "prefix_caching is 'no': give true or false"),
        ({"max_num_seqs": None}, "max_num_seqs is None: give a whole number"),
        ({"seed": "x"}, "seed is 'x': give a whole number"),
    ],
)
def test_settings_of_a_wrong_type_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from_settings(EngineConfig(), settings)


def test_settings_take_paths_sizes_and_none(tmp_path: Path) -> None:
    settings = {"model": tmp_path, "kv_memory_bytes": "2MiB", "num_pages": None, "seed": None}
    config = config_from_settings(EngineConfig(), settings)
    assert config.model.model == str(tmp_path)
    assert config.cache.kv_memory_bytes == 2 << 20


@pytest.mark.parametrize("config", [5, {"model": {}}])
def test_a_config_of_another_type_is_named(config: Any) -> None:
    with pytest.raises(ConfigError, match="give an EngineConfig, or settings by name"):
        LLM(config=config)


def in_child(function: Callable[[], int]) -> int:
    """Exit status of `function` in a forked process; that of SIGALRM if it hangs."""
    pid = os.fork()
    if not pid:
        status = 99
        try:
            signal.alarm(FORK_SECONDS)
            status = function()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_is_told_instead_of_waiting_for_ever(llm: LLM) -> None:
    client = llm.engine.client

    def use() -> int:
        calls: tuple[Callable[[], Any], ...] = (
            lambda: llm.generate("a", SHORT),
            client.snapshot,
            client.drain,
        )
        for call in calls:
            try:
                call()
            except EngineDead as error:
                if "forked" not in str(error):
                    return 1
            else:
                return 2
        client.abort("x")
        llm.engine.close()
        return 0

    with client._condition:  # as if another thread were in the middle of something
        assert in_child(use) == 0
    started = time.monotonic()
    assert llm.generate("a", SHORT)
    assert time.monotonic() - started < FORK_SECONDS


def test_a_loop_that_was_closed_early_ends_its_requests_without_a_word(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    llm = AsyncLLM(path, **SETTINGS)
    stream = llm.stream("abc", long)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(stream))
    loop.close()
    assert llm.engine.client.drain(timeout_s=30)
    assert llm.stats().requests_aborted == 1
    assert not caplog.records
    asyncio.run(stream.aclose())
    asyncio.run(llm.close())
