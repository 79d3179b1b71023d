"""The output folder of `paged quantize`: names, what may lie in the way, room; requests that make no sense."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from pagedcli.errors import ConfigError, MissingDependencyError
from pagedcli.quant.backends.environment import BACKENDS, check_python
from pagedcli.quant.options import PlannedLinear, QuantizeOptions, QuantizePlan
from pagedcli.quant.output_folder import (
    WORK_FOLDER,
    check_room,
    default_output,
    finish_output,
    prepare_output,
)
from pagedcli.quant.quality import Contract
from pagedcli.quant.request import QuantizeRequest
from pagedcli.quant.work import locked


def _request(method: Any = "awq", **changes: Any) -> QuantizeRequest:
    options = QuantizeOptions(method, **changes.pop("options", {}))
    return QuantizeRequest(options, **changes)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (None, "SmolLM2-135M-Instruct"),
        ("Qwen/Qwen2.5-0.5B", "Qwen2.5-0.5B"),
        ("owner/repo-GGUF:file.gguf", "repo-GGUF"),
        ("models/Some.Model.gguf", "Some.Model"),
        ("a/b/", "b"),
    ],
)
def test_the_default_name_tells_model_and_method(model: str | None, name: str) -> None:
    request = _request("gptq", options={"bits": 8}, model=model)
    assert default_output(request, 128) == Path(f"{name}-gptq-8bit-g128")


def test_a_finished_folder_is_refused_and_replaced_on_demand(tmp_path: Path) -> None:
    out, source = tmp_path / "out", tmp_path / "model"
    work = prepare_output(out, source, overwrite=False)
    (work / "layer").write_text("x")
    # Unfinished: it goes on.
    assert prepare_output(out, source, overwrite=False) == work
    assert (work / "layer").exists()
    (out / "quality.json").write_text("{}")
    finish_output(out)
    with pytest.raises(ConfigError, match="is finished already: give --overwrite"):
        prepare_output(out, source, overwrite=False)
    prepare_output(out, source, overwrite=True)
    assert [path.name for path in out.iterdir()] == [WORK_FOLDER]
    assert not any(work.iterdir())


def test_a_folder_that_is_not_ours_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"holds other files|was not written by paged quantize"):
            prepare_output(tmp_path / "out", tmp_path / "model", overwrite=overwrite)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def test_the_model_itself_is_no_output(tmp_path: Path) -> None:
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="is the model itself"):
            prepare_output(tmp_path, tmp_path, overwrite=overwrite)


def test_a_finished_folder_that_holds_the_model_is_not_removed(tmp_path: Path) -> None:
    source = tmp_path / "out" / "model"
    source.mkdir(parents=True)
    (tmp_path / "out" / "quality.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds the model .*, which --overwrite would remove"):
        prepare_output(tmp_path / "out", source, overwrite=True)
    assert source.is_dir()


def test_a_folder_that_a_run_works_in_is_not_removed(tmp_path: Path) -> None:
    work = prepare_output(tmp_path / "out", tmp_path / "model", overwrite=False)
    with locked(work), pytest.raises(ConfigError, match="another process is quantizing there"):
        prepare_output(tmp_path / "out", tmp_path / "model", overwrite=True)
    assert work.is_dir()
    prepare_output(tmp_path / "out", tmp_path / "model", overwrite=True)


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="give another -o"):
        prepare_output(tmp_path / "out", tmp_path / "model", overwrite=False)


def _plan(peak: int, work: int) -> QuantizePlan:
    linear = PlannedLinear(0, ("a",), (8,), 8, 8, None)
    return QuantizePlan(QuantizeOptions("rtn"), 8, (linear,), 1, peak, work, ())


def test_room_is_checked_before_anything_starts(tmp_path: Path) -> None:
    said = check_room(_plan(1 << 20, 1 << 20), tmp_path / "new", 1 << 20)
    assert said == "takes about 1 MiB of memory and up to 3 MiB of disk, 1 MiB in the end"
    said = check_room(_plan(1 << 20, 1 << 20), tmp_path / "new", 1 << 20, may_repeat=True)
    assert said.endswith(", 1 MiB more for each round that the demand takes")
    with pytest.raises(ConfigError, match=r"takes about 1.049e\+06 GiB of memory, .* is free"):
        check_room(_plan(1 << 50, 0), tmp_path / "new", 0)
    with pytest.raises(ConfigError, match=r"takes about 1.049e\+06 GiB .*: use a smaller model"):
        check_room(_plan(0, 0), tmp_path / "new", 0, running=1 << 50)
    with pytest.raises(ConfigError, match=r"takes up to .* of disk .* is free"):
        check_room(_plan(0, 1 << 60), tmp_path / "new", 0)


def test_what_an_earlier_run_left_takes_no_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was killed when the disk was nearly full goes on."""
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(ConfigError, match="of disk"):
        check_room(_plan(0, 3000), tmp_path / "out", 2000)
    work = prepare_output(tmp_path / "out", tmp_path / "model", overwrite=False) / "round-0"
    work.mkdir()
    (work / "layer-0000.safetensors").write_bytes(b"x" * 6000)
    assert "of disk" in check_room(_plan(0, 3000), tmp_path / "out", 2000)


@pytest.mark.parametrize(
    ("method", "changes", "what"),
    [
        ("awq", {"format": "gptq"}, "does not go with --awq: use autoawq, compressed-tensors"),
        ("gptq", {"format": "gguf"}, "choose one of autoawq, gptq, gptq_v2, compressed-tensors"),
        ("gptq", {"options": {"sym": False}, "format": "gptq"}, "use --format gptq_v2, or --sym"),
        ("rtn", {"options": {"bits": 8}, "format": "autoawq"}, "holds 4 bits, not 8"),
        ("gptq", {"options": {"desc_act": True}, "format": "compressed-tensors"}, "needs g_idx"),
        ("gptq", {"backend": "autoawq"}, "--backend autoawq is for --awq"),
        ("rtn", {"backend": "auto-gptq"}, "--backend auto-gptq is for --gptq"),
        (
            "awq",
            {"backend": "autoawq", "options": {"sym": True}},
            "makes asymmetric codes only: leave --sym out",
        ),
        ("gptq", {"backend": "auto-gptq", "options": {"sym": False}}, "makes symmetric codes only"),
        ("gptq", {"backend": "auto-gptq", "format": "compressed-tensors"}, "writes no compressed-tensors"),
        ("awq", {"backend": "other"}, "choose one of native, autoawq, auto-gptq"),
        ("awq", {"samples": 0}, "--samples is 0: choose 1 to"),
        ("awq", {"seq_len": 3}, "--seq-len is 3: choose 16 to"),
        ("awq", {"contract": Contract(max_kl=-1.0)}, "--max-kl is -1: it must not be negative"),
        ("awq", {"contract": Contract(max_kl=float("nan"))}, "--max-kl is nan"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(method: str, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        _request(method, **changes)


@pytest.mark.parametrize(
    ("method", "sym", "name"),
    [
        ("awq", None, "autoawq"),
        ("gptq", None, "gptq"),
        ("rtn", None, "gptq"),
        ("gptq", False, "gptq_v2"),
        ("rtn", False, "gptq_v2"),
    ],
)
def test_default_formats(method: str, sym: bool | None, name: str) -> None:
    assert _request(method, options={"sym": sym}).target_format == name


def test_auto_gptq_says_in_a_line_which_python_it_has_wheels_for() -> None:
    check_python(BACKENDS["auto-gptq"], (3, 11))
    check_python(BACKENDS["autoawq"], (3, 13))
    with pytest.raises(MissingDependencyError, match=r"wheels for Python up to 3.11, this is 3.12") as caught:
        check_python(BACKENDS["auto-gptq"], (3, 12))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_every_requirement_of_a_backend_is_pinned(name: str) -> None:
    lines = BACKENDS[name].requirements.read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert len(pins) > 5
    assert all(line.count("==") == 1 for line in pins)
