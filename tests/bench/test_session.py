"""A model loaded once: runs of different settings give the same answers and know nothing of each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pagedcli.bench.run import Interrupted, RequestRun
from pagedcli.bench.session import Session
from pagedcli.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagedcli.errors import ConfigError
from pagedcli.workloads.requests import mixed_lengths
from tests.conftest import MakeModel


@pytest.fixture(scope="module", params=["native", "torch"])
def session(request: pytest.FixtureRequest, tiny_checkpoint: MakeModel) -> Session:
    return Session(
        EngineConfig(
            model=ModelConfig(model=str(tiny_checkpoint("llama")), max_model_len=128),
            cache=CacheConfig(num_pages=64, page_size=8),
            scheduler=SchedulerConfig(max_num_seqs=4),
            device=DeviceConfig(device="cpu", threads=1, backend=request.param),
        )
    )


def _workload(session: Session) -> Any:
    return mixed_lengths(
        6, seed=1, vocab_size=session.spec.vocab_size, prompt_tokens=(10, 40), output_tokens=(2, 20)
    )


def test_settings_change_no_answer_and_no_run_finds_what_another_left(session: Session) -> None:
    workload, config = _workload(session), session.config
    first = session.run(config, workload)
    others = [
        config,  # on the same worker, whose slots and pages are full of the first run
        dataclasses.replace(config, cache=CacheConfig(num_pages=24, page_size=5)),
        dataclasses.replace(config, scheduler=SchedulerConfig(max_num_seqs=2, depth=2)),
        dataclasses.replace(config, device=dataclasses.replace(config.device, threads=2)),
        config,
    ]
    assert len(first.served) == 6
    for other in others:
        run = session.run(other, workload)
        assert run.outputs == first.outputs
        assert run.counters.prefix_hit_tokens == 0
    assert session.run(others[3], workload).peak_running == 4
    assert session.resolve(others[3]).threads == 2


def test_kernels_are_timed_where_they_count_themselves(session: Session) -> None:
    run = session.run(session.config, _workload(session))
    if session.choice.backend == "native":
        assert run.times.kernels is not None
        assert 0 < run.times.kernels <= run.times.executor
    else:
        assert run.times.kernels is None
    assert 0 < run.times.block_tables < run.seconds


def test_an_interrupted_warm_up_was_no_measurement(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = _workload(session)
    config = dataclasses.replace(session.config, cache=CacheConfig(num_pages=32, page_size=16))

    def interrupted(*about: Any) -> Any:
        raise Interrupted(RequestRun("a", 0.0, 1))  # type: ignore[arg-type]

    monkeypatch.setattr(session, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        session.run(config, workload)
    assert not isinstance(caught.value, Interrupted)


def test_another_model_needs_a_session_of_its_own(session: Session) -> None:
    other = dataclasses.replace(session.config, model=ModelConfig(model="other"))
    with pytest.raises(ConfigError, match="session of their own"):
        session.run(other, _workload(session))
