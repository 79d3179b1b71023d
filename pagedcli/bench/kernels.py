"""Measures every op alone, variant beside variant and torch, in turns. May import `ops.kernel_cases` and below.

The kernels run in worker processes of their own: one holds all native variants, one torch. In every round each variant
of a case gets the same share of time, in an order that turns round from one round to the next; so what is compared
ran in the same seconds, and a ratio is that of rounds. What a variant would need minutes for is left out, and said.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pagedcli.errors import PagedError
from pagedcli.ops.kernel_cases import Case, worker_command

LEAST_ROUNDS = 3
SLOW_SECONDS = 3.0
"""An op that is expected to take longer is left out."""
OVERTIME = 8
"""A case's rounds end when it has taken so many times the time it was given; the least number of rounds is done."""
TORCH_VARIANTS = ("torch", "torch-engine")
"""Torch's own op, and the engine's torch backend."""
CUDA_VARIANT = "cuda"
"""Our CUDA kernels; the process that measures torch has them too."""


class WorkerError(PagedError):
    """A worker process failed: our fault."""


class Worker:
    """A worker process; see `paged_kernels.bench.worker`.

    Args:
        command: What starts it.

    Attributes:
        variants: What it can run.
        about: Such as "torch 2.13.0".
        cold_bytes: Of the copies of a weight that take turns.

    Raises:
        WorkerError: It does not start.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        hello = self._read()
        self.variants: tuple[str, ...] = tuple(hello["variants"])
        self.about: str = hello["about"]
        self.cold_bytes: int = hello["cold_bytes"]

    def open(self, case: Case, variant: str) -> dict[str, Any]:
        """Its error, or why there is none."""
        return self._ask({"open": dataclasses.asdict(case), "variant": variant})

    def seconds(self, variant: str, at_least: float) -> float:
        """Of one op, over so many seconds."""
        return float(self._ask({"time": at_least, "variant": variant})["seconds"])

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None, "it has a pipe"
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer will be missing too, and tells why
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it has a pipe"
        line = self._process.stdout.readline()
        if not line:
            words = self._last_words()
            self.close()
            raise WorkerError(f"a worker of the kernel benchmark died: {words}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        said = self._process.stderr.read().strip() if self._process.stderr is not None else ""
        return said.splitlines()[-1] if said else f"exit code {code}"


@dataclass(slots=True)
class KernelTimes:
    """What a case came to.

    Attributes:
        case: The op and its shape.
        seconds: Of one op by variant, a value for each round; the n-th of all variants are of the same round.
        errors: By variant; over 1 is a wrong result.
        called: By variant, what was called.
        missing: By variant, why nothing was measured.
    """

    case: Case
    seconds: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    called: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        """Variants whose result is not right."""
        return [variant for variant, error in self.errors.items() if not error <= 1.0]


class KernelBench:
    """The workers, and the cases that they measure.

    Args:
        workers: Those at work; each variant belongs to the first that has it.
        variants: Those wanted, in the order of the report.
        seconds: For each variant of a case, in all rounds.
        rounds: So many, unless time is up.
    """

    def __init__(
        self, workers: Sequence[Worker], variants: Sequence[str], *, seconds: float, rounds: int = 7
    ) -> None:
        self._workers, self._seconds, self._rounds = list(workers), seconds, rounds
        self.variants = [name for name in variants if any(name in worker.variants for worker in workers)]
        self._rates: dict[tuple[object, ...], float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.close()

    def run(self, cases: Sequence[Case], on_case: Callable[[Case], None]) -> Iterator[KernelTimes]:
        """Case by case.

        Args:
            cases: In an order in which those that share weights come together.
            on_case: Told before each.

        Raises:
            WorkerError: A worker died.
        """
        for case in cases:
            on_case(case)
            yield self._measure(case)

    def _measure(self, case: Case) -> KernelTimes:
        result = KernelTimes(case)
        for variant in self.variants:
            self._open(case, variant, result)
        variants = [variant for variant in self.variants if variant in result.errors]
        spent, limit = 0.0, OVERTIME * self._seconds * max(1, len(variants))
        for number in range(self._rounds):
            if number >= LEAST_ROUNDS and spent > limit:
                break
            for variant in _turned(variants, number):
                took = self._of(variant).seconds(variant, self._seconds / self._rounds)
                result.seconds.setdefault(variant, []).append(took)
                spent += max(took, self._seconds / self._rounds)
        for variant, times in result.seconds.items():
            self._rates[self._rate_key(case, variant)] = min(times) / _effort(case)
        return result

    def _open(self, case: Case, variant: str, result: KernelTimes) -> None:
        rate = self._rates.get(self._rate_key(case, variant))
        if rate is not None and rate * _effort(case) > SLOW_SECONDS:
            result.missing[variant] = f"left out: about {rate * _effort(case):.0f} s for one op"
            return
        answer = self._of(variant).open(case, variant)
        if "unavailable" in answer:
            result.missing[variant] = answer["unavailable"]
        else:
            result.errors[variant], result.called[variant] = answer["error"], answer["op"]

    @staticmethod
    def _rate_key(case: Case, variant: str) -> tuple[object, ...]:
        """Cases that differ in the number of rows only, or in context."""
        return (variant, case.op, case.name, case.families, case.format.name, case.page_size)

    def _of(self, variant: str) -> Worker:
        return next(worker for worker in self._workers if variant in worker.variants)


def _effort(case: Case) -> float:
    """What time grows with at most: it does not grow faster than operations, or than bytes where there are none."""
    return case.flops or case.bytes


def _turned(variants: Sequence[str], number: int) -> list[str]:
    """Forwards and backwards in turns, so that a drift of the machine's speed hits all alike."""
    return list(variants) if number % 2 == 0 else list(reversed(variants))


def start_workers(
    *,
    native: bool,
    torch_device: str | None,
    threads: int,
    cpus: Sequence[int],
    cold_bytes: int = 0,
    library: Path | None = None,
) -> list[Worker]:
    """The processes.

    Args:
        native: Whether the native kernels are measured.
        torch_device: Where torch runs; None: it does not.
        threads: Compute threads of a CPU.
        cpus: Logical CPUs for the native kernels' threads.
        cold_bytes: Of copies that take turns; 0: as the machine's caches are.
        library: Of our CUDA kernels, measured beside torch; None: they are not.
    """
    workers: list[Worker] = []
    try:
        if native:
            workers.append(Worker(worker_command("native", threads, cpus, "cpu", cold_bytes)))
        if torch_device is not None:
            workers.append(Worker(worker_command("torch", threads, (), torch_device, cold_bytes, library)))
    except WorkerError:
        for worker in workers:
            worker.close()
        raise
    return workers
