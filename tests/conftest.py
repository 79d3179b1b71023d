"""Fixtures shared by all tests. Nothing heavy at module level: tests/core runs without numpy and torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MakeModel = Callable[..., Path]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-seconds", default="10", help="how long tests/serve/test_soak.py runs")


def _maker(factory: pytest.TempPathFactory, write: Callable[..., Path], suffix: str) -> MakeModel:
    """Writes each distinct model once per session; what it returns must not be modified."""
    made: dict[str, Path] = {}
    root = factory.mktemp("models")

    def make(family: str, **overrides: Any) -> Path:
        key = repr((family, sorted(overrides.items())))
        if key not in made:
            made[key] = write(root / f"{family}-{len(made)}{suffix}", family, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """`tiny_checkpoint(family, *, dtype="float32", seed=0, shards=1, **config)`: a folder to read only."""
    from tests.fixtures_checkpoints import write_tiny_checkpoint

    return _maker(tmp_path_factory, write_tiny_checkpoint, "")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """`tiny_gguf(family, *, tensor_type="F32", ..., **config)`: a GGUF file to read only."""
    from tests.fixtures_checkpoints import write_tiny_gguf

    return _maker(tmp_path_factory, write_tiny_gguf, ".gguf")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model, SmolLM2-135M-Instruct as a GGUF file; skips where it cannot be had."""
    from pagedcli.checkpoint.sources import resolve_model
    from pagedcli.errors import PagedError

    try:
        return resolve_model(None)
    except PagedError as error:
        pytest.skip(f"SmolLM2-135M-Instruct: {error}")
