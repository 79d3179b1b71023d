"""The scripts of `tools/` that a build uses."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

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
