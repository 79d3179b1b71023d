"""Servers for the tests that change nothing about them: over the scripted engine, and over a loaded tiny model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagedcli.api.build import Engine, build_engine
from pagedcli.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from tests.conftest import MakeModel
from tests.serve.support import Served, served


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running
        running.assert_no_block_lost()


@pytest.fixture(scope="module")
def tiny_engine(tiny_checkpoint: MakeModel) -> Engine:
    """A model of random weights on the CPU; whoever serves it closes it."""
    config = EngineConfig(
        ModelConfig(str(tiny_checkpoint("llama")), dtype="float32"),
        CacheConfig(num_pages=200),
        device=DeviceConfig("cpu", threads=1),
        seed=0,
    )
    return build_engine(config)
