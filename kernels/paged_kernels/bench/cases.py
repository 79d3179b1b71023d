"""What is measured: one case is an op at one shape, with the bytes and operations that it needs. Standard library only.

Bytes are what an op has to read and write once, whatever caches do; operations are multiplications and additions of
matrices and attention. Weights and cached keys come from memory: copies of them, together larger than the last-level
cache, take turns. Activations stay in the caches, as they do between the layers of a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paged_kernels.bench.families import Family


class UnavailableError(Exception):
    """A variant has no such op; the message says why."""


OPS = ("embedding", "norm", "linear", "rope", "attention", "gated", "head", "sampler")
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
CONTEXTS = (256, 2048, 8192)
PAGE_SIZES = (1, 8, 16, 32, 64, 256)
USUAL_PAGE_SIZE, USUAL_CONTEXT = 16, 2048
MANY_SEQUENCES, CHUNK = 8, 512
SAMPLERS = ("greedy", "top-p")
MAX_HEAD_ROWS = 64
"""More rows of logits than these are computed in parts."""

MAX_TABLE_ROWS = 32768
"""Of the embedding of a large model."""


@dataclass(frozen=True, slots=True)
class Format:
    """How a weight is stored, and what it multiplies.

    Attributes:
        name: As `--format` takes it.
        dtype: Of activations.
        bits: Of a code; 0: the weight is of the dtype.
        group_size: Input features of a scale.
        activation: What rows are rounded to before they meet codes: "int8", "bfloat16" or "float32".
        offsets: Whether groups have float offsets (GGUF) and not whole zero points (AWQ, GPTQ).
        reordered: Whether groups are out of order, as with act-order.
        everywhere: Whether all matrices are measured in it, or one.
    """

    name: str
    dtype: str
    bits: int = 0
    group_size: int = 0
    activation: str = ""
    offsets: bool = False
    reordered: bool = False
    everywhere: bool = True

    @property
    def weight_bytes(self) -> float:
        """Of one weight, its share of scale (half) and zero point or offset included."""
        if not self.bits:
            return float(ITEM_BYTES[self.dtype])
        return self.bits / 8 + (2 + (4 if self.offsets else 1)) / self.group_size


FORMATS = {
    item.name: item
    for item in (
        Format("float32", "float32"),
        Format("bfloat16", "bfloat16"),
        Format("int4-g128", "bfloat16", 4, 128, "int8"),
        Format("int8-g128", "bfloat16", 8, 128, "int8"),
        Format("int4-g128-a16", "bfloat16", 4, 128, "bfloat16", everywhere=False),
        Format("int4-g32", "bfloat16", 4, 32, "int8", everywhere=False),
        Format("int4-g32-offsets", "bfloat16", 4, 32, "int8", offsets=True, everywhere=False),
        Format("int4-g128-reordered", "bfloat16", 4, 128, "int8", reordered=True, everywhere=False),
        Format("int8-g32", "bfloat16", 8, 32, "int8", everywhere=False),
        Format("int8-g16", "bfloat16", 8, 16, "int8", everywhere=False),
    )
}
USUAL_MATRIX = "gate_up"
"""The one that formats of less use are measured on: the largest of a layer."""


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one shape.

    Attributes:
        op: One of `OPS`.
        name: Which matrix, or which way of the op.
        families: Whose shape it is.
        format: Of weights and activations.
        rows: Tokens, or rows of logits.
        inputs: Features that come in; embedding and sampler: the vocabulary.
        outputs: Features that go out.
        heads: Query heads, key-value heads, head_dim.
        sequences: Sequences of attention, `rows` / `sequences` rows each.
        context: Tokens of each sequence.
        page_size: Tokens of a page.
    """

    op: str
    name: str
    families: tuple[str, ...]
    format: Format
    rows: int
    inputs: int
    outputs: int
    heads: tuple[int, int, int] = (0, 0, 0)
    sequences: int = 1
    context: int = 0
    page_size: int = USUAL_PAGE_SIZE

    @property
    def label(self) -> str:
        """For a table; of attention sequences x context / page size."""
        if self.op == "attention":
            return f"{self.name} {self.sequences} x {self.context:,} / {self.page_size}"
        if self.op in ("linear", "head"):
            return f"{self.name} {self.outputs:,} x {self.inputs:,}"
        return f"{self.name} {self.outputs if self.op == 'embedding' else self.inputs:,}"

    @property
    def flops(self) -> float:
        """Multiplications and additions; 0 for ops that only move and change numbers."""
        if self.op in ("linear", "head"):
            return 2.0 * self.rows * self.inputs * self.outputs
        if self.op != "attention":
            return 0.0
        rows = self.rows // self.sequences
        seen = rows * self.context - rows * (rows - 1) // 2
        return 4.0 * self.sequences * seen * self.heads[0] * self.heads[2]

    @property
    def cold_bytes(self) -> float:
        """Of them, those that no cache holds: weights, keys and values."""
        item = ITEM_BYTES[self.format.dtype]
        if self.op in ("linear", "head"):
            return self.inputs * self.outputs * self.format.weight_bytes
        if self.op == "attention":
            return 2.0 * self.sequences * self.context * self.heads[1] * self.heads[2] * item
        return 0.0

    @property
    def bytes(self) -> float:
        """Read and written at least."""
        item = ITEM_BYTES[self.format.dtype]
        if self.op == "sampler":
            return 4.0 * self.rows * self.inputs
        read = {"embedding": self.outputs, "norm": 2 * self.inputs, "rope": self.inputs + self.heads[2]}
        written = {"norm": 2 * self.outputs, "rope": self.inputs}
        features = read.get(self.op, self.inputs) + written.get(self.op, self.outputs)
        return self.cold_bytes + float(self.rows * features * item)

    @property
    def weight_key(self) -> tuple[object, ...]:
        """Equal for cases that share weights: these are made once if they come one after the other."""
        return (self.op in ("linear", "head"), self.outputs, self.inputs, self.format.name)


def list_cases(
    families: Sequence[Family],
    *,
    ops: Sequence[str] = OPS,
    formats: Sequence[Format] = tuple(FORMATS.values()),
    rows: Sequence[int] = (1, 8, 64, 512),
    contexts: Sequence[int] = CONTEXTS,
    page_sizes: Sequence[int] = PAGE_SIZES,
) -> list[Case]:
    """All cases of some families; a shape that several have is one case."""
    found: dict[Case, tuple[str, ...]] = {}
    for family in families:
        for case in _cases_of(family, ops, formats, rows, contexts, page_sizes):
            shape = dataclasses.replace(case, families=())
            found[shape] = (*found.get(shape, ()), family.name)
    return [dataclasses.replace(case, families=names) for case, names in found.items()]


def _cases_of(
    family: Family,
    ops: Sequence[str],
    formats: Sequence[Format],
    rows: Sequence[int],
    contexts: Sequence[int],
    page_sizes: Sequence[int],
) -> Iterator[Case]:
    dense = [item for item in formats if not item.bits]
    if "linear" in ops:
        yield from _linears(family, formats, rows)
    if "head" in ops and not family.is_large:
        sizes = (family.hidden, family.vocab_size)
        for item in formats:
            if item.everywhere:
                few = [count for count in rows if count <= MAX_HEAD_ROWS] or [min(rows)]
                yield from (Case("head", "head", (), item, count, *sizes) for count in few)
    for item in dense:
        for op in ops:
            if op in _ROWWISE:
                yield from (_rowwise(op, family, item, count) for count in rows)
        if "attention" in ops:
            yield from _attention(family, item, contexts, page_sizes)
    if "sampler" in ops:
        float32 = FORMATS["float32"]
        few = [count for count in rows if count <= MAX_HEAD_ROWS] or [min(rows)]
        for name in SAMPLERS:
            yield from (Case("sampler", name, (), float32, count, family.vocab_size, 1) for count in few)


def _linears(family: Family, formats: Sequence[Format], rows: Sequence[int]) -> Iterator[Case]:
    for name, (outputs, inputs) in family.matrices().items():
        for item in formats:
            if item.everywhere or name == USUAL_MATRIX:
                yield from (Case("linear", name, (), item, count, inputs, outputs) for count in rows)


_ROWWISE = ("embedding", "norm", "rope", "gated")


def _rowwise(op: str, family: Family, item: Format, rows: int) -> Case:
    hidden, q_size = family.hidden, family.q_size
    vocab_size = min(family.vocab_size, MAX_TABLE_ROWS) if family.is_large else family.vocab_size
    inputs = {"embedding": vocab_size, "rope": family.qkv_size, "gated": 2 * family.inner}.get(op, hidden)
    outputs = {"rope": q_size, "gated": family.inner}.get(op, hidden)
    name = {"norm": "add + RMS norm", "rope": "rotate + write", "gated": "silu x up"}.get(op, op)
    heads = family.heads if op == "rope" else (0, 0, 0)
    return Case(op, name, (), item, rows, inputs, outputs, heads)


def _attention(
    family: Family, item: Format, contexts: Sequence[int], page_sizes: Sequence[int]
) -> Iterator[Case]:
    """All contexts with the usual page; all page sizes at the usual context, for decodes and a prompt's chunk."""
    usual = USUAL_PAGE_SIZE if USUAL_PAGE_SIZE in page_sizes else page_sizes[0]
    middle = USUAL_CONTEXT if USUAL_CONTEXT in contexts else contexts[0]
    shape = (family.q_size, family.q_size, family.heads)
    for context in contexts:
        yield Case("attention", "decode", (), item, 1, *shape, 1, context, usual)
        chunk = min(CHUNK, context)
        yield Case("attention", "prefill", (), item, chunk, *shape, 1, context, usual)
    for page_size in page_sizes:
        many = MANY_SEQUENCES
        yield Case("attention", "decode", (), item, many, *shape, many, middle, page_size)
        if page_size != usual:
            yield Case("attention", "prefill", (), item, min(CHUNK, middle), *shape, 1, middle, page_size)


@dataclass(frozen=True, slots=True)
class Opened:
    """A case that is ready to be timed.

    Attributes:
        measure: Runs some ops: their seconds, and how many they were.
        error: Of the result; over 1 is wrong.
        op: What is called.
    """

    measure: Callable[[], tuple[float, int]]
    error: float
    op: str
