"""The benchmark of batching and allocation on a tiny model: what it compares, counts, writes and refuses."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pagedcli.bench import batching
from pagedcli.bench.batching import MODES, Bench, ModeResult, compare
from pagedcli.bench.limits import MachineLimits
from pagedcli.bench.offline import OfflineRun, StepSample
from pagedcli.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagedcli.errors import PagedError
from pagedcli.workloads.requests import WorkloadRequest, mixed_lengths
from tests.conftest import MakeModel

LIMITS = MachineLimits(1e9, 1e9, "float32", 1)


@pytest.fixture(scope="module")
def bench(tiny_checkpoint: MakeModel) -> Bench:
    """Pages for two sequences of the longest length, 256 tokens."""
    return Bench(
        EngineConfig(
            model=ModelConfig(model=str(tiny_checkpoint("llama")), max_model_len=256),
            cache=CacheConfig(page_size=8, num_pages=64, prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=16),
            device=DeviceConfig(device="cpu", threads=1),
        )
    )


@pytest.fixture(scope="module")
def workload(bench: Bench) -> list[WorkloadRequest]:
    sizes: dict[str, Any] = {"prompt_tokens": (20, 60), "output_tokens": (4, 40)}
    return mixed_lengths(16, seed=1, vocab_size=bench.spec.vocab_size, **sizes)


@pytest.fixture(scope="module")
def results(bench: Bench, workload: list[WorkloadRequest]) -> dict[str, ModeResult]:
    return {result.mode: result for result in compare(bench, workload, LIMITS, repeats=1)}


def test_every_mode_gives_every_output_and_the_same_ids(
    bench: Bench, workload: list[WorkloadRequest], results: dict[str, ModeResult]
) -> None:
    assert len(results) == len(MODES) == 6
    assert all(result.outputs_equal for result in results.values())
    run = bench.run(MODES[-1], workload)
    assert {key: len(ids) for key, ids in run.outputs.items()} == {
        item.id: item.output_tokens for item in workload
    }
    assert len(set(run.outputs.values())) == len(workload)


def test_paging_keeps_its_pages_full_and_runs_more_at_once(results: dict[str, ModeResult]) -> None:
    for kind in ("static", "continuous"):
        contiguous, first_fit, paged = (
            results[f"{name}, {kind}"] for name in ("contiguous", "first-fit", "paged")
        )
        assert contiguous.peak_running == 2
        assert contiguous.peak_running < first_fit.peak_running < paged.peak_running
        assert contiguous.kv_use < 0.4
        assert contiguous.kv_use < first_fit.kv_use < paged.kv_use
        assert contiguous.num_steps > paged.num_steps
    assert results["paged, continuous"].kv_use > 0.9
    assert results["paged, continuous"].num_steps < results["paged, static"].num_steps


def test_gauges_are_means_over_the_half_of_the_steps_that_store_most() -> None:
    samples = [(1, 10, 100, 20, 5), (2, 30, 40, 8, 8), (1, 20, 40, 0, 0), (1, 5, 500, 1, 1)]
    run = OfflineRun(2.0, {}, tuple(StepSample(*values) for values in samples), (0.5,), 60, 20, 4, 80, 0)
    assert run.kv_use() == (30 / 40 + 20 / 40) / 2
    assert run.external_fragmentation() == 0.0
    assert run.peak_running == 2
    assert (run.output_tokens_per_s, run.total_tokens_per_s) == (10.0, 40.0)


def run_main(model: Path, file: Path) -> None:
    batching.main(
        model=str(model), dtype="float32", device="cpu", requests=5, prompt_tokens=(8, 20), output_tokens=(2, 9),
        page_size=4, num_pages=64, max_model_len=64, repeats=1, seed=0, threads=1, json_file=file,
    )  # fmt: skip


def test_the_command_writes_its_figures(
    tiny_checkpoint: MakeModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(batching, "measure_limits", lambda dtype: LIMITS)
    run_main(tiny_checkpoint("llama"), tmp_path / "figures.json")
    shown = capsys.readouterr().out
    written = json.loads((tmp_path / "figures.json").read_text())
    assert [mode["mode"] for mode in written["modes"]] == [mode.name for mode in MODES]
    assert re.search(r"same ids( +yes){6}", shown)
    assert written["workload"]["requests"] == 5
    assert (written["settings"]["dtype"], written["settings"]["threads"]) == ("float32", 1)
    assert written["limits"]["read_bytes_per_s"] == 1e9


def test_every_figure_can_be_read_in_80_columns() -> None:
    figures = (1234.5, 678.9, 2468.1, 34.5, 64, 0.987, 0.12, 9876, 31, 0.45, False)
    file = io.StringIO()
    Console(file=file, width=80).print(batching.table([ModeResult(mode.name, *figures) for mode in MODES]))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines]
    assert ["contiguous", "contiguous", "first-fit", "first-fit", "paged", "paged"] in rows
    assert ["static", "continuous"] * 3 in rows
    shown = ("1234.5", "678.9", "2468.1", "34.5", "64", "98.7%", "12%", "9876", "31", "45%", "NO")
    for figure in shown:
        assert [row[-6:] for row in rows].count([figure] * 6) == 1


def test_a_mode_with_other_ids_is_an_error(
    tiny_checkpoint: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "measure_limits", lambda dtype: LIMITS)
    true_run = Bench.run

    def wrong_in_one_mode(self: Bench, mode: batching.Mode, workload: list[WorkloadRequest]) -> OfflineRun:
        run = true_run(self, mode, workload)
        if mode is not MODES[3]:
            return run
        name, ids = next(iter(run.outputs.items()))
        return dataclasses.replace(run, outputs={**run.outputs, name: (*ids[:-1], ids[-1] + 1)})

    monkeypatch.setattr(Bench, "run", wrong_in_one_mode)
    with pytest.raises(PagedError, match="different token ids"):
        run_main(tiny_checkpoint("llama"), tmp_path / "figures.json")
