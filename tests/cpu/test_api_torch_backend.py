"""The torch backend on CUDA, what needs a GPU replaced: graphs or not, the size of the pool, memory that ends."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedcli.api import torch_backend
from pagedcli.api.build import resolve
from pagedcli.api.resolve import RunChoice, choose_run
from pagedcli.api.settings import config_from_settings
from pagedcli.api.torch_backend import TorchBackend, load_torch
from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.cli.doctor_run import graph_row
from pagedcli.config import EngineConfig
from pagedcli.errors import ConfigError
from pagedcli.models.load import load_model
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.torch_ops import TorchOps
from pagedcli.runtime.gpu_memory import GpuUse
from pagedcli.runtime.graph_trial import why_not_recorded
from pagedcli.runtime.graphs import Captures
from pagedcli.runtime.memory import block_bytes
from tests.graph_support import DoneAgain

GIB = 2**30


class Recordable(TorchOps):
    """Ops of which a graph could be made; without attention, which the host lays out."""

    def why_eager(self) -> str | None:
        return None

    def attention(self, q: torch.Tensor, *_: object) -> torch.Tensor:
        return q


def config(**settings: Any) -> EngineConfig:
    return config_from_settings(EngineConfig(), {"backend": "torch", **settings})


def run_choice(spec: ModelSpec, **settings: Any) -> RunChoice:
    """On a CPU, unless it is changed; the settings are those of CUDA."""
    return choose_run(config(**settings), spec, has_cuda=True, cores=1)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("llama")


def load(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    ops: TorchOps,
    wrong: str | None = None,
    **settings: Any,
) -> TorchBackend:
    """As on a GPU, but for the ops; `wrong`: what a trial of the graphs finds."""
    monkeypatch.setattr(torch_backend, "why_not_recorded", lambda make, captures: wrong)
    monkeypatch.setattr(torch_backend, "make_ops", lambda *args, **kwargs: ops)
    monkeypatch.setattr(torch_backend, "CudaCaptures", lambda device: DoneAgain())
    opened = open_checkpoint(checkpoint)
    run = run_choice(ModelSpec.from_config(opened.config), device="cuda", max_model_len=64, **settings)
    return load_torch(opened, run)


def test_ops_that_the_host_lays_out_run_op_by_op_and_that_is_said(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = TorchOps("cpu", "float32")
    backend = load(checkpoint, monkeypatch, ops)
    assert backend.captures is None
    [note] = backend.notes
    assert note.startswith("decode steps are issued op by op, not as CUDA graphs: torch's attention")
    assert graph_row(ops).startswith("op by op: torch's attention")
    with pytest.raises(ConfigError, match="leave out --cuda-graphs"):
        load(checkpoint, monkeypatch, ops, cuda_graphs=True)


def test_graphs_are_made_where_they_can_be_unless_nobody_wants_them(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = Recordable("cpu", "float32")
    assert load(checkpoint, monkeypatch, ops).captures is not None
    assert load(checkpoint, monkeypatch, ops, cuda_graphs=True).captures is not None
    unwanted = load(checkpoint, monkeypatch, ops, cuda_graphs=False)
    assert (unwanted.captures, unwanted.notes) == (None, ())
    assert graph_row(ops).startswith("CUDA graphs;")


def test_weights_that_do_not_fit_are_told_with_what_was_loaded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(TorchOps):
        def load_linear(self, *args: Any) -> Any:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(
        torch_backend,
        "out_of_memory",
        lambda device, when, remedy, _: ConfigError(f"{device} {when} {remedy}"),
    )
    with pytest.raises(ConfigError, match=r"cuda after .* of weights take a smaller or a quantized model"):
        load(checkpoint, monkeypatch, Full("cpu", "float32"))


def test_graphs_that_are_not_right_here_are_not_used_and_that_is_said(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = load(checkpoint, monkeypatch, Recordable("cpu", "float32"), wrong="recording failed (why)")
    assert backend.captures is None
    assert backend.notes[-1].endswith("not as CUDA graphs: recording failed (why)")


class Fails:
    """Implements `Captures`."""

    def capture(self, computes: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        raise RuntimeError("CUDA error: operation not permitted\nCompile with ...")


class Frozen(DoneAgain):
    """Does nothing any more."""

    def capture(self, computes: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        return [lambda: None for _ in super().capture(computes)]


def test_recorded_steps_are_tried_once_against_steps_op_by_op(checkpoint: Path) -> None:
    make = on_cpu(checkpoint, DoneAgain()).trial_worker
    assert why_not_recorded(make, DoneAgain()) is None
    assert why_not_recorded(make, Fails()) == "recording failed (CUDA error: operation not permitted)"
    assert str(why_not_recorded(make, Frozen())).startswith("recorded steps chose the tokens [")
    with pytest.raises(torch.OutOfMemoryError):
        why_not_recorded(make, Full())


class Full:
    """Implements `Captures`."""

    def capture(self, computes: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")


def on_cpu(checkpoint: Path, captures: Captures) -> TorchBackend:
    opened = open_checkpoint(checkpoint)
    run = run_choice(ModelSpec.from_config(opened.config), device="cpu", max_model_len=64, threads=1)
    model = load_model(opened, Recordable("cpu", run.dtype), 64)
    return TorchBackend(model, run, 0, (), captures)


SIZES = {"num_blocks": 8, "block_size": 16, "max_num_seqs": 3, "max_model_len": 64}


def test_what_recording_took_is_said(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = on_cpu(checkpoint, DoneAgain())
    free = iter([5 * GIB, 4 * GIB])
    monkeypatch.setattr(TorchBackend, "_free_bytes", lambda self: next(free))
    [note] = backend.worker(**SIZES).info.notes
    assert note.startswith("decode steps of up to 3 sequences are 3 CUDA graphs (0.")
    assert note.endswith(" s, 1 GiB); other steps are issued op by op")


def test_memory_that_ends_while_steps_are_recorded_is_told_with_the_flags(checkpoint: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"recorded as CUDA graphs.*--gpu-memory-utilization.*--enforce-eager"
    ):
        on_cpu(checkpoint, Full()).worker(**SIZES)


def test_memory_that_ends_beside_the_pool_is_told_with_the_flags(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*sizes: Any, **settings: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 262.00 MiB. GPU 0 has ...")

    backend = on_cpu(checkpoint, DoneAgain())
    monkeypatch.setattr("pagedcli.runtime.batch_state._store", no_room)
    with pytest.raises(
        ConfigError, match=r"beside the KV pool \(asking for 262.00 MiB\): lower --gpu-mem.*-seqs$"
    ):
        backend.worker(**SIZES)


def test_the_pool_gets_what_the_measured_parts_leave(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use = GpuUse("cuda", 16 * GIB, GIB, 4 * GIB, 0, GIB, GIB // 2)
    monkeypatch.setattr(torch_backend, "measure", lambda *args, **kwargs: use)
    backend = on_cpu(checkpoint, DoneAgain())
    backend = dataclasses.replace(backend, run=dataclasses.replace(backend.run, device="cuda"))
    page = block_bytes(backend.spec, 16, backend.run.dtype)  # of rows that only fill up a graph
    with caplog.at_level(logging.INFO, "pagedcli"):
        assert backend.kv_budget(config(gpu_memory_utilization=0.5)) == 8 * GIB - use.fixed - page
    assert "0.5 of 16 GiB less weights 4 GiB" in caplog.text
    assert "leave 1.5 GiB for KV" in caplog.text


def test_a_pool_of_a_given_size_is_held_against_the_measured_parts_too(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is made: what is free once the weights are loaded is not free for the pool alone."""
    use = GpuUse("cuda", 16 * GIB, GIB, 4 * GIB, 0, GIB, GIB // 2)
    monkeypatch.setattr(torch_backend, "measure", lambda *args, **kwargs: use)
    backend = on_cpu(checkpoint, DoneAgain())
    backend = dataclasses.replace(backend, captures=None, run=dataclasses.replace(backend.run, device="cuda"))
    wanted = config(num_pages=100)
    assert backend.room_for_kv(wanted) == 16 * GIB - use.fixed
    opened = open_checkpoint(checkpoint)
    assert resolve(wanted, opened, backend.run, backend).num_pages == 100
    with pytest.raises(ConfigError, match=r"9.5 GiB is free: use --num-pages \d+$"):
        resolve(config(num_pages=10**7), opened, backend.run, backend)
