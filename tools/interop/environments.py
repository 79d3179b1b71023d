"""Environments of other packages for `make interop` and `make quality`: one each, made once from pinned requirements.

They lie in build/interop and are made from configs/interop/NAME.txt or configs/backends/NAME.txt.
PAGED_INTEROP_PYTHON_NAME (upper case, _ for -) names the Python of one that is there already.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment_of(package: str, method: str) -> str:
    """Name of the environment that a package is in; transformers reads each format by another package.

    Args:
        package: Of peer.py or their_quantizers.py.
        method: `quant_method` of what is to be read, "" for what quantizes.
    """
    if package == "compressed-tensors" or (package, method) == ("transformers", "compressed-tensors"):
        return "llm-compressor"
    return "gptqmodel" if package == "transformers" else package


def python_of(package: str, method: str = "") -> str:
    """The Python of a package's environment (`environment_of`), which is made if it is not there."""
    name = environment_of(package, method)
    given = os.environ.get(f"PAGED_INTEROP_PYTHON_{name.upper().replace('-', '_')}")
    if given:
        return given
    home = ROOT / "build" / "interop" / name
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        files = [ROOT / "configs" / part / f"{name}.txt" for part in ("interop", "backends")]
        requirements = next(file for file in files if file.exists())
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)], check=True)
        (home / "complete").touch()
    return str(python)


def their_environment(threads: int) -> dict[str, str]:
    """Variables for a process of another package: nothing of ours on its path, no GPU, no hub."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return kept | {
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
