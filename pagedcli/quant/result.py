"""What a run of `paged quantize` gives back. Standard library and this package's plain values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pagedcli.quant.quality import Quality


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """A finished run.

    Attributes:
        folder: That was written.
        quality: Its report.
        missed: By how much the quality asked for was missed, a text each; empty: it was met, or none was asked for.
    """

    folder: Path
    quality: Quality
    missed: tuple[str, ...]
