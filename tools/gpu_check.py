"""Everything that means something on a GPU, in one command that needs no network: `make gpu-check`.

    python tools/gpu_check.py [--json FILE] [--only PART ...] [--seconds 470]

Builds the kernels for this GPU alone, holds the wrappers' conformance data against the emulator, runs the GPU tests and
compute-sanitizer on small cases, then measures kernels and whole models. Each part is a process of its own under a time
limit; one that fails does not stop the rest, and what no time is left for is said. Prints a table and writes JSON;
all that a part prints is kept beside it.

It uses the Python that runs it (not the checkout's environment, which may have no CUDA build of torch), the checkout's
sources and, of packages, what an image with torch and transformers has: the command line of `paged` may want more, so
no part goes through it. Exit code 0: all parts passed; 1: a part failed; 2: there is no CUDA device or no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_table

ROOT = Path(__file__).resolve().parent.parent
PYTEST = (
    *("-m", "pytest", "-q", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"),
    *("-W", "default"),  # other versions of other packages warn of other things: no mistake of ours
)
TAIL_CHARACTERS = 4000
TOTAL_S = 470
LEAST_S = 8
"""A part that has less is left out."""
CACHE = "cache"
MODELS = ("paged-bf16", "paged-int4", "transformers")
DEVICE_LIMIT_S = 60
_DEVICE = """
import json, sys, torch
if not torch.cuda.is_available():
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
    sys.exit(f"torch {torch.__version__} ({built}) finds no CUDA device")
found = torch.cuda.get_device_properties(0)
print(json.dumps({
    "gpu": found.name,
    "memory_bytes": found.total_memory,
    "capability": f"{found.major}.{found.minor}",
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "python": sys.version.split()[0],
}))
"""


@dataclass(frozen=True, slots=True)
class Part:
    """One process.

    Attributes:
        name: For the table and `--only`.
        arguments: For Python.
        limit_s: At most; less where less is left of the whole.
        writes: JSON that it leaves, taken into the report also if it was stopped.
    """

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    writes: Path | None = None


def parts(build: Path, architecture: int) -> list[Part]:
    """All parts, the most important first; `build` is where they write."""
    tools, conformance = ROOT / "tools", build / "conformance.json"
    compiler = ROOT / "kernels/paged_kernels/cuda_build.py"
    built = (str(compiler), str(build / CACHE), str(architecture))
    found = [
        Part("build", built, 150),
        Part(
            "conformance",
            (*_tool("conformance.py"), "gpu", "-o", str(conformance), "--architecture", str(architecture)),
            60,
            conformance,
        ),
        Part("tests", (*PYTEST, "tests/gpu", "-m", "gpu"), 100),
        Part(
            "kernels",
            (*_tool("gpu_kernels.py"), "--json", str(build / "kernels.json")),
            100,
            build / "kernels.json",
        ),
    ]
    found += [
        Part(
            name,
            (str(tools / "gpu_model.py"), name, "--json", str(build / f"{name}.json")),
            75,
            build / f"{name}.json",
        )
        for name in MODELS
    ]
    sanitize = (
        *_tool("gpu_sanitize.py"),
        "--architecture",
        str(architecture),
        "-o",
        str(build / "check-gpu"),
    )
    return [*found, Part("sanitizer", sanitize, 75)]


def _tool(name: str) -> tuple[str, ...]:
    return (str(ROOT / "tools" / name),)


def environment(build: Path) -> dict[str, str]:
    """Of a part: the checkout's sources, a cache of its own, no network."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PAGED_CACHE": str(build / CACHE),
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }


def run_part(part: Part, limit_s: float, variables: dict[str, str], logs: Path) -> dict[str, Any]:
    """Run one part; its outcome, time, the end of what it printed (all of it in `logs`) and what it wrote."""
    if part.writes is not None:
        part.writes.unlink(missing_ok=True)
    log = logs / f"{part.name}.log"
    started = time.monotonic()
    # A file: a process that outlives its part would hold a pipe open.
    with log.open("w") as said, subprocess.Popen(
        [sys.executable, *part.arguments], cwd=ROOT, env=variables, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            code = process.wait(limit_s)
            outcome = "passed" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            outcome = f"over {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own children, too: they hold the GPU
    return {
        "name": part.name,
        "outcome": outcome,
        "seconds": round(time.monotonic() - started, 1),
        "output": log.read_text(errors="replace")[-TAIL_CHARACTERS:],
        "data": _read(part.writes),
    }


def _read(path: Path | None) -> Any:
    """JSON that a part left, or None; what was cut off in the middle is none."""
    if path is None or not path.is_file():
        return None
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError:
        return None


def run_all(
    chosen: Sequence[Part], total_s: float, variables: dict[str, str], logs: Path
) -> list[dict[str, Any]]:
    """Part after part until the time is up."""
    end = time.monotonic() + total_s
    results = []
    for part in chosen:
        left = end - time.monotonic()
        if left < LEAST_S:
            result = {
                "name": part.name,
                "outcome": "left out: no time",
                "seconds": 0.0,
                "output": "",
                "data": None,
            }
        else:
            result = run_part(part, min(part.limit_s, left), variables, logs)
        print(f"{result['name']:14} {result['outcome']:20} {result['seconds']:7.1f} s", flush=True)
        results.append(result)
    return results


def device() -> dict[str, Any]:
    """What the GPU and the software are, or under "missing" why there is nothing to check on.

    Asked in a process of its own: this one must not hold memory of the GPU beside the parts.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DEVICE],
            capture_output=True,
            text=True,
            timeout=DEVICE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"missing": f"torch gives no answer about CUDA devices in {DEVICE_LIMIT_S} s"}
    if done.returncode != 0:
        return {"missing": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Run all parts, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Check paged on this machine's GPU.")
    parser.add_argument("--json", type=Path, default=ROOT / "build/gpu-check/report.json")
    parser.add_argument("--only", nargs="+", metavar="PART", help="names of parts")
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="for all of it")
    arguments = parser.parse_args(words)
    build = arguments.json.resolve().parent
    build.mkdir(parents=True, exist_ok=True)
    found = device()
    if "missing" in found:
        arguments.json.write_text(json.dumps({"device": found, "parts": []}, indent=1) + "\n")
        print(f"gpu-check: nothing can be checked with {sys.executable}: {found['missing']}", file=sys.stderr)
        return 2
    known = parts(build, int(found["capability"].replace(".", "")))
    chosen = [part for part in known if arguments.only is None or part.name in arguments.only]
    if not chosen or (arguments.only and len(chosen) < len(set(arguments.only))):
        parser.error(f"--only {' '.join(arguments.only)}: choose of {' '.join(part.name for part in known)}")
    results = run_all(chosen, arguments.seconds, environment(build), build)
    arguments.json.write_text(json.dumps({"device": found, "parts": results}, indent=1) + "\n")
    table = gpu_table.markdown(found, results)
    arguments.json.with_suffix(".md").write_text(table)
    print(table)
    for result in results:
        if result["outcome"] != "passed":
            print(f"---- {result['name']}: {result['outcome']}\n{result['output']}")
    return 0 if all(result["outcome"] == "passed" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
