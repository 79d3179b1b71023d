"""`NativeOps`: weights packed for the native kernels, and a model's ops recorded into a native program.

Imports numpy and `paged_kernels.native`, never torch. A model's forward runs once, in `record`: every op then writes
a kernel call into the program and returns the number of its value. From there on the program is replayed, one call per
step. Outside `record` the step's ops have nothing to write into, which is asserted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import numpy as np
from paged_kernels.native import (
    BLOCK_N,
    ITEM_BYTES,
    Buffer,
    KVPool,
    PackedWeight,
    Program,
    Runtime,
    StoredTensor,
)
from paged_kernels.quantized import QuantizedWeight, alike

from pagedcli.errors import CheckpointError, ConfigError
from pagedcli.ops.batch import ForwardBatch, KVCache
from pagedcli.ops.protocol import Activation, AttentionShape, HeadNorms, OpReport
from pagedcli.ops.weights import (
    EmbeddingTable,
    FusedLinear,
    HasBlocks,
    HostTensor,
    LinearPart,
    QuantizedPart,
    RopeTable,
    Shard,
    StoredBlocks,
    StoredPart,
    Vector,
    is_quantized,
    part_name,
)

PIECE_ELEMENTS = 1 << 18
"""Elements of a stored tensor that are converted at a time: 1 MB of float32."""
PIECES_AHEAD = 4
"""Pieces under conversion for each thread, so that packing does not wait."""
PACKED_FROM = ("F32", "BF16", "F16", "F64")
PACKED_BLOCKS = ("Q4_0", "Q4_1", "Q8_0")

Segment = tuple[PackedWeight | QuantizedWeight, Buffer | None]
"""Some parts of a fused linear, which are packed together, and their bias."""

OPS = (
    *("embedding", "rms_norm", "add_rms_norm", "linear", "rope_kv_write"),
    *("attention", "gated", "add", "logit_rows", "head"),
)


class NativeOps:
    """Implements `Ops` for the CPU; a value is a number of the program that is being recorded.

    Args:
        dtype: "float32" or "bfloat16".
        threads: Compute threads.
        cpus: Logical CPUs for them; empty: left to the system.
        isa: Instruction-set variant; empty: the best of this machine.
        activation: Inputs of quantized linears: "int8", "bf16" or "float32"; empty: the dtype's own.

    Attributes:
        runtime: The threads, which also sample.
        weight_bytes: Memory of the weights packed so far.
    """

    def __init__(
        self,
        dtype: str,
        *,
        threads: int = 1,
        cpus: Sequence[int] = (),
        isa: str = "",
        activation: str = "",
    ) -> None:
        if dtype not in ITEM_BYTES:
            raise ConfigError(
                f"model.dtype is {dtype!r}: the native CPU engine computes in {' or '.join(ITEM_BYTES)}"
            )
        self.runtime = Runtime(threads, cpus=cpus, isa=isa)
        self.weight_bytes = 0
        self._dtype = dtype
        self._activation = {"": dtype, "bf16": "bfloat16"}.get(activation, activation)
        self._recording: Program | None = None
        self._converters = ThreadPoolExecutor(threads, "paged-convert")

    def with_threads(self, threads: int, cpus: Sequence[int] = ()) -> NativeOps:
        """The same packed weights, computed with by other threads."""
        other = copy.copy(self)
        other.runtime = Runtime(threads, cpus=cpus, isa=self.runtime.isa)
        return other

    @property
    def device(self) -> str:
        """Always the CPU."""
        return "cpu"

    @property
    def dtype(self) -> str:
        """Of weights, activations and KV."""
        return self._dtype

    def report(self) -> dict[str, OpReport]:
        """The variant of the kernels serves every op."""
        plural = "" if self.runtime.threads == 1 else "s"
        detail = f"{self.runtime.isa} kernels, {self.runtime.threads} thread{plural}"
        return dict.fromkeys(OPS, OpReport("native", detail))

    def record(self, forward: Callable[[Any, Any], int], kv: KVPool) -> Program:
        """Run a model's forward once and keep its kernel calls. No weights are loaded after this.

        Args:
            forward: `Model.forward` of a model that was loaded with these ops.
            kv: The cache that the program will write and read.
        """
        self._converters.shutdown()
        program = Program(self.runtime, self._dtype, kv.block_size)
        self._recording = program
        try:
            program.finish(forward(None, kv))
        finally:
            self._recording = None
        return program

    # ---- weights

    def load_vector(self, tensor: HostTensor) -> Vector:
        """[size], such as a norm's weight, in float32 once rounded to the dtype."""
        return Vector(tensor.name, tensor.shape[0], self._floats([tensor]))

    def load_embedding(self, tensor: HostTensor) -> EmbeddingTable:
        """[vocab_size, hidden_size], packed as a linear is, so that a tied head can be the same memory."""
        return EmbeddingTable(tensor.name, tensor.shape[0], tensor.shape[1], self._pack([tensor]))

    def load_quantized_embedding(self, part: QuantizedPart) -> EmbeddingTable:
        """As `load_embedding`, of codes: rows are dequantized as they are read."""
        return EmbeddingTable(part.name, part.shape[0], part.shape[1], self._pack_quantized([part]))

    def load_linear(
        self, weights: Sequence[HostTensor], biases: Sequence[HostTensor] | None, shard: Shard
    ) -> FusedLinear:
        """One fused linear; `weights` are [part, in_features] each, `biases` [part] each or None."""
        parts = tuple(LinearPart(part.name.removesuffix(".weight"), part.shape[0]) for part in weights)
        bias = None if biases is None else self._floats(biases)
        return FusedLinear(parts, weights[0].shape[1], shard, "dense", self._pack(weights), bias)

    def load_quantized(
        self, parts: Sequence[StoredPart], biases: Sequence[HostTensor] | None, shard: Shard
    ) -> FusedLinear:
        """One fused linear of codes, or of codes and dense parts.

        Its weight is a `QuantizedWeight` and its bias a `Buffer`, or, if the parts differ, the weight is a tuple of
        pairs (weight, bias) and the bias None.
        """
        names = tuple(LinearPart(part_name(part), part.shape[0]) for part in parts)
        segments: list[Segment] = []
        first = 0
        for run in _runs(parts):
            own = None if biases is None else self._floats(biases[first : first + len(run)])
            segments.append((self._pack_run(run), own))
            first += len(run)
        weight, bias = segments[0] if len(segments) == 1 else (tuple(segments), None)
        return FusedLinear(names, parts[0].shape[1], shard, "quantized", weight, bias)

    def tied_head(self, table: EmbeddingTable) -> FusedLinear:
        """A head that is the embedding's packing itself."""
        parts = (LinearPart("lm_head", table.vocab_size),)
        method = "quantized" if isinstance(table.data, QuantizedWeight) else "dense"
        return FusedLinear(parts, table.hidden_size, "column", method, table.data, None)

    def load_rope(self, cos: Any, sin: Any) -> RopeTable:
        """From numpy float32 arrays [max_positions, head_dim / 2]."""
        return RopeTable(cos.shape[0], 2 * cos.shape[1], _buffer_of(cos), _buffer_of(sin))

    # ---- one step, recorded

    def embedding(self, table: EmbeddingTable, batch: ForwardBatch) -> int:
        """[num_tokens, hidden_size]."""
        return self._program.embedding(table.data)

    def rms_norm(self, x: int, weight: Vector, eps: float) -> int:
        """Computed in float32, rounded once."""
        return self._program.rms_norm(x, weight.data, eps)

    def add_rms_norm(self, x: int, residual: int, weight: Vector, eps: float) -> tuple[int, int]:
        """(norm of the sum, the sum)."""
        return self._program.add_rms_norm(x, residual, weight.data, eps)

    def linear(self, x: int, weight: FusedLinear) -> int:
        """[rows, out_features]."""
        return self._multiply(x, weight, float32_out=False)

    def rope_kv_write(
        self,
        qkv: int,
        shape: AttentionShape,
        rope: RopeTable,
        norms: HeadNorms | None,
        batch: ForwardBatch,
        kv: KVCache | KVPool,
        layer: int,
    ) -> int:
        """Norm (if any) and rotate q and k, write k and v to the cache; returns q, [num_tokens, q_size]."""
        head_norms = None if norms is None else (norms.q.data, norms.k.data, norms.eps)
        return self._program.rope_kv_write(
            qkv, _heads(shape), (rope.cos, rope.sin), _pool(kv), layer, head_norms
        )

    def attention(
        self, q: int, shape: AttentionShape, batch: ForwardBatch, kv: KVCache | KVPool, layer: int
    ) -> int:
        """Causal attention of every row over its own sequence's cached keys, [num_tokens, q_size]."""
        return self._program.attention(q, _heads(shape), shape.scale, shape.window, _pool(kv), layer)

    def gated(self, gate_up: int, activation: Activation) -> int:
        """activation(first half) * second half, [rows, features / 2]."""
        return self._program.gated(gate_up, activation)

    def add(self, x: int, residual: int) -> int:
        """The sum."""
        return self._program.add(x, residual)

    def logit_rows(self, x: int, batch: ForwardBatch) -> int:
        """The rows of the step's `logit_rows`."""
        return self._program.logit_rows(x)

    def head(self, x: int, weight: FusedLinear) -> int:
        """Logits, [rows, vocab_size] float32, not rounded to the dtype on the way."""
        return self._multiply(x, weight, float32_out=True)

    # ---- helpers

    @property
    def _program(self) -> Program:
        assert self._recording is not None, "ops of the native engine run only while a program is recorded"
        return self._recording

    def _multiply(self, x: int, linear: FusedLinear, *, float32_out: bool) -> int:
        weight, program = linear.weight, self._program
        if isinstance(weight, PackedWeight):
            return (program.head if float32_out else program.linear)(x, weight, linear.bias)
        if isinstance(weight, QuantizedWeight):
            return program.linear_quantized(
                x, weight, linear.bias, activation=self._activation, float32_out=float32_out
            )
        return program.linear_segments(x, weight, activation=self._activation, float32_out=float32_out)

    def _floats(self, tensors: Sequence[HostTensor]) -> Buffer:
        _check_dtypes(tensors)
        buffer = self.runtime.floats(tensors, self._dtype)
        self.weight_bytes += buffer.nbytes
        return buffer

    def _pack(self, tensors: Sequence[HostTensor]) -> PackedWeight:
        _check_dtypes(tensors)
        reader = _PieceReader(self._converters, PIECES_AHEAD * self.runtime.threads)
        parts: list[StoredTensor] = []
        orders: list[Any] = []
        for tensor in tensors:
            blocks = _blocks_of(tensor)
            found = reader.pieces(tensor) if blocks is None else [blocks]
            parts += found
            orders += [None] * len(found) if blocks is None else [blocks.order]
        packed = self.runtime.pack(parts, self._dtype, orders)
        for tensor in tensors:
            tensor.release()
        self.weight_bytes += packed.buffer.nbytes
        return packed

    def _pack_quantized(self, parts: Sequence[QuantizedPart]) -> QuantizedWeight:
        packed = self.runtime.pack_quantized(parts)
        self.weight_bytes += packed.nbytes
        return packed

    def _pack_run(self, parts: Sequence[StoredPart]) -> PackedWeight | QuantizedWeight:
        if is_quantized(parts[0]):
            return self._pack_quantized(cast("Sequence[QuantizedPart]", parts))
        return self._pack(cast("Sequence[HostTensor]", parts))


def _runs(parts: Sequence[StoredPart]) -> list[list[StoredPart]]:
    """Neighbours that one packed weight can hold."""
    runs = [[parts[0]]]
    for part in parts[1:]:
        last = runs[-1][-1]
        if is_quantized(part) and is_quantized(last):
            together = alike(last, part)
        else:
            together = not is_quantized(part) and not is_quantized(last)
        runs[-1].append(part) if together else runs.append([part])
    return runs


class _Piece:
    """Some rows of a tensor, which are converted on the pool shortly before they are packed."""

    def __init__(self, reader: _PieceReader, index: int, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype
        self._reader, self._index = reader, index

    @property
    def data(self) -> Any:
        """The bytes; asked for once, in the order of the pieces."""
        return self._reader.take(self._index)


class _PieceReader:
    """Cuts tensors into pieces of rows and keeps `ahead` of them under conversion.

    So a quantized tensor is never there as a whole in float32, and its conversion uses all threads. What the file has
    as it is wanted passes through as a view, and its memory goes as soon as the next piece is asked for: then this
    one is packed.
    """

    def __init__(self, pool: ThreadPoolExecutor, ahead: int) -> None:
        self._pool, self._ahead = pool, ahead
        self._jobs: list[Callable[[], HostTensor]] = []
        self._futures: dict[int, Future[HostTensor]] = {}
        self._started = 0
        self._taken: HostTensor | None = None

    def pieces(self, tensor: HostTensor) -> list[StoredTensor]:
        """The tensor's rows, in order; they come after those of the tensors before."""
        found: list[StoredTensor] = []
        for first, last in _ranges(tensor.shape[0], tensor.shape[1]):
            shape = (last - first, tensor.shape[1])
            found.append(_Piece(self, len(self._jobs), shape, tensor.dtype))
            self._jobs.append(lambda t=tensor, a=first, b=last: t.rows(a, b))  # type: ignore[misc]
        return found

    def take(self, index: int) -> Any:
        """Bytes of a piece; starts those that come after it."""
        while self._started < min(index + self._ahead, len(self._jobs)):
            self._futures[self._started] = self._pool.submit(self._jobs[self._started])
            self._started += 1
        if self._taken is not None:
            self._taken.release()
        self._taken = self._futures.pop(index).result()
        return self._taken.data


def _blocks_of(tensor: HostTensor) -> StoredBlocks | None:
    """The tensor's blocks, if the kernels read such blocks themselves."""
    if not isinstance(tensor, HasBlocks):
        return None
    kind, data, order = tensor.blocks()
    if kind not in PACKED_BLOCKS:
        return None
    return StoredBlocks(kind, tensor.shape, data, None if order is None else np.asarray(order, np.int64))


def _ranges(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of about `PIECE_ELEMENTS`, at whole packed blocks."""
    step = max(1, PIECE_ELEMENTS // columns // BLOCK_N) * BLOCK_N
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def _check_dtypes(tensors: Sequence[HostTensor]) -> None:
    for tensor in tensors:
        if tensor.dtype not in PACKED_FROM:
            raise CheckpointError(
                f"tensor {tensor.name} is stored as {tensor.dtype}: the native CPU engine reads "
                f"{', '.join(PACKED_FROM)} and the quantized kinds of GGUF files"
            )


def _buffer_of(values: np.ndarray[Any, np.dtype[np.float32]]) -> Buffer:
    """A copy of float32 numbers where the kernels want it."""
    buffer = Buffer(values.nbytes)
    np.frombuffer(memoryview(buffer), np.float32)[:] = values.reshape(-1)
    return buffer


def _heads(shape: AttentionShape) -> tuple[int, int, int]:
    return shape.num_heads, shape.num_kv_heads, shape.head_dim


def _pool(kv: KVCache | KVPool) -> KVPool:
    assert isinstance(kv, KVPool), "the native engine keeps keys and values in a KVPool"
    return kv
