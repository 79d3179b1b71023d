"""One scripted server for the tests that change nothing about it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.support import Served, served


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running
        running.assert_no_block_lost()
