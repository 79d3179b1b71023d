"""Written folders: every format read back and by an independent unpacker, shards, companions, what a folder says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from pagedcli.checkpoint.base import Checkpoint
from pagedcli.checkpoint.folder import SafetensorsCheckpoint
from pagedcli.checkpoint.quant_tensor import QuantTensor
from pagedcli.checkpoint.quant_writer import DenseTensor, Target, WriteSettings, why_not, write_quantized
from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.checkpoint.written_size import folder_bytes, written_bytes
from pagedcli.errors import CheckpointError
from tests.conftest import MakeModel
from tests.quant_support import Grid, quantize, unpack_independently

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
CASES = [
    ("autoawq", 4, 32, False, False),
    ("autoawq", 4, -1, False, False),
    ("gptq", 4, 32, True, False),
    ("gptq", 4, 32, True, True),
    ("gptq", 8, 16, True, False),
    ("gptq_v2", 4, 32, False, False),
    ("gptq_v2", 8, -1, False, True),
    ("compressed-tensors", 8, -1, True, False),
    ("compressed-tensors", 4, 32, False, False),
    ("compressed-tensors", 8, 32, True, True),
]


def quantized_linears(
    source: Checkpoint, bits: int, group: int, symmetric: bool, order: bool, kept: tuple[str, ...] = ()
) -> dict[str, tuple[QuantTensor, Grid]]:
    """All linears of the layers, rounded to nearest."""
    random, made = np.random.default_rng(0), {}
    for name in source.names():
        linear = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or linear in kept:
            continue
        tensor = source.tensor(name)
        values = tensor.data.view(np.float32).reshape(tensor.shape)
        permutation = random.permutation(values.shape[1]) if order else None
        grid = quantize(values, bits, group, symmetric=symmetric, order=permutation)
        made[linear] = (
            QuantTensor(
                linear,
                bits,
                grid.group,
                grid.codes.astype(np.uint8),
                grid.scales.astype(np.float32),
                grid.zeros.astype(np.uint8),
                None,
                grid.g_idx.astype(np.int32) if order else None,
                "rtn",
            ),
            grid,
        )
    return made


@pytest.mark.parametrize(("target", "bits", "group", "symmetric", "order"), CASES)
def test_what_is_written_means_what_was_given(
    target: Target,
    bits: int,
    group: int,
    symmetric: bool,
    order: bool,
    tiny_checkpoint: MakeModel,
    tmp_path: Path,
) -> None:
    source = open_checkpoint(tiny_checkpoint("llama", **SIZES))
    made = quantized_linears(source, bits, group, symmetric, order)
    settings = WriteSettings(target, bits, group, symmetric, order)
    write_quantized(tmp_path, source, (tensor for tensor, _ in made.values()), settings)
    groups = {linear: tensor.group_size for linear, (tensor, _) in made.items()}
    assert written_bytes(source, groups, settings) == open_checkpoint(tmp_path).stored_bytes()
    independent = unpack_independently(tmp_path)
    written = SafetensorsCheckpoint(tmp_path)
    for name, (tensor, grid) in made.items():
        np.testing.assert_array_equal(independent[f"{name}.weight"], grid.weight())
        found = written.quantized(name)
        assert found is not None
        np.testing.assert_array_equal(found.codes, tensor.codes)
        np.testing.assert_array_equal(found.scales, tensor.scales)
        np.testing.assert_array_equal(found.zeros, tensor.zeros)
        np.testing.assert_array_equal(found.groups(), tensor.groups())
    assert set(written.names()) == set(source.names())
    assert written.quantized_linears is not None
    assert written.quantized_linears.notes == ()
    for name in source.names():
        if name.removesuffix(".weight") not in made:
            np.testing.assert_array_equal(written.tensor(name).data, source.tensor(name).data)


def write(source: Checkpoint, folder: Path, target: Target = "gptq", **options: Any) -> SafetensorsCheckpoint:
    kept = options.pop("kept", ())
    dense = options.pop("dense", ())
    shard_bytes = options.pop("shard_bytes", 5 << 30)
    made = quantized_linears(source, 4, 32, target != "autoawq", False, kept)
    settings = WriteSettings(target, 4, 32, target != "autoawq", kept=kept, **options)
    tensors = [*(tensor for tensor, _ in made.values()), *dense]
    write_quantized(folder, source, tensors, settings, shard_bytes=shard_bytes)
    return SafetensorsCheckpoint(folder)


def test_shards_have_an_index_and_no_file_is_larger_than_asked(
    tiny_checkpoint: MakeModel, tmp_path: Path
) -> None:
    source = open_checkpoint(tiny_checkpoint("llama", **SIZES))
    one = write(source, tmp_path / "one")
    many = write(source, tmp_path / "many", shard_bytes=100_000)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 1
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert set(many.names()) == set(one.names())
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    held = {name: file.name for file in files for name in load_file(file)}
    assert index["weight_map"] == held
    sizes = [sum(array.nbytes for array in load_file(file).values()) for file in files]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert max(sizes) <= 100_000
    for name in one.names():
        np.testing.assert_array_equal(many.tensor(name).data, one.tensor(name).data)
    # Written again with fewer files: what was there before goes.
    again = write(source, tmp_path / "many")
    assert [path.name for path in again.path.glob("model*")] == ["model.safetensors"]


def test_C21_tied_stays_tied(tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    """Only GPTQ files have the head once more, because AutoGPTQ does not tie."""
    source = open_checkpoint(tiny_checkpoint("qwen2", **SIZES))
    for target in ("autoawq", "gptq", "gptq_v2", "compressed-tensors"):
        folder = tmp_path / target
        written = write(source, folder, target, shard_bytes=60_000)  # type: ignore[arg-type]
        assert written.config["tie_word_embeddings"] is True
        stored = [name for file in folder.glob("*.safetensors") for name in load_file(file)]
        assert len(stored) == len(set(stored))
        assert ("lm_head.weight" in stored) == target.startswith("gptq")
        if target.startswith("gptq"):
            head, embedding = written.tensor("lm_head.weight"), written.tensor("model.embed_tokens.weight")
            np.testing.assert_array_equal(head.data, embedding.data)


def test_companions_are_copied_unchanged_and_nothing_else(tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for path in tiny_checkpoint("llama", **SIZES).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "_name_or_path": "/home/someone/model"}))
    extra = {"chat_template.jinja": "x", "LICENSE": "y", "vocab.txt": "z"}
    for name, text in (extra | {"README.md": "card", "quality.json": "{}", ".hidden": ""}).items():
        (folder / name).write_text(text)
    write(open_checkpoint(folder), tmp_path / "out")
    copied = {"generation_config.json", "tokenizer.json", "tokenizer_config.json", *extra}
    written = {"config.json", "quantize_config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == copied | written
    for name in copied:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    for name in ("config.json", "quantize_config.json"):
        assert "/home" not in (tmp_path / "out" / name).read_text()


def test_both_files_say_the_same_and_always_the_format(tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    source = open_checkpoint(tiny_checkpoint("llama", **SIZES))
    for target, layout in (
        ("autoawq", "gemm"),
        ("gptq", "gptq"),
        ("gptq_v2", "gptq_v2"),
        ("compressed-tensors", "pack-quantized"),
    ):
        write(source, tmp_path / target, target)  # type: ignore[arg-type]
        inside = json.loads((tmp_path / target / "config.json").read_text())["quantization_config"]
        own = json.loads((tmp_path / target / "quantize_config.json").read_text())
        assert own["checkpoint_format"] == layout
        assert inside.items() <= own.items()


def test_linears_that_are_kept_stay_dense(tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    source = open_checkpoint(tiny_checkpoint("llama", **SIZES))
    kept = ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj")
    for target in ("autoawq", "gptq", "compressed-tensors"):
        written = write(source, tmp_path / target, target, kept=kept)  # type: ignore[arg-type]
        for name in kept:
            assert written.quantized(name) is None
            np.testing.assert_array_equal(
                written.tensor(f"{name}.weight").data, source.tensor(f"{name}.weight").data
            )
        text = (tmp_path / target / "config.json").read_text()
        assert all(name in text.replace("\\\\", "").replace("\\", "") for name in kept)


@pytest.mark.parametrize("target", ["gptq", "autoawq"])
def test_gptqmodel_is_told_of_kept_linears_by_dynamic(
    target: Target, tiny_checkpoint: MakeModel, tmp_path: Path
) -> None:
    kept = ("model.layers.0.mlp.down_proj",)
    write(open_checkpoint(tiny_checkpoint("llama", **SIZES)), tmp_path / "out", target, kept=kept)
    patterns = list(
        json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["dynamic"]
    )
    assert len(patterns) == 1
    assert re.match(patterns[0].removeprefix("-:"), kept[0])  # as it matches them
    assert not re.match(patterns[0].removeprefix("-:"), "model.layers.0.mlp.down_proj2")


def test_optimum_is_told_which_linears_are_quantized(tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    """transformers reads GPTQ by optimum, which makes all linears quantized ones but by this key; it compares ends."""
    kept = ("model.layers.0.mlp.down_proj",)
    source = open_checkpoint(tiny_checkpoint("llama", **SIZES))
    write(source, tmp_path / "out", "gptq", kept=kept)
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (names,) = said["modules_in_block_to_quantize"]
    linears = [name.removesuffix(".weight") for name in source.names() if name.endswith("_proj.weight")]
    assert {name for name in linears if not any(name.endswith(one) for one in names)} == set(kept)
    write(source, tmp_path / "whole", "gptq")
    said = json.loads((tmp_path / "whole" / "config.json").read_text())["quantization_config"]
    assert "modules_in_block_to_quantize" not in said


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("target", ["gptq", "autoawq"])
def test_the_size_said_before_is_held_by_large_embeddings(
    target: Target, tied: bool, tiny_checkpoint: MakeModel, tmp_path: Path
) -> None:
    """Most of such a model is embedding and head, which stay dense; GPTQ stores a tied one twice."""
    sizes = {**SIZES, "vocab_size": 4096, "tie_word_embeddings": tied}
    source = open_checkpoint(tiny_checkpoint("llama", **sizes))
    made = quantized_linears(source, 4, 32, target == "gptq", False)
    settings = WriteSettings(target, 4, 32, target == "gptq")
    write_quantized(tmp_path, source, (tensor for tensor, _ in made.values()), settings)
    groups = dict.fromkeys(made, 32)
    stored = open_checkpoint(tmp_path).stored_bytes()
    assert written_bytes(source, groups, settings) == stored
    assert stored >= 4 * 4096 * 64 * (1 + (not tied or target == "gptq"))
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert stored < on_disk <= folder_bytes(source, groups, settings)


@pytest.mark.parametrize(("dtype", "code"), [("float16", "F16"), ("bfloat16", "BF16"), ("float32", "F32")])
def test_the_dtype_of_what_is_not_quantized(
    dtype: str, code: str, tiny_checkpoint: MakeModel, tmp_path: Path
) -> None:
    import torch

    source = open_checkpoint(tiny_checkpoint("llama", **SIZES))
    changed = DenseTensor("model.norm.weight", np.linspace(0.5, 2, 64, dtype=np.float32))
    write(source, tmp_path, "autoawq", dtype=dtype, dense=(changed,))
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == dtype
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        for name in file.keys():  # noqa: SIM118 - no mapping
            kind = file.get_slice(name).get_dtype()
            assert kind == (
                "I32" if "q" in name.rpartition(".")[2] else "F16" if "scales" in name else code
            ), name
        want = torch.linspace(0.5, 2, 64, dtype=torch.float32).to(getattr(torch, dtype))
        torch.testing.assert_close(file.get_tensor("model.norm.weight"), want)
        data = torch.from_numpy(source.tensor("model.embed_tokens.weight").data).view(torch.float32)
        embedding = file.get_tensor("model.embed_tokens.weight")
        assert torch.equal(embedding.flatten(), data.to(getattr(torch, dtype)))


@pytest.mark.parametrize(
    ("target", "change", "words"),
    [
        ("gptq", {"zeros": 0}, "zero point of 0"),
        ("gptq_v2", {"scales": 1e6}, "float16"),
        ("gptq_v2", {"scales": np.nan}, "float16"),
        ("autoawq", {"bits": 8}, "AWQ has 4 bits"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_by_name(
    target: Target, change: dict[str, Any], words: str, tiny_checkpoint: MakeModel, tmp_path: Path
) -> None:
    source = open_checkpoint(tiny_checkpoint("llama", **SIZES))
    bits = change.pop("bits", 4)
    tensor, _ = next(iter(quantized_linears(source, bits, 32, True, False).values()))
    for field, value in change.items():
        getattr(tensor, field)[3, 1] = value
    with pytest.raises(CheckpointError) as caught:
        write_quantized(tmp_path, source, [tensor], WriteSettings(target, bits, 32, True))
    assert words in str(caught.value)
    assert tensor.name in str(caught.value)
    assert not (tmp_path / "config.json").exists()
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_killed_run_leaves_no_folder_that_opens(tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    source = open_checkpoint(tiny_checkpoint("llama", **SIZES))

    def killed() -> Any:
        yield next(iter(quantized_linears(source, 4, 32, True, False).values()))[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_quantized(tmp_path, source, killed(), WriteSettings("gptq", 4, 32, True))
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
    write(source, tmp_path)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("target", "shape", "bits", "group", "words"),
    [
        ("autoawq", (64, 192), 4, 128, "192 inputs do not divide into groups of 128"),
        ("autoawq", (60, 128), 4, 128, "60 outputs are no multiple of 8"),
        ("gptq", (60, 128), 4, 128, "no multiple of 8"),
        ("gptq", (64, 100), 8, -1, None),
        ("compressed-tensors", (3, 5), 4, -1, None),
        ("gptq", (64, 102), 8, -1, "no multiple of 4"),
    ],
)
def test_C17_shapes_that_do_not_fit(
    target: Target, shape: tuple[int, int], bits: int, group: int, words: str | None
) -> None:
    reason = why_not(target, shape, bits, group)
    assert reason == words if words is None else words in (reason or "")
