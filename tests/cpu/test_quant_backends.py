"""Other packages as backends: what is listened to, what is cleaned up, what is asked of their environments.

The packages themselves run in `make interop` only; here a script of our own stands for them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.config_file import show_bytes
from pagedcli.errors import MissingDependencyError
from pagedcli.quant.backends import environment
from pagedcli.quant.backends.clean import clean_output
from pagedcli.quant.backends.environment import BACKENDS, python_of
from pagedcli.quant.backends.process import BackendError, run_backend
from pagedcli.quant.dense_folder import write_dense
from tests.conftest import MakeModel


class Watcher:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.steps: list[tuple[float, float]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.said.append(name)
        yield

    def progress(self, done: float, total: float, what: str = "") -> None:
        self.steps.append((done, total))

    def quantizing(self, event: object) -> None:
        raise AssertionError("the packages send no such events")

    def fetched(self, name: str, done: int, total: int) -> None:
        raise AssertionError("nothing is fetched here")


def _run(tmp_path: Path, script: str, watcher: Watcher) -> str:
    file = tmp_path / "script.py"
    file.write_text(script)
    backend = dataclasses.replace(BACKENDS["autoawq"], script=str(file))
    return run_backend(backend, Path(sys.executable), {"threads": 1, "value": 7}, tmp_path, watcher)


def test_progress_and_version_are_heard_among_the_packages_talk(tmp_path: Path) -> None:
    watcher = Watcher()
    script = (
        "import json, sys, os\n"
        "task = json.load(open(sys.argv[1]))\n"
        "print('loading {model}')\n"
        "print('{not json')\n"
        "print(json.dumps({'version': f\"awq {task['value']} {os.environ['OMP_NUM_THREADS']}\"}))\n"
        "print(json.dumps({'done': 1, 'total': 2}))\n"
        "assert 'PYTHONPATH' not in os.environ\n"
    )
    assert _run(tmp_path, script, watcher) == "awq 7 1"
    assert watcher.steps == [(1, 2)]


def test_a_failing_package_gives_its_last_line_and_where_the_rest_is(tmp_path: Path) -> None:
    with pytest.raises(BackendError) as caught:
        _run(tmp_path, "raise ImportError('cannot import PytorchGELUTanh')", Watcher())
    message = str(caught.value)
    assert "AutoAWQ 0.2.9 failed: ImportError: cannot import PytorchGELUTanh" in message
    assert "\n" not in message
    assert str(tmp_path / "autoawq.log") in message


def _gptq_output(folder: Path) -> None:
    """What AutoGPTQ 0.7.1 leaves behind, but for the weights."""
    settings = {
        "bits": 4,
        "group_size": 64,
        "damp_percent": 0.01,
        "desc_act": False,
        "static_groups": False,
        "sym": True,
        "true_sequential": True,
        "model_name_or_path": "/somewhere/private",
        "model_file_base_name": "gptq_model-4bit-64g",
        "is_marlin_format": False,
        "quant_method": "gptq",
    }
    config = {"model_type": "llama", "use_cache": False, "_name_or_path": "/somewhere/private"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    (folder / "quantize_config.json").write_text(json.dumps(settings))
    (folder / "gptq_model-4bit-64g.safetensors").write_bytes(b"weights")


def test_what_auto_gptq_writes_is_made_what_current_readers_take(tmp_path: Path) -> None:
    made, source, out = tmp_path / "made", tmp_path / "source", tmp_path / "out"
    _gptq_output(made)
    source.mkdir()
    out.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))
    (source / "generation_config.json").write_text('{"eos_token_id": 2}')
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"dense")
    clean_output(made, source, out)
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "quantize_config.json",
        "tokenizer.json",
    ]
    assert (out / "model.safetensors").read_bytes() == b"weights"
    assert (out / "generation_config.json").read_text() == '{"eos_token_id": 2}'
    config = json.loads((out / "config.json").read_text())
    settings = json.loads((out / "quantize_config.json").read_text())
    assert config["quantization_config"] == settings
    assert settings["checkpoint_format"] == "gptq"
    assert not {"is_marlin_format", "model_name_or_path", "model_file_base_name"} & set(settings)
    assert "use_cache" not in config
    assert "private" not in (out / "config.json").read_text()


def test_a_package_that_writes_nothing_is_told(tmp_path: Path) -> None:
    _gptq_output(tmp_path / "made")
    (tmp_path / "made" / "gptq_model-4bit-64g.safetensors").unlink()
    with pytest.raises(BackendError, match="wrote no weights"):
        clean_output(tmp_path / "made", tmp_path, tmp_path)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_packages_get_the_model_as_a_plain_folder(
    kind: str, tmp_path: Path, tiny_checkpoint: MakeModel, tiny_gguf: MakeModel
) -> None:
    model = tiny_checkpoint("llama") if kind == "folder" else tiny_gguf("llama", tensor_type="F16")
    source = open_checkpoint(model)
    write_dense(tmp_path / "plain", source)
    written = open_checkpoint(tmp_path / "plain")
    assert set(written.names()) == set(source.names())
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    text = "in the end"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "plain")
    assert tokenizer(text)["input_ids"] == source.load_tokenizer().encode(text)


def test_an_environment_is_made_once_and_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_CACHE", str(tmp_path))
    made: list[Path] = []

    def make(backend: Any, folder: Path, python: Path) -> None:
        made.append(python)
        folder.mkdir(parents=True)
        (folder / "complete").write_text("")

    monkeypatch.setattr(environment, "_make", make)
    watcher = Watcher()
    first = python_of(BACKENDS["autoawq"], watcher)
    assert f"about {show_bytes(BACKENDS['autoawq'].disk_bytes)}" in watcher.said[0]
    assert str(tmp_path) in watcher.said[0]
    assert python_of(BACKENDS["autoawq"], watcher) == first
    assert made == [first]


def test_too_small_a_disk_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGED_CACHE", str(tmp_path))
    large = dataclasses.replace(BACKENDS["autoawq"], disk_bytes=1 << 60)
    with pytest.raises(MissingDependencyError, match="set PAGED_CACHE to a folder with more room"):
        python_of(large, Watcher())
