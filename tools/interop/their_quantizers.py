"""Other packages' quantizers on the samples that ours get, each in its own environment; what they make is kept.

A run is a name such as "auto-gptq-gptq-sym" with a seed: WORK/NAME-SEED is the folder that the package wrote,
WORK/NAME-SEED.json what was said of it (version, seconds). A run that has both is not run again.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments import ROOT, python_of, their_environment


@dataclass(frozen=True)
class Run:
    """One package with its settings.

    Attributes:
        package: Whose environment it takes.
        how: What peer_quantize.py calls it; None: the package is run by its script of `paged quantize --backend`.
        options: Of the task.
    """

    package: str
    how: str | None
    options: dict[str, Any] = field(default_factory=dict)


def _settings(sym: bool, desc_act: bool = False) -> dict[str, Any]:
    return {"bits": 4, "sym": sym, "desc_act": desc_act, "damp": 0.01}


SYM, ASYM, ORDERED = _settings(True), _settings(False), _settings(True, desc_act=True)
RUNS = {
    "autoawq-awq-asym": Run("autoawq", None, ASYM),
    "llm-compressor-awq-asym": Run("llm-compressor", "llm-compressor-awq", ASYM),
    "gptqmodel-awq-asym": Run("gptqmodel", "gptqmodel-awq", ASYM),
    "auto-gptq-gptq-sym": Run("auto-gptq", None, SYM),
    "auto-gptq-gptq-sym-desc-act": Run("auto-gptq", None, ORDERED),
    "gptqmodel-gptq-sym": Run("gptqmodel", "gptqmodel-gptq", SYM),
    "gptqmodel-gptq-sym-desc-act": Run("gptqmodel", "gptqmodel-gptq", ORDERED),
    "gptqmodel-gptq-asym": Run("gptqmodel", "gptqmodel-gptq", ASYM),
    "llm-compressor-gptq-sym": Run("llm-compressor", "llm-compressor-gptq", SYM),
    "llm-compressor-gptq-asym": Run("llm-compressor", "llm-compressor-gptq", ASYM),
    "auto-round-sym": Run(
        "auto-round", "auto-round", SYM | {"iters": 50, "batch_size": 4}
    ),  # 200 of 8 take hours
}


def run_quantizer(
    name: str, source: Path, samples: list[list[int]], group_size: int, seed: int, threads: int, work: Path
) -> tuple[Path, dict[str, Any]]:
    """The folder that a package makes, and what there is to say of it.

    Args:
        name: Of `RUNS`.
        source: Folder of the original.
        samples: Token ids.
        group_size: Of the codes.
        seed: That chose the samples.
        threads: Of the package.
        work: Where everything is kept.

    Raises:
        RuntimeError: The package failed; its log is named.
    """
    work = work.resolve()
    folder, record = work / f"{name}-{seed}", work / f"{name}-{seed}.json"
    if record.is_file() and folder.is_dir():
        return folder, json.loads(record.read_text(encoding="utf-8"))
    shutil.rmtree(folder, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    task = {
        "source": str(source.resolve()),
        "output": str(folder),
        "group_size": group_size,
        "threads": threads,
    }
    task |= {"samples": samples, **RUNS[name].options}
    said = _process(name, task, work / f"{name}-{seed}", threads)
    record.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    return folder, said


def _process(name: str, task: dict[str, Any], stem: Path, threads: int) -> dict[str, Any]:
    """Run the package; its last word, with the whole process's seconds beside it."""
    run, task_file, log = RUNS[name], Path(f"{stem}.task"), Path(f"{stem}.log")
    task_file.write_text(json.dumps(task), encoding="utf-8")
    scripts = ROOT / "pagedcli" / "quant" / "backends" / "scripts"
    script = [str(ROOT / "tools" / "interop" / "peer_quantize.py"), run.how]
    if run.how is None:
        script = [str(scripts / f"run_{run.package.replace('-', '_')}.py")]
    command = [python_of(run.package), *(part for part in script if part), str(task_file)]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with log.open("w", encoding="utf-8") as out:
        code = subprocess.run(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=their_environment(threads),
            cwd=log.parent,  # some leave logs where they are
            check=False,
        ).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if code != 0:
        raise RuntimeError(f"{name} failed with exit code {code}: see {log}")
    said: dict[str, Any] = {}
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("{") and '"version"' in line:
            said = json.loads(line)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        **said,
        "process_seconds": round(time.perf_counter() - start, 1),
        "process_cpu_seconds": round(used, 1),
    }
