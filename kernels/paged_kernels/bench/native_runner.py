"""Cases on the native kernels: each is recorded as programs of several copies of its op, whose calls are timed.

Imports numpy. All variants share the copies of a weight, since they share its layout. Programs hold about 64 MB of
weights or keys each and take turns, so that a copy has left the caches when its turn comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kernels.bench.cases import Case, Opened
from paged_kernels.bench.data import NORM_EPS, TOP_P, Data, from_bfloat16, in_top_p, to_bfloat16
from paged_kernels.native import (
    SAMPLE_ROW,
    Buffer,
    KVPool,
    PackedWeight,
    Program,
    Runtime,
    SampleOutput,
    available_isas,
)
from paged_kernels.quantized import ROW_KINDS, QuantizedWeight

Array = npt.NDArray[Any]
Weight = PackedWeight | QuantizedWeight

PROGRAM_BYTES, PROGRAM_FLOPS = 64 << 20, 4e9
"""Of the ops of one program, about."""
MAX_COPIES = 4096
ROWWISE_COPIES, EMBEDDING_TURNS = 16, 64
COUNTED = {
    "linear": ("linear", "prepare", "quantized_linear"),
    "head": ("linear", "prepare", "quantized_linear"),
    "attention": ("attention", "attention_join"),
}
"""Kernels that an op is made of, where they have other names than the op."""


class _Values:
    """A tensor as `Runtime.pack` takes it."""

    dtype = "F32"

    def __init__(self, values: npt.NDArray[np.float32]) -> None:
        self.shape: tuple[int, ...] = values.shape
        self.data: npt.NDArray[np.uint8] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _clone(buffer: Buffer) -> Buffer:
    copy = Buffer(buffer.nbytes)
    memoryview(copy)[:] = memoryview(buffer)
    return copy


class NativeRunner:
    """Opens cases, one at a time.

    Args:
        threads: Compute threads.
        cpus: Logical CPUs for them; the calling thread is pinned to the first.
        cold_bytes: Of the copies of a case's weights or keys together, at least.
    """

    def __init__(self, threads: int, cpus: Sequence[int], cold_bytes: int) -> None:
        self._runtimes = {isa: Runtime(threads, cpus=cpus, isa=isa) for isa in available_isas()}
        if cpus:
            next(iter(self._runtimes.values())).bind_caller()
        self._cold_bytes = cold_bytes
        self._data: Data | None = None
        self._weights: tuple[Any, list[Weight]] = (None, [])
        self._pool: tuple[Any, KVPool | None] = (None, None)

    @property
    def variants(self) -> tuple[str, ...]:
        """Best first."""
        return tuple(self._runtimes)

    def open(self, case: Case, variant: str) -> Opened:
        """Make a case ready: its result is checked, its memory is there."""
        if self._data is None or self._data.case != case:
            if self._data is not None and self._data.case.weight_key != case.weight_key:
                self._weights = (None, [])
            self._pool = (None, None)
            self._data = Data(case)
        runtime, data = self._runtimes[variant], self._data
        if case.op == "sampler":
            return _sampler(runtime, data)
        recorder = _Recorder(self, runtime, data)
        error = data.error(recorder.checked())
        programs = list(recorder.programs())
        counted = COUNTED.get(case.op, (case.op,))
        return Opened(_Turns(programs, recorder.batches(), counted), error, " + ".join(counted))

    def weights(self, data: Data, runtime: Runtime) -> list[Weight]:
        """Copies of the case's weight that take turns."""
        key = data.case.weight_key
        if self._weights[0] != key:
            self._weights = (None, [])
            first: Weight
            if data.case.format.bits:
                first, size = (weight := runtime.pack_quantized([data.codes])), weight.nbytes
            else:
                first = runtime.pack([_Values(data.weight)], data.dtype)
                size = first.buffer.nbytes
            count = min(max(2, -(-self._cold_bytes // size)), MAX_COPIES)
            self._weights = (key, [first, *(_copy(first) for _ in range(count - 1))])
        return self._weights[1]

    def kv_pool(self, data: Data) -> KVPool:
        """As many layers as it takes, all with the case's keys and values."""
        case = data.case
        if self._pool[1] is None or self._pool[0] is not data:
            layers = 2 if case.op != "attention" else max(2, -(-self._cold_bytes // int(case.cold_bytes)))
            self._pool = (data, _filled_pool(data, min(layers, MAX_COPIES)))
        pool = self._pool[1]
        assert pool is not None
        return pool


def _copy(weight: Weight) -> Weight:
    if isinstance(weight, PackedWeight):
        return PackedWeight(_clone(weight.buffer), weight.out_features, weight.in_features, weight.dtype)
    return QuantizedWeight(
        *(_clone(weight.codes), _clone(weight.scales), _clone(weight.zeros), weight.columns),
        *(weight.out_features, weight.in_features, weight.depth, weight.group_size, weight.bits),
        *(weight.half_scales, weight.float_offsets),
    )


def _filled_pool(data: Data, layers: int) -> KVPool:
    case = data.case
    num_heads, head_dim = case.heads[1:]
    blocks = data.block_table.size
    pool = KVPool(layers, blocks, num_heads, case.page_size, head_dim, data.dtype)
    kind = np.dtype(np.float32 if data.dtype == "float32" else np.uint16)
    cells = np.frombuffer(memoryview(pool.buffer), kind)
    cells = cells.reshape(layers, 2, blocks, num_heads, case.page_size, head_dim)
    if case.op == "attention":
        for part, values in enumerate(data.kv):
            stored = values if kind == np.float32 else to_bfloat16(values)
            for sequence in range(case.sequences):
                slots = data.cells(sequence)[: case.context]
                cells[0, part, slots // case.page_size, :, slots % case.page_size] = stored
        cells[1:] = cells[0]
    return pool


class _Recorder:
    """Records programs of one case on one variant."""

    def __init__(self, runner: NativeRunner, runtime: Runtime, data: Data) -> None:
        self._runner, self._runtime, self._data = runner, runtime, data
        self._table = runtime.pack([_Values(data.table)], data.dtype)
        self._batch = _batch(data)

    def batches(self) -> list[list[Array]]:
        """Of steps that differ, for an embedding in its rows."""
        turns = EMBEDDING_TURNS if self._data.case.op == "embedding" else 1
        return [[self._data.other_ids(turn), *self._batch[1:]] for turn in range(turns)]

    def checked(self) -> Array:
        """The sample of the result of one op."""
        case, sample = self._data.case, self._data.sample
        program = next(self.programs(only=1))
        program.run(*self._batch)
        values = program.logits()
        values = values if values.dtype == np.float32 else from_bfloat16(values)
        if case.op != "rope":
            return sample.of(values)
        return np.concatenate([values[sample.rows], self._written_keys(sample.rows)], axis=1)

    def _written_keys(self, rows: Array) -> Array:
        """Of these rows, [rows, kv heads x head_dim], as they lie in the cache."""
        case, pool = self._data.case, self._runner.kv_pool(self._data)
        kind = np.dtype(np.float32 if self._data.dtype == "float32" else np.uint16)
        cells = np.frombuffer(memoryview(pool.buffer), kind)
        keys = cells[: pool.num_blocks * pool.block_bytes // kind.itemsize]
        keys = keys.reshape(pool.num_blocks, case.heads[1], case.page_size, case.heads[2])
        slots = self._data.cells(0)[rows]
        found = keys[slots // case.page_size, :, slots % case.page_size].reshape(len(rows), -1)
        return found if kind == np.float32 else from_bfloat16(found)

    def programs(self, only: int | None = None) -> Iterator[Program]:
        """Of all copies; `only`: one program of so many."""
        case = self._data.case
        copies: Sequence[Any] = range(1 if case.op == "embedding" else ROWWISE_COPIES)
        if case.op in ("linear", "head"):
            copies = self._runner.weights(self._data, self._runtime)
        elif case.op == "attention":
            copies = range(self._runner.kv_pool(self._data).num_layers)
        each = max(1, int(min(PROGRAM_BYTES / max(case.bytes, 1), PROGRAM_FLOPS / max(case.flops, 1))))
        if only is not None:
            copies, each = copies[:only], only
        for first in range(0, len(copies), each):
            yield self._program(copies[first : first + each])

    def _program(self, copies: Sequence[Any]) -> Program:
        program = Program(self._runtime, self._data.dtype, self._data.case.page_size)
        x = program.embedding(self._table)
        program.finish(_RECORD[self._data.case.op](self, program, x, copies), fuse=False)
        return program

    def linear(self, program: Program, x: int, weights: Sequence[Weight]) -> int:
        """All write the same outputs."""
        case = self._data.case
        is_head = case.op == "head"
        x = program.logit_rows(x) if is_head else x
        native = program._native
        out = native.allocate(x, case.outputs, is_head)
        for weight in weights:
            if isinstance(weight, QuantizedWeight):
                kind = ROW_KINDS[case.format.activation]
                native.quantized_linear(x, kind, None, out, 0, False, *weight.arguments)
            else:
                native.linear_into(x, weight.buffer, case.outputs, None, out, 0)
        return out

    def norm(self, program: Program, x: int, copies: Sequence[Any]) -> int:
        """Of the sum with what came in, one after the other."""
        weight, out, total = self._runtime.upload(self._data.norm_weight), x, x
        for _ in copies:
            out, total = program.add_rms_norm(out, total, weight, NORM_EPS)
        return out

    def gated(self, program: Program, x: int, copies: Sequence[Any]) -> int:
        """Added up, or nobody would read the others."""
        out = program.gated(x, "silu")
        for _ in copies[1:]:
            out = program.add(out, program.gated(x, "silu"))
        return out

    def embedding(self, program: Program, x: int, copies: Sequence[Any]) -> int:
        """The rows that a program begins with; other rows come with another batch."""
        return x

    def rope(self, program: Program, x: int, copies: Sequence[Any]) -> int:
        """Into two layers in turns."""
        cos, sin = (self._runtime.upload(part) for part in self._data.angles)
        pool, out = self._runner.kv_pool(self._data), x
        for copy in copies:
            out = program.rope_kv_write(x, self._data.case.heads, (cos, sin), pool, copy % 2)
        return out

    def attention(self, program: Program, x: int, layers: Sequence[int]) -> int:
        """Through the layers, each of which takes what the one before gave as its queries."""
        heads, pool = self._data.case.heads, self._runner.kv_pool(self._data)
        for layer in layers:
            x = program.attention(x, heads, heads[2] ** -0.5, None, pool, layer)
        return x


_RECORD: dict[str, Callable[[_Recorder, Program, int, Sequence[Any]], int]] = {
    "linear": _Recorder.linear,
    "head": _Recorder.linear,
    "norm": _Recorder.norm,
    "gated": _Recorder.gated,
    "embedding": _Recorder.embedding,
    "rope": _Recorder.rope,
    "attention": _Recorder.attention,
}


def _batch(data: Data) -> list[Array]:
    """Arguments of `Program.run`: for attention sequences of the case's length, else one prompt."""
    case, table = data.case, data.block_table
    each = case.rows // case.sequences
    context = max(case.context, each)
    positions = np.tile(np.arange(context - each, context), case.sequences)
    slots = np.concatenate(
        [data.cells(sequence)[context - each : context] for sequence in range(case.sequences)]
    )
    return [
        data.token_ids,
        positions.astype(np.int64),
        slots,
        np.arange(0, case.rows + 1, each, dtype=np.int32),
        np.full(case.sequences, context, np.int32),
        table,
        np.arange(case.rows if case.op == "head" else 1, dtype=np.int64),
    ]


class _Turns:
    """Times the calls of the next program each time it is called."""

    def __init__(
        self, programs: Sequence[Program], batches: Sequence[Sequence[Array]], counted: Sequence[str]
    ) -> None:
        self._programs, self._batches, self._counted = programs, batches, counted
        self._next = 0

    def __call__(self) -> tuple[float, int]:
        """(seconds of an op x ops, ops)."""
        program = self._programs[self._next % len(self._programs)]
        batch = self._batches[self._next % len(self._batches)]
        self._next += 1
        seconds: dict[str, list[float]] = {}
        for name, took in program.time_calls(*batch):
            if name in self._counted:
                seconds.setdefault(name, []).append(took)
        count = max(len(times) for times in seconds.values())
        # A rounding of rows that several linears share counts for each of them, as in a model.
        return count * sum(sum(times) / len(times) for times in seconds.values()), count


def _sampler(runtime: Runtime, data: Data) -> Opened:
    case = data.case
    rows, out = np.zeros(case.rows, SAMPLE_ROW), SampleOutput(case.rows, 0)
    rows["logit_row"], rows["num_top"], rows["num_allowed"] = np.arange(case.rows), -1, -1
    rows["top_p"], rows["repetition_penalty"], rows["seed"] = 1.0, 1.0, np.arange(case.rows)
    if case.name == "top-p":
        rows["temperature"], rows["top_p"] = 1.0, TOP_P

    def sample() -> tuple[float, int]:
        started = time.perf_counter()
        for _ in range(4):
            runtime.sample(data.logits, rows, out)
        return time.perf_counter() - started, 4

    sample()
    tokens = out.tokens[data.sample.rows]
    got = tokens if case.name == "greedy" else in_top_p(data.logits[data.sample.rows], tokens)
    return Opened(sample, data.error(got), "sample")
