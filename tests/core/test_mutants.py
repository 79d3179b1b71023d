"""Seeded faults: a copy of the package is edited in one place, and the checks must notice.

This tests the tests: a mutant that survives means that a promise of the core is not looked at.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pagedcli
from tests.core.mutants import MUTANTS, WORKLOADS, Mutant

PACKAGE = Path(pagedcli.__file__).parent
TESTS = Path(__file__).parent
KILLED, SURVIVED = 7, 0
NUM_WORKLOADS = 250

# Finders of an editable install come before the path, and would find the package that is not edited.
SCRIPT = """
import importlib, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]
import pagedcli.core.scheduler
assert pagedcli.core.scheduler.__file__.startswith(sys.argv[1]), "the edited copy was not imported"
from tests.core.random_workload import Run, make_workload
from tests.core.shadow import ShadowError

def check():
    if sys.argv[2] != "workloads":
        module, _, call = sys.argv[2].partition(":")
        test = importlib.import_module("tests.core." + module)
        eval("test." + (call if call.endswith(")") else call + "()"))
        return
    for seed in range(int(sys.argv[3])):
        for depth in (3, 2, 1):
            Run(make_workload(seed), depth).drain()

try:
    check()
except (AssertionError, ShadowError, IndexError, KeyError) as error:
    print(type(error).__name__, str(error)[:200])
    sys.exit(7)
"""


def edited_copy(folder: Path, mutant: Mutant | None) -> Path:
    for part in ("core", "engine"):
        shutil.copytree(
            PACKAGE / part, folder / "pagedcli" / part, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("__init__.py", "config.py", "errors.py"):
        shutil.copy(PACKAGE / name, folder / "pagedcli" / name)
    shutil.copytree(TESTS, folder / "tests" / "core", ignore=shutil.ignore_patterns("__pycache__", "golden"))
    for path, text, replacement in mutant.edits if mutant else ():
        source = (folder / "pagedcli" / path).read_text()
        assert text in source, f"stale mutant: {text!r} does not occur in {path}"
        (folder / "pagedcli" / path).write_text(source.replace(text, replacement))
    return folder


def run(folder: Path, killer: str, num_workloads: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), killer, str(num_workloads)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("mutant", MUTANTS, ids=[each.name.replace(" ", "_") for each in MUTANTS])
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    outcome = run(edited_copy(tmp_path, mutant), mutant.killer, NUM_WORKLOADS)
    assert outcome.returncode == KILLED, outcome.stderr or outcome.stdout or "SURVIVED"


@pytest.mark.parametrize("killer", sorted({mutant.killer for mutant in MUTANTS}))
def test_unedited_copy_survives(killer: str, tmp_path: Path) -> None:
    """The control: what kills the mutants lets the real source pass, so the edit is what killed them."""
    outcome = run(edited_copy(tmp_path, None), killer, 20 if killer == WORKLOADS else 0)
    assert outcome.returncode == SURVIVED, outcome.stderr or outcome.stdout
