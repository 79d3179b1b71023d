"""The scripts of `tools/` that a build uses."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np

TOOLS = Path(__file__).parents[2] / "tools"


def test_replacing_a_library_leaves_who_has_mapped_it_alone(tmp_path: Path) -> None:
    """Written in place, the shorter file would end the mapping: SIGBUS for a running engine."""
    fresh, folder = tmp_path / "fresh" / "library.so", tmp_path / "used"
    fresh.parent.mkdir()
    folder.mkdir()
    fresh.write_bytes(b"new")
    used = folder / "library.so"
    used.write_bytes(b"old" * mmap.PAGESIZE)
    with used.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        subprocess.run([sys.executable, str(TOOLS / "replace_files.py"), str(folder), str(fresh)], check=True)
        assert mapped[:] == b"old" * mmap.PAGESIZE
    assert used.read_bytes() == b"new"
    assert [file.name for file in folder.iterdir()] == ["library.so"]


def test_a_rounded_copy_is_an_awq_checkpoint_within_half_a_step(tmp_path: Path) -> None:
    """Unpacked by code of the tests: what CI times beside the original."""
    from tests.fixtures_checkpoints import tiny_config, tiny_tensors, write_tiny_checkpoint
    from tests.quant_support import unpack_independently

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    write_tiny_checkpoint(tmp_path / "model", "llama", **shape)
    tool = str(TOOLS / "rounded_copy.py")
    subprocess.run([sys.executable, tool, str(tmp_path / "copy"), str(tmp_path / "model")], check=True)
    assert (
        json.loads((tmp_path / "copy" / "config.json").read_text())["quantization_config"]["quant_method"]
        == "awq"
    )
    original = tiny_tensors(tiny_config("llama", **shape))
    copied = unpack_independently(tmp_path / "copy")
    names = [name for name in original if name.endswith("_proj.weight")]
    assert len(names) == 14
    for name in names:
        weight = original[name].reshape(len(original[name]), -1, 64)
        step = np.maximum(weight.max(-1), 0) - np.minimum(weight.min(-1), 0)
        error = np.abs(copied[name].reshape(weight.shape) - weight).max(-1)
        assert (error <= step / 15 * 1.02).all()  # a zero point is rounded too
