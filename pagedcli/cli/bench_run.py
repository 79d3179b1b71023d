"""What `paged bench` does without a subcommand: measure offline, once or in a sweep. May import all below `cli`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagedcli.config_file import Value


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Flags of `paged bench` that are no settings; see `bench.bench`."""

    workload: str | None = None
    requests: int | None = None
    repeats: int | None = None
    seconds: float | None = None
    seed: int | None = None
    json_file: str | None = None
    markdown_file: str | None = None
    html_file: str | None = None
    verbose: bool = False
    quiet: bool = False


def run_bench(
    options: BenchOptions,
    flags: Mapping[str, Value],
    *,
    assignments: Sequence[str],
    config_file: str | None,
) -> int:
    """Run the command; its exit code."""
    return 0
