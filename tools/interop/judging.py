"""The interop table: a package reads a folder in its own environment, and what it made of it is judged and kept."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from environments import ROOT, python_of, their_environment

sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from tests.quant_logits import IDS, reference_logits  # noqa: E402

TIMEOUT_S = 900
EPSILON = 1e-6
"""Codes that are equal give weights that are equal but for the order of two products."""
VERSION = "version: "
_LOGGED = re.compile(r"^\((?:\w+ )+pid=\d+\)\s*(?:ERROR [^\]]*\]\s*)?")
_RAISED = re.compile(r"^\s*(?:[\w.]*(?:Error|Exception): |Value error, )(.+?)(?: \[type=.*)?$")
_POINTS_ELSEWHERE = ("validation error for", "See root cause", "See stack trace")
_LONGEST = 160


def try_package(
    package: str,
    folder: Path,
    out: Path,
    meant: dict[str, np.ndarray],
    reading: Reading | None = None,
    timeout_s: int = TIMEOUT_S,
) -> tuple[str, str]:
    """(version, outcome) of one package on one folder.

    Args:
        package: Of peer.py.
        folder: That paged wrote.
        out: File for what the package finds.
        meant: The weights that the folder means, by name.
        reading: Tokens and limits; None: those for a small random model.
        timeout_s: For the package.
    """
    reading = reading or Reading()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    python = python_of(package, config.pop("quantization_config")["quant_method"])
    command = [
        python,
        str(ROOT / "tools" / "interop" / "peer.py"),
        package,
        str(folder.resolve()),
        str(out.resolve()),
        json.dumps(reading.ids),
    ]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=their_environment(1),
        cwd=out.parent,  # some leave logs where they are
        check=False,
    )
    if not out.exists():
        lines = run.stdout.splitlines()
        said = [line.removeprefix(VERSION) for line in lines if line.startswith(VERSION)]
        return (said or [package])[0], f"refused: {refusal(run.stderr + run.stdout, run.returncode)}"
    found = dict(np.load(out))
    return str(found.pop("version")), judge(found, config, meant, reading)


def refusal(said: str, code: int) -> str:
    """Why a package gave up: the first exception of its first traceback, which those that follow are caused by.

    Args:
        said: Everything that it printed.
        code: Its exit code, for one that dies without a word.
    """
    _, found, rest = said.partition("Traceback (most recent call last)")
    lines = [_LOGGED.sub("", line) for line in (rest if found else said).splitlines()]
    raised = [match[1].strip() for match in map(_RAISED.match, lines) if match]
    told = [text for text in raised if not any(words in text for words in _POINTS_ELSEWHERE)]
    if not told:
        return f"exit code {code}"
    reasons = [after for line, after in itertools.pairwise(lines) if line.rstrip().endswith(told[0])]
    return (f"{told[0]} {reasons[0].strip()}" if told[0].endswith(":") and reasons else told[0])[:_LONGEST]


@dataclass(frozen=True)
class Limits:
    """How far a reader may be off before it is called wrong.

    Attributes:
        logits: Largest difference, as a part of the largest logit.
        nats: Largest difference of a token's log-probability.
        said: What they are, after the figure.
    """

    logits: float = 4e-2  # two layers in bfloat16 are off by up to 2%; a wrong code or zero point by tens
    nats: float = 0.1
    said: str = ""


@dataclass(frozen=True)
class Reading:
    """What a reader is asked: tokens, and how far it may be off.

    Attributes:
        ids: Token ids of one prompt.
        limits: Of it; None: `rounding_limits`, of the model itself.
    """

    ids: tuple[int, ...] = tuple(IDS)
    limits: Limits | None = Limits()


def judge(
    found: dict[str, np.ndarray], config: dict[str, Any], meant: dict[str, np.ndarray], reading: Reading
) -> str:
    """Whether what was found is "equal", "close" or "WRONG", with the worst difference."""
    if "logits" not in found and "logprobs" not in found:
        wanted = {name for name in meant if name.endswith("_proj.weight")} & set(found)
        worst = max(
            float(np.abs(found[name] - meant[name]).max() / np.abs(meant[name]).max()) for name in wanted
        )
        return (
            "equal" if worst < EPSILON else f"close ({worst:.1e})" if worst < 2e-3 else f"WRONG ({worst:.1e})"
        )
    ids = list(reading.ids)
    logits = reference_logits(config, meant, ids)
    limits = reading.limits or rounding_limits(logits, reference_logits(config, meant, ids, "bfloat16"), ids)
    if "logits" in found:
        worst = _logits_apart(found["logits"], logits)
        return f"{_verdict(worst, limits.logits)} ({worst:.1e}{limits.said})"
    worst = float(np.abs(found["logprobs"] - log_probabilities(logits, ids)).max())
    return f"{_verdict(worst, limits.nats)} ({worst:.1e} nats{limits.said})"


def rounding_limits(logits: np.ndarray, rounded: np.ndarray, ids: list[int]) -> Limits:
    """Four times what bfloat16 alone does to this very model, eight for log-probabilities.

    Engines round in other places; vLLM rounds inputs to int8, too. In SmolLM2 one step of all zero points of a layer
    is 14 and 60 times that.

    Args:
        logits: [tokens, vocab] in float32.
        rounded: The same weights in bfloat16.
        ids: The tokens.
    """
    own = _logits_apart(rounded, logits)
    nats = float(np.abs(log_probabilities(rounded, ids) - log_probabilities(logits, ids)).max())
    return Limits(4 * own, 8 * nats, f"; plain bfloat16 {own:.1e}, {nats:.1e} nats")


def log_probabilities(logits: np.ndarray, ids: list[int]) -> np.ndarray:
    """Of every token but the first, [tokens - 1], from logits [tokens, vocab]."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    picked: np.ndarray = logprobs[np.arange(len(ids) - 1), ids[1:]]
    return picked


def _logits_apart(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def _verdict(worst: float, limit: float) -> str:
    return "close" if worst < limit else "WRONG"


class Cells:
    """The table in its file, written as each cell is known.

    Args:
        file: JSON, a list of {"reader", "read", "outcome"}.
        resume: Cells that it has are not tried again.
    """

    def __init__(self, file: Path, resume: bool) -> None:
        self._file = file
        kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
        self._outcomes: dict[tuple[str, str], dict[str, str]] = {(c["reader"], c["read"]): c for c in kept}
        self._known = set(self._outcomes) if resume else set()

    def fill(self, reader: str, read: str, attempt: Callable[[], tuple[str, str]]) -> None:
        """Try a cell, unless it is to be kept; print and keep its outcome.

        Args:
            reader: A package.
            read: What it reads.
            attempt: (version, outcome).
        """
        if (reader, read) not in self._known:
            version, outcome = attempt()
            self._outcomes[reader, read] = {
                "reader": reader,
                "read": read,
                "version": version,
                "outcome": outcome,
            }
            self._file.parent.mkdir(parents=True, exist_ok=True)
            found = [self._outcomes[cell] for cell in sorted(self._outcomes)]
            self._file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        cell = self._outcomes[reader, read]
        print(f"{cell['version']:28} {read:44} {cell['outcome']}", flush=True)

    def wrong(self, known: Collection[tuple[str, str]] = ()) -> bool:
        """Whether any cell is, but those (reader, read) of which it is known."""
        return any("WRONG" in found["outcome"] for cell, found in self._outcomes.items() if cell not in known)
