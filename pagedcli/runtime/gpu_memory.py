"""What takes a GPU's memory, and what is left for KV pages. May import torch, `errors`.

    |  others  | weights | buffers | largest step | graphs |        KV pool        |  1 - utilization  |
    0                                                                                              total

Everything but the pool is measured: a worker with a small pool carries out the largest step that the settings allow and
records its decode steps (`profile.measure`). `cuda` is `torch.cuda`, or what stands in for it in a test.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch

from pagedcli.config_file import show_bytes
from pagedcli.errors import ConfigError

_ASKED = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)
UTILIZATION = 0.9
"""Part of a GPU's memory that is ours if nobody says."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Bytes of a GPU.

    Attributes:
        device: "cuda:0" ...
        total: Of the GPU.
        others: Taken by other processes, and by CUDA itself.
        weights: Of the model.
        buffers: Token store, block tables, logits: whatever a worker holds beside its pool, and what libraries keep.
        step: Peak of the largest step beyond all of these.
        graphs: Taken by the graphs of decode steps.
    """

    device: str
    total: int
    others: int
    weights: int
    buffers: int
    step: int
    graphs: int

    @property
    def fixed(self) -> int:
        """All but the pool."""
        return self.others + self.weights + self.buffers + self.step + self.graphs

    def shares(self) -> str:
        """The parts of `fixed`, for people."""
        parts = {
            "weights": self.weights,
            "buffers": self.buffers,
            "the largest step": self.step,
            "CUDA graphs": self.graphs,
            "others": self.others,
        }
        return ", ".join(f"{name} {show_bytes(count)}" for name, count in parts.items())

    def kv_budget(self, utilization: float, page_bytes: int) -> int:
        """Bytes for the pool.

        Args:
            utilization: Part of the GPU's memory that is ours, above 0, at most 1.
            page_bytes: Of one page, all layers.

        Raises:
            ConfigError: Not even one page fits.
        """
        budget = int(self.total * utilization) - self.fixed
        if budget >= page_bytes:
            return budget
        raise ConfigError(
            f"no page of KV ({show_bytes(page_bytes)}) fits on {self.device}: {utilization:g} of "
            f"{show_bytes(self.total)} may be used, and {show_bytes(self.fixed)} are taken ({self.shares()}): "
            + self._remedy(page_bytes)
        )

    def _remedy(self, page_bytes: int) -> str:
        needed = math.ceil((self.fixed + page_bytes) / self.total * 100) / 100
        if needed <= 1:
            return f"--gpu-memory-utilization {needed:g}"
        return "lower --max-num-batched-tokens, --max-num-seqs or --max-model-len, or take a smaller model"


def out_of_memory(
    device: torch.device, when: str, remedy: str, error: Exception, cuda: Any = torch.cuda
) -> ConfigError:
    """What to raise where a GPU has no more memory: torch's own message is a paragraph.

    Args:
        device: Whose memory.
        when: What was being done: "in a step of 3 tokens".
        remedy: The smallest change that would help.
        error: Torch's.
        cuda: See the module.
    """
    asked = _ASKED.search(str(error))
    parts = [f"asking for {asked[1]}"] if asked else []
    if device.type == "cuda":
        free, total = cuda.mem_get_info(device)
        ours = cuda.memory_reserved(device)
        parts.append(f"of {show_bytes(total)}, {show_bytes(ours)} are ours and {show_bytes(free)} free")
    numbers = f" ({'; '.join(parts)})" if parts else ""
    return ConfigError(f"{device} ran out of memory {when}{numbers}: {remedy}")
