"""The GGUF parser: equal to the `gguf` package's own reader, and damaged files refused by name."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedcli.checkpoint.gguf_file import GGUFFile
from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.errors import CheckpointError
from tests.fixtures_checkpoints import write_tiny_gguf

MakeModel = Callable[..., Path]
TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


def reference_metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}


@pytest.mark.parametrize("tensor_type", TYPES)
def test_metadata_and_tensors_equal_the_reference_reader(tensor_type: str, tiny_gguf: MakeModel) -> None:
    path = tiny_gguf("qwen2", tensor_type=tensor_type, hidden_size=64, num_attention_heads=4)
    file, reader = GGUFFile(path), gguf.GGUFReader(path)
    expected = reference_metadata(reader)
    assert file.metadata.keys() == expected.keys()
    for key, value in expected.items():
        assert file.metadata[key] == (
            pytest.approx(value, rel=1e-7) if isinstance(value, float) else value
        ), key
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        mine = file.tensors[tensor.name]
        assert mine.kind == tensor.tensor_type
        assert mine.shape == tuple(int(n) for n in tensor.shape[::-1])
        assert file.data(mine).tobytes() == tensor.data.tobytes()


def write_fields(path: Path, add: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    add(writer)
    writer.add_tensor("t", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_value_type_is_read(tmp_path: Path) -> None:
    values: dict[str, tuple[Any, gguf.GGUFValueType]] = {
        "u8": (200, gguf.GGUFValueType.UINT8),
        "i8": (-100, gguf.GGUFValueType.INT8),
        "u16": (60_000, gguf.GGUFValueType.UINT16),
        "i16": (-30_000, gguf.GGUFValueType.INT16),
        "u32": (4_000_000_000, gguf.GGUFValueType.UINT32),
        "i32": (-2_000_000_000, gguf.GGUFValueType.INT32),
        "u64": (1 << 63, gguf.GGUFValueType.UINT64),
        "i64": (-(1 << 62), gguf.GGUFValueType.INT64),
        "f32": (0.5, gguf.GGUFValueType.FLOAT32),
        "f64": (0.1, gguf.GGUFValueType.FLOAT64),
        "yes": (True, gguf.GGUFValueType.BOOL),
        "text": ("zażółć", gguf.GGUFValueType.STRING),
    }

    def add(writer: gguf.GGUFWriter) -> None:
        for key, (value, kind) in values.items():
            writer.add_key_value(key, value, kind)
        writer.add_array("words", ["a", "", "ö"])
        writer.add_array("numbers", [1, -2, 3])
        writer.add_array("flags", [True, False])

    metadata = GGUFFile(write_fields(tmp_path / "x.gguf", add)).metadata
    for key, (value, _) in values.items():
        assert metadata[key] == value
        assert type(metadata[key]) is type(value)
    assert metadata["words"] == ["a", "", "ö"]
    assert metadata["numbers"] == [1, -2, 3]
    assert metadata["flags"] == [True, False]


def test_a_float32_reads_as_its_shortest_decimal(tmp_path: Path) -> None:
    metadata = GGUFFile(write_fields(tmp_path / "x.gguf", lambda w: w.add_float32("eps", 1e-5))).metadata
    assert metadata["eps"] == 1e-5  # widened to double it would be 9.999999747378752e-06


def test_another_alignment_is_honoured(tmp_path: Path) -> None:
    path = write_fields(tmp_path / "x.gguf", lambda writer: writer.add_custom_alignment(256))
    file = GGUFFile(path)
    assert file.tensors["t"].offset % 256 == 0
    assert file.data(file.tensors["t"]).tobytes() == np.ones((2, 2), np.float32).tobytes()


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


def test_big_endian_is_refused_by_name(tmp_path: Path) -> None:
    assert "big-endian" in refused(write_tiny_gguf(tmp_path / "big.gguf", "llama", big_endian=True))


@pytest.mark.parametrize("version", [0, 1, 4, 99])
def test_other_versions_are_refused(version: int, tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    assert ("big-endian" if version == 0 else f"version {version}") in refused(path)


@pytest.mark.parametrize("data", [b"GG", b"nope, this is text", b"GGUF", b"GGUF\x03\0\0\0"])
def test_what_is_no_gguf_file_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    refused(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    assert "is empty" in refused(tmp_path / "x.gguf")


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def table(*tensors: tuple[str, list[int], int, int]) -> bytes:
    """A GGUF file of tensors given as (name, dimensions fastest first, storage type, offset)."""
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0)
    for name, dimensions, kind, offset in tensors:
        out += text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)
    return out + bytes(-len(out) % 32) + bytes(128)


BROKEN = {
    "overlap": (table(("a", [16], 0, 0), ("bad", [16], 0, 32)), "tensor bad: overlaps"),
    "beyond": (table(("bad", [100], 0, 0)), "tensor bad: ends at byte"),
    "huge": (table(("bad", [1 << 62, 1 << 62], 0, 0)), "tensor bad: ends at byte"),
    "alignment": (table(("bad", [4], 0, 4)), "tensor bad: offset 4 is not a multiple of 32"),
    "type": (table(("bad", [4], 77, 0)), "tensor bad: has the unknown storage type 77"),
    "block": (table(("bad", [33], 2, 0)), r"tensor bad: shape \[33\] does not fit Q4_0"),
    "zero": (table(("bad", [0], 0, 0)), r"tensor bad: shape \[0\]"),
    "scalar": (table(("bad", [], 0, 0)), "tensor bad: has 0 dimensions"),
    "many": (table(("bad", [1] * 9, 0, 0)), "tensor bad: has 9 dimensions"),
    "twice": (table(("a", [4], 0, 0), ("a", [4], 0, 32)), "repeats the name a"),
    "key twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (text("k") + b"\0\0\0\0\1"),
        "metadata k: appears twice",
    ),
    "value type": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + b"\x63\0\0\0",
        "metadata k: .* value type 99",
    ),
    "array": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 1 << 60),
        "metadata k: claims",
    ),
    "nested": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1),
        "array of arrays",
    ),
    "utf8": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"\xff" + bytes(8), "not UTF-8"),
    "string": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 63), "needs"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_names_tensor_or_key(case: str, tmp_path: Path) -> None:
    data, message = BROKEN[case]
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"broken\.gguf: .*{message}"):
        GGUFFile(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    write_tiny_gguf(
        path, "llama", num_hidden_layers=1, hidden_size=32, num_attention_heads=2, tensor_type="Q8_0"
    )
    return path.read_bytes()


def test_every_truncation_is_noticed(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    cuts = [*range(40), *random.Random(0).sample(range(40, len(whole)), 300), len(whole) - 33]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            open_checkpoint(path)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_flipped_header_bytes_give_tensors_or_one_error(
    data: st.DataObject, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    changed = bytearray(whole)
    # metadata without the long vocabulary, or the table of tensors behind it
    vocabulary, table_start = (
        whole.index(b"tokenizer.ggml.tokens"),
        whole.index(b"tokenizer.ggml.bos_token_id"),
    )
    header_end = whole.rindex(b"ffn_down.weight") + 200
    places = st.one_of(st.integers(4, vocabulary + 60), st.integers(table_start, header_end))
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(places)] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(changed)
    with contextlib.suppress(CheckpointError):  # and no other error
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names():
            assert checkpoint.tensor(name).shape == checkpoint.shape(name)
