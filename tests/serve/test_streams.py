"""The requests of one API request as a context: what is listed while they are unfinished."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from pagedcli.api.async_llm import AsyncLLM
from pagedcli.errors import RequestError
from pagedcli.serve.streams import Call, OpenCalls


def test_a_refused_duplicate_leaves_the_first_call_listed() -> None:
    """The second comes while the first, which has the id, still waits for the engine to take its prompt."""
    calls: OpenCalls = {}

    class Slow:
        async def submit(self, spec: object) -> Any:
            with pytest.raises(RequestError, match="choose another"), Call("same", calls) as second:
                await second.start(cast(AsyncLLM, self), [cast(Any, spec)])
            assert "same" in calls, "the first is listed still"
            raise RequestError("enough", code="enough")

    async def first() -> None:
        with pytest.raises(RequestError, match="enough"), Call("same", calls) as call:
            await call.start(cast(AsyncLLM, Slow()), [cast(Any, None)])

    asyncio.run(first())
    assert calls == {}
