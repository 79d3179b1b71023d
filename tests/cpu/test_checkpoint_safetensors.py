"""Folders of safetensors: equal to what the `safetensors` package reads, and damaged files refused by name."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from pagedcli.checkpoint.base import Checkpoint, RawTensor
from pagedcli.checkpoint.safetensors_file import SafetensorsFile
from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.errors import CheckpointError
from tests.fixtures_checkpoints import safetensors_bytes, tensor_shapes, tiny_config, tiny_tensors

MakeModel = Callable[..., Path]
NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "BOOL": "?", "U8": "u1", "F64": "<f8"}


def array(tensor: RawTensor) -> np.ndarray:
    return tensor.data.view(NUMPY[tensor.dtype]).reshape(tensor.shape)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_equal_the_reference_reader(family: str, dtype: str, tiny_checkpoint: MakeModel) -> None:
    folder = tiny_checkpoint(family, dtype=dtype)
    checkpoint = open_checkpoint(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as reference:  # numpy has no bfloat16
        assert set(checkpoint.names()) == set(reference.keys())
        for name in checkpoint.names():
            tensor, expected = checkpoint.tensor(name), reference.get_tensor(name)
            assert tensor.shape == tuple(expected.shape) == checkpoint.shape(name)
            assert f"torch.{dtype}" == str(expected.dtype)
            assert tensor.data.tobytes() == bytes(expected.untyped_storage())
    assert checkpoint.config["torch_dtype"] == dtype
    assert checkpoint.config["model_type"] == family
    assert checkpoint.generation_config["eos_token_id"] == [2, 0]


def test_all_plain_dtypes_are_read(tmp_path: Path) -> None:
    tensors = {
        "a": np.arange(6, dtype=np.float64).reshape(2, 3),
        "b": np.array([True, False, True]),
        "c": np.arange(4, dtype=np.uint8),
        "d": np.array(7, dtype=np.int64),
        "e": np.zeros((0, 3), dtype=np.float32),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    for name, expected in tensors.items():
        np.testing.assert_array_equal(array(file.tensor(name)), expected)


def test_a_tensor_is_a_view_and_writing_to_it_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes({"a": np.ones((2, 2), np.float32)}))
    before = path.read_bytes()
    data = SafetensorsFile(path).tensor("a").data
    assert data.base is not None
    assert data.flags.writeable  # torch warns about arrays that are not
    data[:] = 0
    assert path.read_bytes() == before


@pytest.mark.parametrize("shards", [2, 5])
def test_shards_hold_the_same_as_one_file(shards: int, tiny_checkpoint: MakeModel) -> None:
    one, many = (open_checkpoint(tiny_checkpoint("qwen3", shards=n)) for n in (1, shards))
    assert set(one.names()) == set(many.names()) == set(tensor_shapes(tiny_config("qwen3")))
    for name in one.names():
        np.testing.assert_array_equal(array(one.tensor(name)), array(many.tensor(name)))
    assert (
        one.stored_bytes() == many.stored_bytes() == sum(t.nbytes for t in tiny_tensors(one.config).values())
    )


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "model"))


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_missing_shard_is_named(tmp_path: Path, tiny_checkpoint: MakeModel) -> None:
    folder = copy(tiny_checkpoint("llama", shards=3), tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing" in refused(folder)


def test_a_tensor_missing_from_its_shard_is_named(tmp_path: Path, tiny_checkpoint: MakeModel) -> None:
    folder = copy(tiny_checkpoint("llama", shards=2), tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weights"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refused(folder)
    assert "model-00001-of-00002.safetensors: tensor model.norm.weights is missing" in message


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", 3, None])
def test_an_index_cannot_point_outside_the_folder(
    place: object, tmp_path: Path, tiny_checkpoint: MakeModel
) -> None:
    folder = copy(tiny_checkpoint("llama", shards=2), tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": place}}))
    assert "not a file name" in refused(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"weight_map": {}}', '{"weight_map": 3}'])
def test_a_broken_index_is_named(text: str, tmp_path: Path, tiny_checkpoint: MakeModel) -> None:
    folder = copy(tiny_checkpoint("llama", shards=2), tmp_path)
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refused(folder)


def test_shards_without_an_index_are_refused(tmp_path: Path, tiny_checkpoint: MakeModel) -> None:
    folder = copy(tiny_checkpoint("llama", shards=2), tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    assert "2 safetensors files but no model.safetensors.index.json" in refused(folder)


def test_one_file_of_another_name_will_do(tmp_path: Path, tiny_checkpoint: MakeModel) -> None:
    folder = copy(tiny_checkpoint("llama"), tmp_path)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert "model.norm.weight" in open_checkpoint(folder).names()


def test_an_unknown_tensor_is_an_error_with_folder_and_name(tiny_checkpoint: MakeModel) -> None:
    checkpoint: Checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    with pytest.raises(CheckpointError, match=r"llama-.*has no tensor model\.layers\.9\.x"):
        checkpoint.tensor("model.layers.9.x")


def test_ends_come_from_config_where_generation_config_is_missing(
    tmp_path: Path, tiny_checkpoint: MakeModel
) -> None:
    folder = copy(tiny_checkpoint("llama"), tmp_path)
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).generation_config == {"bos_token_id": 1, "eos_token_id": 2}


def test_the_dtype_is_the_stored_one_whatever_config_says(tmp_path: Path, tiny_checkpoint: MakeModel) -> None:
    folder = copy(tiny_checkpoint("llama", dtype="bfloat16"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16", "dtype": "float32"}))
    read = open_checkpoint(folder).config
    assert read["torch_dtype"] == "bfloat16"
    assert "dtype" not in read


def write_file(path: Path, header: Any, body: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def entry(start: int, end: int, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


BROKEN_HEADERS = {
    "overlap": ({"a": entry(0, 8), "bad": entry(4, 12)}, 12, "tensor bad: overlaps"),
    "gap": ({"a": entry(0, 8), "bad": entry(12, 20)}, 20, "tensor bad: leaves a gap"),
    "beyond": ({"a": entry(0, 8), "bad": entry(8, 16)}, 12, "tensor bad: ends at byte 16, the file has 12"),
    "size": ({"bad": entry(0, 4)}, 4, r"tensor bad: F32 \[2\] needs 8 bytes, the header gives it 4"),
    "tail": ({"a": entry(0, 8)}, 9, "tensors end at byte 8, the file has 9"),
    "dtype": ({"bad": entry(0, 8, dtype="F7")}, 8, "tensor bad: unknown dtype 'F7'"),
    "dtype list": ({"bad": entry(0, 8, dtype=["F32"])}, 8, "tensor bad: unknown dtype"),
    "negative": ({"bad": entry(0, 8, shape=[-2])}, 8, "tensor bad: shape is"),
    "bool shape": ({"bad": entry(0, 4, shape=[True])}, 4, "tensor bad: shape is"),
    "no shape": ({"bad": {"dtype": "F32", "data_offsets": [0, 8]}}, 8, "tensor bad: shape is None"),
    "offsets": ({"bad": {"dtype": "F32", "shape": [2], "data_offsets": [8]}}, 8, "tensor bad: data_offsets"),
    "reversed": ({"bad": entry(8, 0)}, 8, "tensor bad: data_offsets"),
    "entry": ({"bad": 3}, 0, "tensor bad: its entry is not an object"),
    "list": ([], 0, "not a JSON object"),
    "twice": (b'{"a":{},"a":{}}', 0, "a name appears twice"),
    "text": (b"{nonsense", 0, "not valid JSON"),
    "deep": (b"[" * 100_000, 0, "not valid JSON"),
    "latin": (b'{"\xff": 1}', 0, "not valid JSON"),
}


@pytest.mark.parametrize("case", BROKEN_HEADERS)
def test_a_broken_header_names_file_and_tensor(case: str, tmp_path: Path) -> None:
    header, size, message = BROKEN_HEADERS[case]
    path = write_file(tmp_path / "model.safetensors", header, bytes(size))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}"):
        SafetensorsFile(path)


@pytest.mark.parametrize("data", [b"", b"1234567", (1 << 62).to_bytes(8, "little"), bytes(8), bytes(100)])
def test_what_is_no_safetensors_file_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        SafetensorsFile(tmp_path / "x.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return safetensors_bytes(tiny_tensors(tiny_config("llama", num_hidden_layers=1, hidden_size=12)))


def test_every_truncation_is_noticed(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    cuts = [*range(64), *random.Random(0).sample(range(64, len(whole)), 300), len(whole) - 1]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"x\.safetensors"):
            SafetensorsFile(path)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_flipped_header_bytes_give_tensors_or_one_error(
    data: st.DataObject, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    header_end = 8 + int.from_bytes(whole[:8], "little")
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, header_end - 1))
        changed[position] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    path.write_bytes(changed)
    try:
        file = SafetensorsFile(path)
    except CheckpointError:
        return
    for name in file.names():
        tensor = file.tensor(name)
        assert tensor.data.nbytes == file.num_bytes(name)
