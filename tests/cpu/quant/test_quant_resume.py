"""A run that dies goes on to the same bytes, wherever it died."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pagedcli.errors import ConfigError
from pagedcli.quant import work as work_module
from pagedcli.quant.options import LayerResult, QuantizeEvent, QuantizeOptions
from pagedcli.quant.pipeline import FORMAT
from tests.cpu.quant.quant_support import SMALL, MakeModel, folder_digest, run, some_samples

AWQ = QuantizeOptions("awq", group_size=32)


class Killed(BaseException):
    """Nothing in the package catches it."""


def same(one: list[LayerResult], other: list[LayerResult]) -> bool:
    for a, b in zip(one, other, strict=True):
        if a.records != b.records or list(a.dense) != list(b.dense) or len(a.tensors) != len(b.tensors):
            return False
        for x, y in zip(a.tensors, b.tensors, strict=True):
            if (x.name, x.bits, x.group_size, x.method) != (y.name, y.bits, y.group_size, y.method):
                return False
            pairs = ((x.codes, y.codes), (x.scales, y.scales), (x.zeros, y.zeros), (x.g_idx, y.g_idx))
            if not all((p is None and q is None) or np.array_equal(p, q) for p, q in pairs):
                return False
        if not all(np.array_equal(a.dense[name], b.dense[name]) for name in a.dense):
            return False
    return True


@pytest.mark.parametrize(
    "options",
    [AWQ, QuantizeOptions("gptq", group_size=32, desc_act=True), QuantizeOptions("rtn", group_size=32)],
)
def test_dying_between_any_two_events_changes_nothing(
    options: QuantizeOptions, tiny_checkpoint: MakeModel, tmp_path: Path
) -> None:
    model = tiny_checkpoint("qwen2", **SMALL)
    events: list[QuantizeEvent] = []
    whole = run(model, tmp_path / "whole", options, progress=events.append)
    work_events = [index for index, event in enumerate(events) if event.phase != "check"]
    assert len(work_events) == 10
    for stop in (0, *(work_events if options is AWQ else work_events[4::5])):
        seen = 0

        def dies(event: QuantizeEvent, stop: int = stop) -> None:
            nonlocal seen
            seen += 1
            if seen > stop:
                raise Killed

        work = tmp_path / f"work-{stop}"
        with pytest.raises(Killed):
            run(model, work, options, progress=dies)
        resumed = run(model, work, options)
        assert same(whole, resumed)
        assert folder_digest(work) == folder_digest(tmp_path / "whole")
        assert [result.resumed for result in resumed] == [stop >= work_events[4], stop >= work_events[9]]


def test_dying_at_any_write_changes_nothing(
    tiny_checkpoint: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_checkpoint("llama", **SMALL)
    whole = run(model, tmp_path / "whole", AWQ)
    real = work_module._write
    writes = 7  # the manifest, and three of each layer
    for stop in range(2 * writes):
        count = 0

        def write(path: Path, data: bytes, stop: int = stop) -> None:
            nonlocal count
            if count == stop // 2:
                if stop % 2:  # half a file is left behind
                    path.with_suffix(path.suffix + ".new").write_bytes(data[: len(data) // 2])
                raise Killed
            count += 1
            real(path, data)

        work = tmp_path / f"work-{stop}"
        monkeypatch.setattr(work_module, "_write", write)
        with pytest.raises(Killed):
            run(model, work, AWQ)
        monkeypatch.setattr(work_module, "_write", real)
        assert same(whole, run(model, work, AWQ))
        assert folder_digest(work) == folder_digest(tmp_path / "whole")


CHILD = """
import os, signal, sys
from pathlib import Path
from pagedcli.quant.options import QuantizeOptions
from tests.cpu.quant.quant_support import run
stop = int(sys.argv[3])
seen = 0
def progress(event):
    global seen
    seen += event.phase != "check"
    if seen == stop:
        os.kill(os.getpid(), signal.SIGKILL)
run(Path(sys.argv[1]), Path(sys.argv[2]), QuantizeOptions("awq", group_size=32), threads=2, progress=progress)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
def test_kill_9_and_again_kill_9(tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    model, work = tiny_checkpoint("llama", **SMALL), tmp_path / "work"
    whole = run(model, tmp_path / "whole", AWQ)
    for stop in (3, 8):  # in layer 0; then in layer 1, in the same folder
        died = subprocess.run(
            [sys.executable, "-c", CHILD, str(model), str(work), str(stop)], timeout=100, check=False
        )
        assert died.returncode == -9
    resumed = run(model, work, AWQ)
    assert same(whole, resumed)
    assert [result.resumed for result in resumed] == [True, False]


def test_a_finished_run_is_read_back(tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", **SMALL)
    first, again = (run(model, tmp_path / "work", AWQ) for _ in range(2))
    assert same(first, again)
    assert all(result.resumed for result in again)


def test_a_damaged_layer_is_made_again(tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    model, work = tiny_checkpoint("llama", **SMALL), tmp_path / "work"
    first = run(model, work, AWQ)
    file = work / "layer-0001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    again = run(model, work, AWQ)
    assert same(first, again)
    assert not again[1].resumed


@pytest.mark.parametrize(
    ("options", "samples", "said"),
    [
        (QuantizeOptions("awq", group_size=-1), None, "group_size was 32, is now -1"),
        (QuantizeOptions("gptq", group_size=32), None, "method was 'awq', is now 'gptq'"),
        (AWQ, some_samples(seed=1), "calibration text was another"),
    ],
)
def test_another_run_is_not_continued(
    options: QuantizeOptions,
    samples: list[list[int]] | None,
    said: str,
    tiny_checkpoint: MakeModel,
    tmp_path: Path,
) -> None:
    model = tiny_checkpoint("llama", **SMALL)
    run(model, tmp_path / "work", AWQ)
    with pytest.raises(ConfigError, match=said):
        run(model, tmp_path / "work", options, samples)


def test_a_run_of_an_older_version_is_not_continued(tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    model, work = tiny_checkpoint("llama", **SMALL), tmp_path / "work"
    run(model, work, AWQ)
    file = work / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": FORMAT - 1}))
    with pytest.raises(ConfigError, match=r"begun by another version of paged.*--overwrite"):
        run(model, work, AWQ)


def test_another_model_is_not_continued(tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    run(tiny_checkpoint("llama", **SMALL), tmp_path / "work", AWQ)
    with pytest.raises(ConfigError, match="model's weights were others"):
        run(tiny_checkpoint("llama", seed=1, **SMALL), tmp_path / "work", AWQ)


def test_two_runs_do_not_share_a_folder(tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    model, work = tiny_checkpoint("llama", **SMALL), tmp_path / "work"

    def second(event: QuantizeEvent) -> None:
        if event.phase == "layer":
            with pytest.raises(ConfigError, match="another process is quantizing there"):
                run(model, work, AWQ)

    run(model, work, AWQ, progress=second)
