"""`paged` over the scripted engine: in the test's process (`install`), or as a program of its own.

As a program: FAKE_STEP_SECONDS slows every step down, FAKE_FAIL_AT breaks the device at a step.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from pagedcli.cli import engine_access
from pagedcli.config import EngineConfig
from tests.fakes import FakeExecutor, fake_engine, letters


@dataclass
class FakeEngine:
    """What commands need of `api.build.Engine`."""

    client: Any
    resolved: Any
    generation_config: dict[str, Any] = field(default_factory=dict)
    phases: tuple[tuple[str, float], ...] = (("load weights", 0.5),)

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def make_engine(
    config: EngineConfig, *, step_seconds: float = 0.0, fail_at: int | None = None, next_token: Any = letters
) -> FakeEngine:
    page_size = config.cache.page_size
    num_pages = config.cache.num_pages or 64
    max_model_len = config.model.max_model_len or 256
    executor = FakeExecutor(
        next_token=next_token,
        num_blocks=num_pages,
        block_size=page_size,
        max_num_seqs=min(config.scheduler.max_num_seqs, 8),
        max_model_len=max_model_len,
        step_seconds=step_seconds,
        fail_at=fail_at,
        threaded=step_seconds > 0,
    )
    client = fake_engine(executor, policy=config.scheduler.policy, caching=config.cache.prefix_caching)
    resolved = SimpleNamespace(
        model="fake-model",
        dtype="float32",
        quantization=None,
        device="cpu",
        threads=1,
        page_size=page_size,
        num_pages=num_pages,
        max_model_len=max_model_len,
        max_num_seqs=executor.max_num_seqs,
        notes=(),
    )
    return FakeEngine(client, resolved, {"temperature": 0.5, "top_k": 7})


def fake_model_path(config: EngineConfig, messages: object) -> Path:
    """Any file: its content is the model's identity."""
    return Path(config.model.model or __file__)


def install(monkeypatch: Any, **options: Any) -> list[FakeEngine]:
    """Put the scripted engine into the commands; the engines that they made."""
    made: list[FakeEngine] = []

    def open_engine(config: EngineConfig, messages: object) -> FakeEngine:
        made.append(make_engine(config, **options))
        return made[-1]

    monkeypatch.setattr(engine_access, "open_engine", open_engine)
    monkeypatch.setattr(engine_access, "find_model", fake_model_path)
    return made


def run_as_program() -> None:
    from pagedcli.cli.main import main

    fail_at = os.environ.get("FAKE_FAIL_AT")
    step_seconds = float(os.environ.get("FAKE_STEP_SECONDS", "0"))
    engine_access.find_model = fake_model_path
    engine_access.open_engine = lambda config, messages: make_engine(
        config, step_seconds=step_seconds, fail_at=int(fail_at) if fail_at else None
    )
    main()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    run_as_program()
