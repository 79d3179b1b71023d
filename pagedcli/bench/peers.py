"""Runs other engines on the same lists of requests, where they are installed. Standard library only.

A folder like ../shared/peers holds a script for each; the environment variables VENVS and MODELS name the folders with
their virtual environments and converted models (see its setup.md), LLAMA_CB llama.cpp's loop. What is not there is left
out. Every script runs as a process of its own with the same number of threads and prints a JSON line a workload.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 1200


@dataclass(frozen=True, slots=True)
class Peer:
    """How to run one engine on SmolLM2 in bfloat16.

    Attributes:
        name: For the table.
        script: In the peers' folder.
        python: Interpreter, below VENVS; "" for this one.
        model: Below MODELS.
        options: Further arguments.
        needs: Environment variable that must name a file or folder, or "".
    """

    name: str
    script: str
    python: str
    model: str
    options: tuple[str, ...]
    needs: str = ""


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
    return tuple(peer for peer in PEERS if (folder / peer.script).is_file() and _is_there(peer))


def _is_there(peer: Peer) -> bool:
    needs = ("MODELS", *(("VENVS",) if peer.python else ()), *((peer.needs,) if peer.needs else ()))
    if not all(os.environ.get(name) for name in needs):
        return False
    return Path(_python(peer)).exists() and (Path(os.environ["MODELS"]) / peer.model).exists()


def _python(peer: Peer) -> str:
    return str(Path(os.environ["VENVS"]) / peer.python) if peer.python else sys.executable


def run_peer(peer: Peer, folder: Path, workloads: Mapping[str, str], threads: int) -> dict[str, float]:
    """Tokens per second by workload, from one run of each after a warm-up; empty if the peer fails.

    Args:
        peer: Which.
        folder: Of the scripts.
        workloads: Name of each workload and what its rate counts.
        threads: Compute threads.
    """
    command: Sequence[str] = (
        _python(peer), peer.script, "--model", str(Path(os.environ["MODELS"]) / peer.model),
        "--label", "bf16", "--workload", ",".join(workloads), "--runs", "1", "--threads", str(threads), *peer.options,
    )  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        env={**os.environ, "CPU_LOCK_HELD": "1"},
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {
        line["workload"]: float(line[RATES[workloads[line["workload"]]]])
        for line in lines
        if "error" not in line
    }
