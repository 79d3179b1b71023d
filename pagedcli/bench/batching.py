"""What paging and continuous batching bring: the same requests, the same memory, six ways to run them.

    python -m pagedcli.bench.batching [--json FILE]        (or: make bench)

{contiguous, first-fit, paged} x {static, continuous} over one model, loaded once. Contiguous reserves the longest
sequence for each request, first-fit reserves prompt + max_tokens; static batching starts a batch only when the last one
has ended. A finished request of a static batch keeps its memory but is computed no more, which favours the baseline.
Every mode must give the same token ids. Figures stand beside the limits of the machine, measured in the same run.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pagedcli.api.backend import Backend, load_backend, make_executor
from pagedcli.api.resolve import choose_run
from pagedcli.bench.limits import MachineLimits, measure_limits
from pagedcli.bench.offline import OfflineRun, run_offline
from pagedcli.checkpoint.sources import open_checkpoint, resolve_model
from pagedcli.config import (
    AllocationName,
    BatchingName,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from pagedcli.core.allocation import make_kv
from pagedcli.core.scheduler import Scheduler
from pagedcli.errors import PagedError
from pagedcli.models.spec import ModelSpec
from pagedcli.ops.select import has_cuda
from pagedcli.runtime.executors import Launches
from pagedcli.runtime.threads import compute_threads
from pagedcli.workloads.requests import WorkloadRequest, mixed_lengths


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run the workload."""

    allocation: AllocationName
    batching: BatchingName

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.allocation}, {self.batching}"


MODES = tuple(
    Mode(allocation, batching)
    for allocation in ("contiguous", "first-fit", "paged")
    for batching in ("static", "continuous")
)


@dataclass(frozen=True, slots=True)
class ModeResult:
    """Medians over the repeats of a mode; gauges are those of its first run, being the same in each.

    Attributes:
        mode: Which.
        seconds: Median.
        output_tokens_per_s: Of the median.
        total_tokens_per_s: Of the median, prompts counted.
        ttft_mean_s: Mean time to the first token.
        peak_running: Concurrency reached.
        kv_use: Over the busiest half of the run.
        external_fragmentation: Over the busiest half of the run.
        num_steps: Forward passes.
        preemptions: Requests that lost their blocks.
        limit_share: Least time that this machine needs for the same steps over the time taken.
        outputs_equal: Whether every output is that of the first mode, id for id.
    """

    mode: str
    seconds: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_mean_s: float
    peak_running: int
    kv_use: float
    external_fragmentation: float
    num_steps: int
    preemptions: int
    limit_share: float
    outputs_equal: bool


def least_seconds(run: OfflineRun, spec: ModelSpec, limits: MachineLimits, weight_bytes: int) -> float:
    """The machine's bound for the steps of a run: weights read once a step, or matrix products at the peak rate.

    Counts the weights of all layers for every position and the head for every output; attention is left out.
    """
    body = weight_bytes / (2 if limits.dtype == "bfloat16" else 4) - spec.vocab_size * spec.hidden_size
    head = spec.vocab_size * spec.hidden_size
    flops = 2 * (body * run.computed_tokens + head * run.num_output_tokens)
    reading = run.num_steps * weight_bytes / limits.read_bytes_per_s
    return max(flops / limits.flops_per_s, reading)


class Bench:
    """A model loaded once, and the settings that all modes share."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        checkpoint = open_checkpoint(resolve_model(config.model.model))
        self.spec = ModelSpec.from_config(checkpoint.config, f"{checkpoint.path}: config")
        self.choice = choose_run(config, self.spec, has_cuda=has_cuda(), cores=compute_threads())
        self.backend: Backend = load_backend(checkpoint, self.choice)

    def run(self, mode: Mode, workload: list[WorkloadRequest]) -> OfflineRun:
        """One run on a pool of its own."""
        cache = dataclasses.replace(self.config.cache, allocation=mode.allocation)
        scheduler_config = dataclasses.replace(self.config.scheduler, batching=mode.batching)
        assert cache.num_pages is not None
        kv = make_kv(cache, cache.num_pages, self.choice.model_len)
        scheduler = Scheduler(
            scheduler_config, kv, max_model_len=self.choice.model_len, watermark=cache.watermark
        )
        worker = self._worker(cache, scheduler_config)
        executor = make_executor(worker, self.choice.depth)
        try:
            return run_offline(scheduler, executor, workload, depth=self.choice.depth)
        finally:
            executor.close()

    def _worker(self, cache: CacheConfig, scheduler: SchedulerConfig) -> Launches:
        assert cache.num_pages is not None
        return self.backend.worker(
            num_blocks=cache.num_pages,
            block_size=cache.page_size,
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=self.choice.model_len,
        )


def summarize(mode: Mode, runs: list[OfflineRun], first: OfflineRun, least_s: float) -> ModeResult:
    """Medians of a mode's repeats; `first` is the run that all outputs are compared with."""
    seconds = statistics.median(run.seconds for run in runs)
    run = runs[0]
    return ModeResult(
        mode=mode.name,
        seconds=seconds,
        output_tokens_per_s=run.num_output_tokens / seconds,
        total_tokens_per_s=(run.num_prompt_tokens + run.num_output_tokens) / seconds,
        ttft_mean_s=statistics.median(statistics.fmean(run.first_token_s) for run in runs),
        peak_running=run.peak_running,
        kv_use=run.kv_use(),
        external_fragmentation=run.external_fragmentation(),
        num_steps=run.num_steps,
        preemptions=run.preemptions,
        limit_share=least_s / seconds,
        outputs_equal=all(other.outputs == first.outputs for other in runs),
    )


def compare(
    bench: Bench, workload: list[WorkloadRequest], limits: MachineLimits, repeats: int
) -> Iterator[ModeResult]:
    """Run all modes in turn, `repeats` times over, and give their results once the last round has ended."""
    bench.run(MODES[-1], workload[:4])  # warm-up: allocations, first touch of the weights
    runs: dict[Mode, list[OfflineRun]] = {mode: [] for mode in MODES}
    for _ in range(repeats):
        for mode in MODES:
            runs[mode].append(bench.run(mode, workload))
    first = runs[MODES[0]][0]
    for mode, of_mode in runs.items():
        least_s = least_seconds(of_mode[0], bench.spec, limits, bench.backend.weight_bytes)
        yield summarize(mode, of_mode, first, least_s)


def table(results: list[ModeResult]) -> Table:
    """The results for people: a column for each mode, so that 80 characters are enough for all figures."""
    shown = Table(
        title="The same requests in the same memory",
        caption="KV use: tokens stored / slots allocated, busiest half",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    shown.add_column("", no_wrap=True)
    for r in results:
        shown.add_column(r.mode.replace(", ", "\n"), justify="right", no_wrap=True)
    for name, figures in _FIGURES.items():
        shown.add_row(name, *(figures(result) for result in results))
    return shown


_FIGURES: dict[str, Callable[[ModeResult], str]] = {
    "seconds": lambda r: f"{r.seconds:.1f}",
    "output tok/s": lambda r: f"{r.output_tokens_per_s:.1f}",
    "all tok/s": lambda r: f"{r.total_tokens_per_s:.1f}",
    "TTFT s": lambda r: f"{r.ttft_mean_s:.1f}",
    "at once": lambda r: str(r.peak_running),
    "KV use": lambda r: f"{r.kv_use:.1%}",
    "ext. frag.": lambda r: f"{r.external_fragmentation:.0%}",
    "steps": lambda r: str(r.num_steps),
    "preemptions": lambda r: str(r.preemptions),
    "of limit": lambda r: f"{r.limit_share:.0%}",
    "same ids": lambda r: "yes" if r.outputs_equal else "NO",
}


def main(
    model: Annotated[str | None, typer.Option("--model", "-m", help="As in paged generate.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    requests: Annotated[int, typer.Option(help="Requests of the workload.")] = 64,
    prompt_tokens: Annotated[tuple[int, int], typer.Option(help="Least and most prompt tokens.")] = (32, 256),
    output_tokens: Annotated[tuple[int, int], typer.Option(help="Least and most output tokens.")] = (16, 256),
    page_size: Annotated[int, typer.Option(help="Tokens in a page.")] = 16,
    num_pages: Annotated[int, typer.Option(help="Pages of every mode's pool.")] = 512,
    max_model_len: Annotated[
        int, typer.Option(help="The longest sequence: what contiguous reserves.")
    ] = 2048,
    repeats: Annotated[int, typer.Option(help="Rounds over all modes.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Compute threads.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Compare batching and allocation on the same requests."""
    config = EngineConfig(
        model=ModelConfig(model=model, dtype=dtype, max_model_len=max_model_len),  # type: ignore[arg-type]
        cache=CacheConfig(page_size=page_size, num_pages=num_pages, prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=requests),
        device=DeviceConfig(device=device, threads=threads),  # type: ignore[arg-type]
    )
    console = Console(width=None if sys.stdout.isatty() else 100)
    bench = Bench(config)
    workload = mixed_lengths(
        requests,
        seed=seed,
        vocab_size=bench.spec.vocab_size,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )
    limits = measure_limits("float32" if bench.choice.dtype == "float32" else "bfloat16")
    results = list(compare(bench, workload, limits, repeats))
    console.print(table(results))
    console.print(
        f"Limits measured in this run, {limits.threads} threads: reading {limits.read_bytes_per_s / 1e9:.1f} GB/s, "
        f"{limits.dtype} products {limits.flops_per_s / 1e9:.0f} GFLOP/s."
    )
    if json_file is not None:
        json_file.write_text(json.dumps(report(config, bench, workload, limits, results), indent=2) + "\n")
    if not all(result.outputs_equal for result in results):
        raise PagedError("modes gave different token ids: the schedule has changed an answer")


def report(
    config: EngineConfig,
    bench: Bench,
    workload: list[WorkloadRequest],
    limits: MachineLimits,
    results: list[ModeResult],
) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "settings": {
            **dataclasses.asdict(config),
            "dtype": bench.choice.dtype,
            "threads": bench.choice.threads,
            "depth": bench.choice.depth,
        },
        "workload": {
            "requests": len(workload),
            "prompt_tokens": sum(len(item.prompt_token_ids) for item in workload),
            "output_tokens": sum(item.output_tokens for item in workload),
        },
        "limits": dataclasses.asdict(limits),
        "modes": [dataclasses.asdict(result) for result in results],
    }


if __name__ == "__main__":
    typer.run(main)
