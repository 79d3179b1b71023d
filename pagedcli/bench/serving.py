"""`paged serve` measured from outside: what HTTP costs, and latencies at fixed rates beside other servers.

    python -m pagedcli.bench.serving [--peer "NAME=COMMAND WITH {port}"] [--json FILE]      (or: make bench-serve)

The server runs in a process of its own, as users run it. Token ids are drawn at random and outputs have a fixed
length, so that every server does the same work. Runs of what is compared take turns, since a machine's speed drifts.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pagedcli.bench.latency import LoadReport, summarize
from pagedcli.bench.load import LoadRequest, run_load
from pagedcli.bench.server_process import PAGED, ServerCommand, ServerError, ServerProcess, our_server
from pagedcli.errors import PagedError
from pagedcli.workloads.arrivals import poisson, together

VOCAB = 40_000
"""Ids are drawn below it: all models here have more, and special tokens lie elsewhere."""
STREAMS = 32
WANTED_OVERHEAD = 0.92
STREAM_COUNTS = (1, 32, 256)


def token_prompts(count: int, *, seed: int, lengths: tuple[int, int]) -> list[list[int]]:
    """Prompts of random ids, lengths drawn evenly from the closed range."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB // 40, VOCAB) for _ in range(rng.randint(*lengths))] for _ in range(count)]


def completion_body(prompt: list[int], output_tokens: int) -> dict[str, Any]:
    """A streamed request of a fixed length, in fields that every server knows."""
    return {
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def load(server: ServerProcess, prompts: list[list[int]], outputs: int, arrivals: list[float]) -> LoadReport:
    """Send the prompts when they are due."""
    requests = [
        LoadRequest(completion_body(prompt, outputs), arrival)
        for prompt, arrival in zip(prompts, arrivals, strict=True)
    ]
    return summarize(asyncio.run(run_load(server.target(), requests)))


@dataclass(frozen=True, slots=True)
class Pair:
    """One round: tokens per second by HTTP and by `paged generate`."""

    serve: float
    generate: float

    @property
    def ratio(self) -> float:
        """Part of the rate that is left over HTTP."""
        return self.serve / self.generate


class ServingError(PagedError):
    """A measurement failed: requests did."""


def generate_rate(prompts: list[list[int]], outputs: int, arguments: Sequence[str]) -> float:
    """Tokens per second of `paged generate`, from the first row's arrival in the engine to the last one's end."""
    rows = [
        {"prompt_token_ids": prompt, "max_tokens": outputs, "ignore_eos": True, "temperature": 0}
        for prompt in prompts
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [*PAGED, "generate", str(file), "--quiet", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ServingError(f"paged generate failed: {done.stderr[-300:]}")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    seconds: float = max(answer["seconds"]["total"] for answer in answers)
    return float(tokens / seconds)


def measure_overhead(
    arguments: Sequence[str], *, rounds: int, streams: int = STREAMS, outputs: int = 128
) -> list[Pair]:
    """The same requests over HTTP and in a file, in turns; who goes first changes, as a machine's speed drifts."""
    pairs = []
    with ServerProcess(our_server(arguments)) as server:
        load(server, token_prompts(streams, seed=0, lengths=(32, 96)), 8, together(streams))
        for number in range(1, rounds + 1):
            prompts = token_prompts(streams, seed=number, lengths=(32, 96))
            generated = generate_rate(prompts, outputs, arguments) if number % 2 == 0 else 0.0
            report = load(server, prompts, outputs, together(streams))
            if report.failed:
                raise ServingError(f"{report.failed} of {report.requests} requests failed: {report.errors}")
            generated = generated or generate_rate(prompts, outputs, arguments)
            pairs.append(Pair(report.output_tokens_per_s, generated))
    return pairs


@dataclass(frozen=True, slots=True)
class RateRow:
    """One server at one rate."""

    server: str
    rate: float
    report: LoadReport

    def as_dict(self) -> dict[str, Any]:
        """For a file."""
        return {"server": self.server, "requests_per_s": self.rate, **self.report.as_dict()}


def measure_rates(
    servers: Sequence[ServerCommand], rates: Sequence[float], *, seconds: float, say: Console
) -> Iterator[RateRow]:
    """Each server alone on the machine, the same requests at the same moments."""
    for command in servers:
        try:
            with ServerProcess(command) as server:
                load(server, token_prompts(8, seed=99, lengths=(32, 256)), 8, together(8))
                for rate in rates:
                    count = max(8, round(rate * seconds))
                    prompts = token_prompts(count, seed=round(rate * 1000), lengths=(32, 256))
                    yield RateRow(command.name, rate, load(server, prompts, 64, poisson(count, rate, seed=7)))
        except ServerError as error:
            say.print(f"{command.name}: left out: {error}")


def overhead_table(pairs: Sequence[Pair]) -> Table:
    """Rounds and their median."""
    table = Table(title=f"{STREAMS} streams: output tokens/s")
    for name in ("round", "paged serve", "paged generate", "ratio"):
        table.add_column(name, justify="right")
    for number, pair in enumerate(pairs, 1):
        table.add_row(str(number), f"{pair.serve:,.1f}", f"{pair.generate:,.1f}", f"{pair.ratio:.3f}")
    table.add_row("median", "", "", f"{statistics.median(pair.ratio for pair in pairs):.3f}", style="bold")
    return table


def rates_table(rows: Sequence[RateRow]) -> Table:
    """Latencies in milliseconds."""
    table = Table(title="Poisson arrivals, prompts of 32 to 256 tokens, 64 output tokens; milliseconds")
    table.add_column("server")
    for name in ("req/s", "failed", "out tok/s", "TTFT p50", "p99", "ITL p50", "p99", "E2E p50", "p99"):
        table.add_column(name, justify="right")
    for row in rows:
        report = row.report
        shown = [1e3 * value for d in (report.ttft_s, report.itl_s, report.e2e_s) for value in (d.p50, d.p99)]
        table.add_row(
            row.server,
            f"{row.rate:g}",
            f"{report.failed}",
            f"{report.output_tokens_per_s:,.1f}",
            *(f"{value:,.0f}" for value in shown),
        )
    return table


def main(
    peer: Annotated[
        list[str] | None, typer.Option(help='Another server, as "NAME=COMMAND WITH {port}"; may be repeated.')
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="As in paged serve.")] = None,
    rounds: Annotated[int, typer.Option(help="Pairs of runs for the overhead; 0 leaves it out.")] = 8,
    rate: Annotated[list[float] | None, typer.Option(help="Requests per second; may be repeated.")] = None,
    seconds: Annotated[float, typer.Option(help="Time at each rate; 0 leaves the rates out.")] = 30.0,
    max_itl_ms: Annotated[
        float | None, typer.Option(help="Measure the rates with this pace wanted, too.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure `paged serve`, and other servers beside it."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    arguments = ("--model", model) if model else ()
    figures: dict[str, Any] = {}
    if rounds:
        pairs = measure_overhead(arguments, rounds=rounds)
        console.print(overhead_table(pairs))
        figures["overhead"] = {
            "streams": STREAMS,
            "wanted": WANTED_OVERHEAD,
            "ratio": statistics.median(pair.ratio for pair in pairs),
            "rounds": [asdict(pair) | {"ratio": pair.ratio} for pair in pairs],
        }
    if seconds:
        servers = [our_server(arguments)]
        if max_itl_ms is not None:
            servers.append(our_server((*arguments, "--max-itl-ms", f"{max_itl_ms:g}"), name="paged, paced"))
        servers += map(ServerCommand.parse, peer or ())
        rows = list(measure_rates(servers, rate or [1.0, 2.0, 4.0], seconds=seconds, say=console))
        console.print(rates_table(rows))
        figures["rates"] = [row.as_dict() for row in rows]
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
