"""What is not read is refused by name, with the way out: pickles, adapters, quantized folders, stray files."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.errors import CheckpointError

MakeModel = Callable[..., Path]


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def folder(tmp_path: Path, tiny_checkpoint: MakeModel) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"]
)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name == "generation_config.json":
        assert "eos_token_id" in open_checkpoint(folder).generation_config  # it may be missing
    elif name == "tokenizer.json":
        with pytest.raises(CheckpointError, match="tokenizer"):
            open_checkpoint(folder).load_tokenizer()
    else:
        assert name in refused(folder)


class Bomb:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt", "pytorch_model-00001-of-00002.bin"]
)
def test_pickled_weights_are_refused_unread_with_the_way_to_convert_them(name: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(folder / "exploded")))
    for path in (folder, folder / name):
        message = refused(path)
        assert str(folder / name) in message
        assert "pickled weights are not read" in message
        assert f"M.from_pretrained('{folder}').save_pretrained('model-safetensors')" in message
    assert not (folder / "exploded").exists()


def test_a_pickle_beside_safetensors_is_no_fault(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    (folder / "training_args.bin").write_bytes(b"\x80\x02")
    assert open_checkpoint(folder).names()


def test_training_arguments_are_not_taken_for_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "training_args.bin").write_bytes(b"\x80\x02")
    assert "holds no weights" in refused(folder)


def test_a_tensorflow_or_flax_folder_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "flax_model.msgpack").write_bytes(b"x")
    assert "flax_model.msgpack: weights of this kind are not read" in refused(folder)


def test_an_adapter_is_refused_with_its_base(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    message = refused(folder)
    assert "is an adapter (adapter_config.json) for owner/base" in message
    assert "merge_and_unload" in message


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "has no config.json" in refused(folder)


@pytest.mark.parametrize("text", ["", "[1]", "{", '"text"', "\xff"])
def test_a_broken_config_is_named(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    assert "config.json" in refused(folder)


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "has no config.json" in refused(tmp_path)


def test_a_file_of_a_folder_leads_to_the_folder(folder: Path) -> None:
    assert f"give its folder, {folder}" in refused(folder / "model.safetensors")


def test_an_unknown_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "neither a model folder nor a GGUF file" in refused(tmp_path / "notes.txt")


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    assert "there is no such file or folder" in refused(tmp_path / "nowhere")


def test_an_empty_weight_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    assert "model.safetensors: is empty" in refused(folder)
