"""The core stands alone: importing it loads the standard library and the layers below, nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pagedcli.core

MODULES = sorted(
    path.stem for path in Path(pagedcli.core.__file__).parent.glob("*.py") if path.stem != "__init__"
)

SCRIPT = """
import importlib, sys
before = {name.partition(".")[0] for name in sys.modules}
importlib.import_module(sys.argv[1])
loaded = {name.partition(".")[0] for name in sys.modules} - before - sys.stdlib_module_names
print(sorted(loaded), sorted(name for name in sys.modules if name.startswith("pagedcli.")))
"""


@pytest.mark.parametrize("module", [*(f"pagedcli.core.{name}" for name in MODULES), "pagedcli.engine.core"])
def test_core_module_imports_only_the_standard_library(module: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, module],
        cwd=Path(pagedcli.core.__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    outside, _, inside = run.stdout.strip().partition("] [")
    assert outside == "['pagedcli'"
    allowed = ("pagedcli.core", "pagedcli.config", "pagedcli.errors", "pagedcli.engine")
    names = inside.strip("]").replace("'", "").split(", ")
    assert [name for name in names if not name.startswith(allowed)] == []
    if module.startswith("pagedcli.core."):
        assert [name for name in names if name.startswith("pagedcli.engine")] == []
