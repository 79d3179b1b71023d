"""The paper limits of the CUDA kernels in docs/cuda.md: bytes, operations, instructions, and what binds on which card.

    python tools/cuda_limits.py [--check]      writes the tables between their marks, or fails if it is stale

Bytes and operations are those of `paged_kernels.bench.cases`, which the benchmarks use too. Standard library only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "kernels"))

from paged_kernels.bench.cases import FORMATS, Case, list_cases  # noqa: E402
from paged_kernels.bench.families import FAMILIES, Family  # noqa: E402

PAGE = ROOT / "docs/cuda.md"
BEGIN, END = "<!-- limits: tools/cuda_limits.py -->", "<!-- end of limits -->"
BEGIN_SAMPLING, END_SAMPLING = "<!-- sampling: tools/cuda_limits.py -->", "<!-- end of sampling -->"
CACHE_BYTES_PER_CYCLE = 64
"""What one multiprocessor reads from the second cache."""
IN_FLIGHT_BYTES, CACHE_LATENCY_S, MEMORY_LATENCY_S = 16 * 1024, 250e-9, 800e-9
"""Of logits on their way to a multiprocessor, whose one block has no registers for more; and how long they take."""
MMA_ROWS = 16
"""Rows of a tensor-core product; those that do not exist are computed too."""
FEW_ROWS = 8
"""Rows of activations where they are the narrow side of the product."""


@dataclass(frozen=True, slots=True)
class Card:
    """What a card can do.

    Attributes:
        name: For the table.
        bytes_per_s: Of memory, as a copy reaches it.
        flops_per_s: Of bfloat16 products summed in float32, without sparsity.
        processors: Multiprocessors.
        clock_hz: Of them.
        cache_bytes: Of the second cache.
    """

    name: str
    bytes_per_s: float
    flops_per_s: float
    processors: int
    clock_hz: float
    cache_bytes: float

    @property
    def issue_per_s(self) -> float:
        """Instructions of a warp: four for each multiprocessor and cycle."""
        return 4 * self.processors * self.clock_hz


CARDS = (
    Card("H200", 4.3e12, 790e12, 132, 1.755e9, 50e6),
    Card("L40S", 0.78e12, 330e12, 142, 2.5e9, 96e6),
    Card("RTX 4090", 0.93e12, 160e12, 128, 2.5e9, 72e6),
)


@dataclass(frozen=True, slots=True)
class Limit:
    """What a kernel needs at least.

    Attributes:
        kernel: Its name.
        shape: For people.
        bytes: Read and written.
        flops: That the tensor cores do, rows that do not exist included.
        instructions: Of warps, counted from the inner loop of the source.
    """

    kernel: str
    shape: str
    bytes: float
    flops: float
    instructions: float

    def on(self, card: Card) -> tuple[float, str]:
        """(seconds, what binds)."""
        times = {
            "bytes": self.bytes / card.bytes_per_s,
            "products": self.flops / card.flops_per_s,
            "issue": self.instructions / card.issue_per_s,
        }
        binding = max(times, key=lambda name: times[name])
        return times[binding], binding


@dataclass(frozen=True, slots=True)
class Sampling:
    """Rows of logits by `sample_kernel` or `logprobs_kernel`, a block for each.

    Attributes:
        what: For people.
        rows: Of logits.
        passes: Instructions for a token, of each pass over the row.
    """

    what: str
    rows: int
    passes: tuple[int, ...]

    def on(self, card: Card, vocab_size: int) -> tuple[float, str]:
        """(seconds, what binds the longest of the passes)."""
        blocks = min(self.rows, card.processors)
        num_bytes = 4 * vocab_size * self.rows
        if num_bytes <= card.cache_bytes:  # the model has just written them
            rate = blocks * min(CACHE_BYTES_PER_CYCLE * card.clock_hz, IN_FLIGHT_BYTES / CACHE_LATENCY_S)
        else:
            rate = min(card.bytes_per_s, blocks * IN_FLIGHT_BYTES / MEMORY_LATENCY_S)
        reads = num_bytes / rate
        issue = card.issue_per_s * blocks / card.processors
        works = [each * vocab_size * self.rows / 32 / issue for each in self.passes]
        return sum(max(reads, work) for work in works), "issue" if max(works) > reads else "bytes"


SAMPLINGS = (
    Sampling("greedy", 1, (4,)),
    Sampling("temperature", 1, (4, 26)),
    Sampling("temperature and top_p", 1, (4, 26, 10)),
    Sampling("top_k up to 512, with or without top_p", 1, (4, 4)),
    Sampling("log-probabilities with alternatives", 1, (5, 5, 5, 5)),
    Sampling("greedy", 256, (4,)),
    Sampling("temperature", 256, (4, 26)),
)
"""Of the race's second pass 15 instructions are Philox; a race that top_p turns down is run again: not counted."""


def padded(rows: int) -> int:
    """Rows that a 4-bit product computes."""
    if rows <= FEW_ROWS:
        return FEW_ROWS
    return next(size for size in (16, 32, 64) if rows <= size)


def product(case: Case) -> list[Limit]:
    """A product with 4-bit weights, by few_rows_kernel or ring_kernel, or dequantized first."""
    weights = case.inputs * case.outputs
    shape = f"{case.label}, {case.rows} rows"
    # A lane's 32 weights of a block of 1,024: four words of four pairs, 3.5 instructions each, a load, scales, sums.
    unpack = weights / 1024 * (16 * 3.5 + 12)
    if case.rows > 64:
        dense = 2.0 * weights
        activations = case.bytes - case.cold_bytes
        return [
            Limit("dequantize_kernel", shape, case.cold_bytes + dense, 0.0, unpack),
            Limit("cuBLAS after it", shape, dense + activations, case.flops, 0.0),
        ]
    rows = padded(case.rows)
    flops = case.flops / case.rows * rows
    name = "few_rows_kernel" if case.rows <= FEW_ROWS else "ring_kernel"
    # An instruction of a tensor core is 4,096 operations; the ring's blocks also load activations, half as many times.
    each = 1.0 if rows == FEW_ROWS else 1.5
    return [Limit(name, shape, case.bytes, flops, unpack + flops / 4096 * each)]


def attention(case: Case) -> Limit:
    """Attention: heads of a group are the rows of a product."""
    group = case.heads[0] // case.heads[1]
    each = case.rows // case.sequences
    rows = each * group
    flops = case.flops * (-(-rows // MMA_ROWS) * MMA_ROWS) / rows
    # Of 32 keys for 16 rows: products, ldmatrix (one for two of them), copies, 16 weights of a lane, the sums rescaled.
    products = flops / 4096
    softmax = flops / (4.0 * MMA_ROWS * 32 * case.heads[2]) * (16 * 6 + case.heads[2] / 2 + 40)
    name = "attention_decode_kernel" if each == 1 else "attention_prefill_kernel"
    return Limit(name, f"{case.label}, {case.rows} rows", case.bytes, flops, products * 1.5 + softmax)


def rowwise(case: Case) -> Limit:
    """Norms, rotations, activations: about six instructions for an element of eight that a lane loads at once."""
    names = {
        "norm": "rms_norm_kernel",
        "rope": "rope_kernel",
        "gated": "gated_kernel",
        "embedding": "rows_kernel",
    }
    elements = case.bytes / 2
    per_element = 0.2 if case.op == "embedding" else 3.0
    return Limit(
        names[case.op], f"{case.label}, {case.rows} rows", case.bytes, 0.0, elements / 32 * per_element
    )


def limits(family: Family) -> Iterator[Limit]:
    """Every kernel on the shapes of one model's layer."""
    dense, codes = FORMATS["bfloat16"], FORMATS["int4-g128-a16"]
    shape = (family.q_size, family.q_size, family.heads)
    for many, length in ((1, 1024), (16, 1024), (64, 1024), (256, 1024), (1, 8192), (16, 8192)):
        yield attention(Case("attention", "decode", (), dense, many, *shape, many, length))
    for rows, length in ((512, 2048), (2048, 2048)):
        yield attention(Case("attention", "prefill", (), dense, rows, *shape, 1, length))
    for name, (outputs, inputs) in family.matrices().items():
        for rows in (1, 16, 64, 1024) if name == "gate_up" else (1, 16):
            yield from product(Case("linear", name, (), codes, rows, inputs, outputs))
    for case in list_cases([family], ops=("norm", "rope", "gated", "embedding"), formats=[dense], rows=(64,)):
        yield rowwise(case)


def table(family: Family) -> str:
    """Markdown."""
    head = ["kernel", "shape", "MB", "G operations", "M instructions", *(card.name for card in CARDS)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for limit in limits(family):
        times = [limit.on(card) for card in CARDS]
        cells = [
            f"`{limit.kernel}`", limit.shape, f"{limit.bytes / 1e6:,.1f}",
            f"{limit.flops / 1e9:,.1f}" if limit.flops else "", f"{limit.instructions / 1e6:,.2f}",
            *(f"{seconds * 1e6:,.1f} µs, {binding}" for seconds, binding in times),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sampling_table(vocab_size: int) -> str:
    """Markdown."""
    head = ["what", "rows", "passes", "MB", *(card.name for card in CARDS)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for each in SAMPLINGS:
        times = [each.on(card, vocab_size) for card in CARDS]
        num_bytes = 4 * vocab_size * each.rows * len(each.passes)
        cells = [each.what, str(each.rows), str(len(each.passes)), f"{num_bytes / 1e6:,.1f}"]
        cells += [f"{seconds * 1e6:,.0f} µs, {binding}" for seconds, binding in times]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """The page with the tables as they should be.

    Raises:
        ValueError: The marks are not there.
    """
    family = FAMILIES["llama-3-8b"]
    page = _between(page, BEGIN, END, table(family))
    return _between(page, BEGIN_SAMPLING, END_SAMPLING, sampling_table(family.vocab_size))


def _between(page: str, begin: str, end: str, text: str) -> str:
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{PAGE.name} has no {begin} ... {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def main() -> int:
    """Write the page, or say that it is stale."""
    parser = argparse.ArgumentParser(description="The paper limits in docs/cuda.md.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if the page is stale"
    )
    arguments = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    wanted = with_tables(page)
    if arguments.check and wanted != page:
        print("docs/cuda.md: the limits are stale: run python tools/cuda_limits.py", file=sys.stderr)
        return 1
    if not arguments.check:
        PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
