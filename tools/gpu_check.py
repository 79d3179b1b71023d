"""Everything that means something on a GPU, in one command that needs no network: `make gpu-check`.

    python tools/gpu_check.py [--json FILE]

Runs each part in a process of its own under a time limit, goes on when one fails, prints a table and writes JSON. It
uses the Python that runs it (not the checkout's environment, which may have no CUDA build of torch) and the checkout's
sources. Exit code 0: all parts passed; 1: a part failed; 2: there is no CUDA device or no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ("-m", "pytest", "-q", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider")
TAIL_CHARACTERS = 4000
_PAGED = "from pagedcli.cli.main import main; main()"


def parts(build: Path, model: Path) -> list[tuple[str, tuple[str, ...], int]]:
    """(name, arguments for Python, seconds allowed) of each part, the most important first."""
    bench = ("--device", "cuda", "--model", str(model), "--json", str(build / "gpu-compare.json"))
    return [
        ("ops and kernels", (*PYTEST, "tests/gpu", "-m", "gpu"), 240),
        ("write a model of SmolLM2's shape", (str(ROOT / "tools/random_model.py"), str(model)), 60),
        ("comparison", ("-c", _PAGED, "bench", "compare", "--short", *bench), 150),
    ]


def run_part(name: str, arguments: tuple[str, ...], limit_s: int) -> dict[str, Any]:
    """Run one part; its outcome, time and the end of what it printed."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "NO_COLOR": "1"}
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT, env=environment, timeout=limit_s, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        outcome, output = ("passed" if done.returncode == 0 else f"exit code {done.returncode}"), done.stdout
    except subprocess.TimeoutExpired as expired:
        raw = expired.stdout or b""
        output = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
        outcome = f"over {limit_s} s"
    return {
        "name": name,
        "outcome": outcome,
        "seconds": round(time.monotonic() - started, 1),
        "output": output[-TAIL_CHARACTERS:],
    }


def device() -> dict[str, Any] | None:
    """What the GPU and the software are, or None if there is nothing to check on."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }


def main() -> int:
    """Run all parts, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Check paged on this machine's GPU.")
    parser.add_argument("--json", type=Path, default=ROOT / "build/gpu-check.json")
    arguments = parser.parse_args()
    found = device()
    if found is None:
        print(
            f"gpu-check: {sys.executable} has no torch that sees a CUDA device: run it where there is one",
            file=sys.stderr,
        )
        return 2
    build = arguments.json.parent
    build.mkdir(parents=True, exist_ok=True)
    results = [run_part(*part) for part in parts(build, build / "random-model")]
    arguments.json.write_text(json.dumps({"device": found, "parts": results}, indent=2) + "\n")
    print(f"{found['gpu']}, torch {found['torch']}, Python {found['python']}")
    for result in results:
        print(f"{result['name']:40} {result['outcome']:16} {result['seconds']:7.1f} s")
        print("    " + result["output"].strip().replace("\n", "\n    "))
    return 0 if all(result["outcome"] == "passed" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
