"""Runs other engines on the same lists of requests, where they are installed. Standard library only.

A folder like ../shared/peers holds a script for each; the environment variables VENVS and MODELS name the folders with
their virtual environments and converted models (see its setup.md), LLAMA_CB llama.cpp's loop. What is not there is left
out. Every script runs as a process of its own with the same number of threads and prints a JSON line a workload. Each
workload has a time of its own: what takes longer is ended, and the engine begins anew with the workload after it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

MOST_RUNS = 3
"""Of one workload by a peer, unless others are asked for."""


@dataclass(frozen=True, slots=True)
class Peer:
    """How to run one engine on SmolLM2, in bfloat16 unless its label says otherwise.

    Attributes:
        name: For the table.
        script: In the peers' folder.
        python: Interpreter, below VENVS; "" for this one.
        model: Below MODELS.
        options: Further arguments.
        needs: Environment variable that must name a file or folder, or "".
        label: Of its weights.
    """

    name: str
    script: str
    python: str
    model: str
    options: tuple[str, ...]
    needs: str = ""
    label: str = "bf16"


PEERS = (
    Peer(
        "llama.cpp", "peer_llamacb.py", "", "gguf/smollm2-135m-bf16.gguf",
        ("--unified", "1", "--ctx", "32768"), "LLAMA_CB",
    ),
    Peer("vLLM", "peer_vllm.py", "vllm/bin/python", "hf/smollm2-135m", ()),
    Peer("OpenVINO", "peer_openvino.py", "ov/bin/python", "ov/smollm2-135m-fp16", ("--precision", "bf16")),
)  # fmt: skip

RATES = {"output": "out_tok_s", "prompt": "prefill_tok_s", "total": "total_tok_s"}


def installed_peers(folder: Path | None) -> tuple[Peer, ...]:
    """Those that can be run here."""
    if folder is None:
        return ()
    return tuple(peer for peer in PEERS if (folder / peer.script).is_file() and is_installed(peer))


def is_installed(peer: Peer) -> bool:
    """Whether its environment and its model are there; its script may not be."""
    needs = ("MODELS", *(("VENVS",) if peer.python else ()), *((peer.needs,) if peer.needs else ()))
    if not all(os.environ.get(name) for name in needs):
        return False
    return Path(_python(peer)).exists() and (Path(os.environ["MODELS"]) / peer.model).exists()


def _python(peer: Peer) -> str:
    return str(Path(os.environ["VENVS"]) / peer.python) if peer.python else sys.executable


@dataclass(frozen=True, slots=True)
class PeerBudget:
    """Seconds that a peer may take.

    Attributes:
        load_s: To load, once a process.
        workload_s: For a workload: its warm-up and its runs.
        runs: Of a workload at most, as long as they fit into a quarter of its time.
    """

    load_s: float = 300.0
    workload_s: float = 120.0
    runs: int = MOST_RUNS


@dataclass(frozen=True, slots=True)
class PeerResult:
    """What one engine did with one workload; exactly one of the first three is set.

    Attributes:
        tokens_per_s: Median of its runs, of what the workload's rate counts.
        over_s: It was ended after so many seconds.
        error: It failed, with its message.
        load_s: What its script says that loading took.
        others_cpu: Part of the machine that other processes had meanwhile.
        version: Of the engine.
    """

    tokens_per_s: float | None = None
    over_s: float | None = None
    error: str | None = None
    load_s: float | None = None
    others_cpu: float | None = None
    version: str = ""

    def __str__(self) -> str:
        """For a table."""
        if self.tokens_per_s is not None:
            return f"{self.tokens_per_s:,.1f}"
        return "failed" if self.over_s is None else f"over {self.over_s:,.0f} s"


def run_peer(
    peer: Peer, folder: Path, workloads: Mapping[str, str], threads: int, budget: PeerBudget
) -> dict[str, PeerResult]:
    """Each workload by name, in their order.

    Args:
        peer: Which.
        folder: Of the scripts.
        workloads: Name of each workload and what its rate counts.
        threads: Compute threads.
        budget: Seconds that it may take.
    """
    results: dict[str, PeerResult] = {}
    while waiting := [name for name in workloads if name not in results]:
        results.update(
            _run_process(peer, folder, {name: workloads[name] for name in waiting}, threads, budget)
        )
    return results


def _run_process(
    peer: Peer, folder: Path, workloads: Mapping[str, str], threads: int, budget: PeerBudget
) -> dict[str, PeerResult]:
    """One process, until it has done all, fails, or takes too long; at least the first workload has a result."""
    results: dict[str, PeerResult] = {}
    command = _command(peer, workloads, threads, budget)
    with _lines(command, folder) as (lines, failure):
        deadline = time.monotonic() + budget.load_s + budget.workload_s
        for name, counts in workloads.items():
            try:
                line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                allowed = budget.workload_s + (0.0 if results else budget.load_s)
                return {**results, name: PeerResult(over_s=allowed)}
            if line is None:
                message = failure()
                return {
                    **results,
                    **{left: PeerResult(error=message) for left in workloads if left not in results},
                }
            results[name] = _result(line, counts)
            deadline = time.monotonic() + budget.workload_s
    return results


def _command(peer: Peer, workloads: Mapping[str, str], threads: int, budget: PeerBudget) -> Sequence[str]:
    return (
        _python(peer), peer.script, "--model", str(Path(os.environ["MODELS"]) / peer.model), "--label", peer.label,
        "--workload", ",".join(workloads), "--runs", str(budget.runs), "--budget", f"{budget.workload_s / 4:g}",
        "--threads", str(threads), *peer.options,
    )  # fmt: skip


def _result(line: dict[str, Any], counts: str) -> PeerResult:
    about = {"load_s": line.get("load_s"), "version": line.get("version", "")}
    if "error" in line:
        return PeerResult(error=str(line["error"]), **about)
    return PeerResult(tokens_per_s=float(line[RATES[counts]]), others_cpu=line.get("others_cpu"), **about)


@contextmanager
def _lines(command: Sequence[str], folder: Path) -> Iterator[tuple[queue.Queue[dict[str, Any] | None], Any]]:
    """The JSON lines of a process as they come, then None; and what to call for the reason of its end.

    Leaving the block ends the process and all that it started.
    """
    found: queue.Queue[dict[str, Any] | None] = queue.Queue()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
            env={**os.environ, "CPU_LOCK_HELD": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        assert process.stdout is not None
        reader = threading.Thread(target=_read, args=(process.stdout, found), daemon=True)
        reader.start()

        def failure() -> str:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
            return f"exit code {process.wait()}: {said[-1] if said else 'no message'}"[:300]

        try:
            yield found, failure
        finally:
            _end(process)
            reader.join()
            process.stdout.close()


def _read(stream: IO[str], found: queue.Queue[dict[str, Any] | None]) -> None:
    for line in stream:
        if line.startswith("{"):
            found.put(json.loads(line))
    found.put(None)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the process and its children: it leads a session of its own."""
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
