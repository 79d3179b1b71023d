"""The lists of requests of `make bench-cpu`: those of ../shared/peers where that folder is there, else drawn alike.

May import `workloads`. Token ids are drawn from 1000 to 29,999, ordinary tokens of every model here. A run shifts all
ids by its number, so that no run finds another's prefixes; what requests of one run share stays shared.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagedcli.workloads.requests import WorkloadRequest

LOWEST, NUM_IDS = 1000, 29_000
_SHIFT = 7919


@dataclass(frozen=True, slots=True)
class CpuWorkload:
    """A list of requests.

    Attributes:
        name: As in workloads.json of the peers.
        title: For people.
        requests: All arrive together.
        counts: What its rate counts: "output", "prompt" or "total" tokens.
    """

    name: str
    title: str
    requests: tuple[WorkloadRequest, ...]
    counts: str

    def counted_tokens(self) -> int:
        """Tokens that the rate counts."""
        prompt = sum(len(request.prompt_token_ids) for request in self.requests)
        output = sum(request.output_tokens for request in self.requests)
        return {"output": output, "prompt": prompt, "total": prompt + output}[self.counts]

    def shifted(self, run: int) -> tuple[WorkloadRequest, ...]:
        """The requests of one run."""
        return tuple(
            WorkloadRequest(
                request.id,
                tuple(
                    LOWEST + (token - LOWEST + run * _SHIFT) % NUM_IDS for token in request.prompt_token_ids
                ),
                request.output_tokens,
                request.max_tokens,
            )
            for request in self.requests
        )


TITLES = {
    "decode": ("one stream, decode (prompt 32, 128 new)", "output"),
    "prefill512": ("prefill of 512 tokens", "prompt"),
    "batch64": ("64 mixed requests, prompt + output", "total"),
    "prefix32": ("32 requests sharing 512 tokens, prompt + output", "total"),
}


def cpu_workloads(peers: Path | None) -> tuple[CpuWorkload, ...]:
    """The four workloads.

    Args:
        peers: Folder with a workloads.json, or None.
    """
    drawn = _read(peers / "workloads.json") if peers is not None else _draw()
    return tuple(CpuWorkload(name, title, drawn[name], counts) for name, (title, counts) in TITLES.items())


def long_context(num_tokens: int, new_tokens: int) -> CpuWorkload:
    """One stream that begins with a long prompt."""
    draw = random.Random(num_tokens)
    requests = (_request("long", _ids(draw, num_tokens), new_tokens),)
    return CpuWorkload(f"context{num_tokens}", f"one stream at {num_tokens:,} tokens", requests, "output")


def _request(name: str, prompt: Sequence[int], new: int) -> WorkloadRequest:
    return WorkloadRequest(name, tuple(prompt), new, new)


def _read(file: Path) -> dict[str, tuple[WorkloadRequest, ...]]:
    stored = json.loads(file.read_text())
    return {
        name: tuple(
            _request(f"{name}-{i}", r["prompt"], r["new"]) for i, r in enumerate(stored[name]["requests"])
        )
        for name in TITLES
    }


def _ids(draw: random.Random, count: int) -> list[int]:
    return [LOWEST + draw.randrange(NUM_IDS) for _ in range(count)]


def _draw() -> dict[str, tuple[WorkloadRequest, ...]]:
    """Of the same lengths as the peers' lists: prompts of 32 to 256, outputs of 16 to 256 with more short ones."""
    draw = random.Random(1234)
    mixed = []
    for index in range(64):
        prompt = min(draw.randint(32, 256), draw.randint(32, 320))
        output = min(draw.randint(16, 256), draw.randint(16, 256))
        mixed.append(_request(f"batch64-{index}", _ids(draw, prompt), output))
    prefix = _ids(draw, 512)
    return {
        "decode": (_request("decode-0", _ids(draw, 32), 128),),
        "prefill512": (_request("prefill512-0", _ids(draw, 512), 1),),
        "batch64": tuple(mixed),
        "prefix32": tuple(_request(f"prefix32-{i}", prefix + _ids(draw, 32), 64) for i in range(32)),
    }
