"""The native CPU engine from Python: memory, packed weights, recorded programs, sampling. Imports numpy, never torch.

A `Runtime` is one variant of the kernels (portable, avx2, avx512, avx512bf16, amx, neon, neondot) and a pool of
threads. A `Program` is recorded once, op by op, and then run once per step by one call that holds no GIL:

    runtime = Runtime(threads=2)
    table = runtime.pack([embedding_tensor], "bfloat16")
    kv = KVPool(num_layers=1, num_blocks=64, num_kv_heads=3, block_size=16, head_dim=64, dtype="bfloat16")
    program = Program(runtime, "bfloat16", block_size=16)
    x = program.embedding(table)
    ...
    program.finish(program.head(program.logit_rows(x), table))
    program.run(token_ids, positions, slot_mapping, query_start, seq_lens, block_table, logit_rows)
    logits = program.logits()  # numpy [num_logit_rows, vocab_size] float32, valid until the next run

Results are the same bits for a row whatever rows share its batch, however a prompt is cut into chunks, whatever the
block size and the number of threads; other variants, and the other dtype, round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paged_kernels.checks import ShapeError

try:
    from paged_kernels import _native
except ImportError as error:  # the package was not built: say how, not only that a module is missing
    raise ImportError(
        "the native kernels are not built: run `pip install .` (needs a C++20 compiler), or `make native` in a checkout"
    ) from error

from paged_kernels.quantized import ROW_KINDS, QuantizedWeight, StoredCodes
from paged_kernels.quantized import pack as _pack_quantized

Buffer = _native.Buffer
NativeError = _native.Error

DTYPES = {"float32": 0, "bfloat16": 1}
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
STORED_DTYPES = {"F32": 0, "BF16": 1, "F16": 2, "F64": 3, "Q4_0": 4, "Q4_1": 5, "Q8_0": 6}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
BLOCK_N = 16
BLOCK_K = 32

SAMPLE_ROW = np.dtype(
    [
        ("logit_row", np.int64),
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float64),
        ("presence_penalty", np.float64),
        ("frequency_penalty", np.float64),
        ("top_k", np.int64),
        ("seed", np.uint64),
        ("position", np.int64),
        ("sample_index", np.int64),
        ("tokens", np.uint64),
        ("num_prompt", np.int64),
        ("min_tokens", np.int64),
        ("allowed", np.uint64),
        ("banned", np.uint64),
        ("stop_ids", np.uint64),
        ("bias_ids", np.uint64),
        ("bias", np.uint64),
        ("bad_heads", np.uint64),
        ("bad_last", np.uint64),
        ("num_allowed", np.int64),
        ("num_banned", np.int64),
        ("num_stop_ids", np.int64),
        ("num_bias", np.int64),
        ("num_bad", np.int64),
        ("bad_length", np.int64),
        ("num_top", np.int64),
    ]
)
"""One row to sample, as PagedSampleRow in include/paged/kernels.h says. Pointers are addresses of arrays that the
caller keeps alive: int32 `tokens` (at least `position` of them), `allowed` (num_allowed -1: all are), `banned`,
`stop_ids`, `bias_ids`, `bad_heads` [num_bad, bad_length], `bad_last`; float64 `bias`. num_top -1: no logprobs."""

FAULT_NONE, FAULT_NOT_FINITE, FAULT_NOTHING_LEFT = 0, 1, 2


class StoredTensor(Protocol):
    """A tensor as a checkpoint stores it."""

    @property
    def dtype(self) -> str:
        """One of F32, BF16, F16, F64, and for weights the blocks Q4_0, Q4_1 and Q8_0 of GGUF files."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, outermost first."""

    @property
    def data(self) -> Any:
        """1-D numpy uint8 view of the bytes, row-major."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """[out_features, in_features] in the packed layout of include/paged/types.h."""

    buffer: Buffer
    out_features: int
    in_features: int
    dtype: str


def available_isas() -> tuple[str, ...]:
    """Variants that are built and that this machine can run, best first."""
    return _native.available_isas()


def packed_bytes(out_features: int, in_features: int, dtype: str) -> int:
    """Bytes of a packed weight."""
    rows = -(-out_features // BLOCK_N) * BLOCK_N
    columns = -(-in_features // BLOCK_K) * BLOCK_K
    return rows * columns * ITEM_BYTES[dtype]


class Runtime:
    """A variant of the kernels and its threads.

    One thread at a time may run programs or sample; it works too, beside `threads` - 1 threads of the pool. Idle
    threads spin for some microseconds, then sleep.

    Args:
        threads: At least 1, the caller's included.
        cpus: Logical CPUs to pin to, one per thread; empty: the system places them.
        isa: Variant; empty: that of the environment variable PAGED_CPU_ISA, else the best one.
    """

    def __init__(self, threads: int, *, cpus: Sequence[int] = (), isa: str = "") -> None:
        self._native = _native.Runtime(threads, tuple(cpus), isa)

    @property
    def isa(self) -> str:
        """Name of the variant in use."""
        return self._native.isa

    @property
    def threads(self) -> int:
        """Threads at work in a step, the caller's included."""
        return self._native.threads

    def bind_caller(self) -> None:
        """Pin the calling thread to the first CPU: for a thread that only runs programs."""
        self._native.bind_caller()

    def pack(
        self,
        parts: Sequence[StoredTensor],
        dtype: str,
        orders: Sequence[npt.NDArray[np.int64] | None] | None = None,
    ) -> PackedWeight:
        """Pack tensors [rows, in_features] one below the other.

        Args:
            parts: The tensors.
            dtype: Of the packed weight.
            orders: For each of them which of its rows comes where, [rows]; None: as they lie.
        """
        in_features = parts[0].shape[1]
        rows = sum(part.shape[0] for part in parts)
        buffer = Buffer(packed_bytes(rows, in_features, dtype))
        offset = 0
        for part, order in zip(parts, orders or [None] * len(parts), strict=True):
            if len(part.shape) != 2 or part.shape[1] != in_features:
                raise ShapeError(f"a part has shape {list(part.shape)}, expected [any, {in_features}]")
            self._native.pack(
                buffer,
                DTYPES[dtype],
                offset,
                part.shape[0],
                in_features,
                part.data,
                STORED_DTYPES[part.dtype],
                order,
            )
            offset += part.shape[0]
        return PackedWeight(buffer, rows, in_features, dtype)

    def pack_quantized(self, parts: Sequence[StoredCodes]) -> QuantizedWeight:
        """Pack quantized tensors one below the other; see `paged_kernels.quantized.alike`."""
        return _pack_quantized(self._native, parts)

    def floats(self, parts: Sequence[StoredTensor], dtype: str) -> Buffer:
        """Vectors one after the other as float32, rounded to `dtype` before: norm weights and biases."""
        values = np.concatenate([_as_floats(part) for part in parts])
        if dtype == "bfloat16":
            _round_to_bfloat16(values.view(np.uint32))
        return self.upload(values)

    def upload(self, values: npt.NDArray[np.float32]) -> Buffer:
        """Floats in the order of memory, such as the cosines of `rope_kv_write`."""
        flat = np.ascontiguousarray(values, np.float32)
        buffer = Buffer(flat.nbytes)
        np.frombuffer(memoryview(buffer), np.float32)[:] = flat.reshape(-1)
        return buffer

    def sample(self, logits: npt.NDArray[np.float32], rows: npt.NDArray[np.void], out: SampleOutput) -> None:
        """Choose a token for every row, and log-probabilities for rows whose num_top is not -1.

        Args:
            logits: [any, vocab_size].
            rows: [num_rows] of SAMPLE_ROW.
            out: With room for num_rows rows.
        """
        self._native.sample(
            logits, rows, out.tokens, out.faults, out.logprobs, out.ranks, out.top_ids, out.top
        )

    def logprobs(
        self,
        logits: npt.NDArray[np.float32],
        logit_rows: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        num_top: npt.NDArray[np.int64],
        out: SampleOutput,
    ) -> None:
        """Log-probabilities of given tokens, [num_rows] each, into `out` (its tokens and faults are left alone)."""
        self._native.logprobs(
            logits, logit_rows, tokens, num_top, out.logprobs, out.ranks, out.top_ids, out.top
        )


def _as_floats(tensor: StoredTensor) -> npt.NDArray[np.float32]:
    if tensor.dtype == "BF16":
        widened: npt.NDArray[np.uint32] = tensor.data.view(np.uint16).astype(np.uint32) << 16
        return widened.view(np.float32)
    stored = {"F32": np.float32, "F16": np.float16, "F64": np.float64}[tensor.dtype]
    return np.asarray(tensor.data.view(stored), np.float32)


def _round_to_bfloat16(bits: npt.NDArray[np.uint32]) -> None:
    """In place, to nearest, ties to even; NaN stays NaN."""
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    bits += 0x7FFF + ((bits >> 16) & 1)
    bits &= 0xFFFF0000
    bits[nan] = 0x7FC00000


class SampleOutput:
    """Arrays that sampling writes, for up to `rows` rows with `max_top` alternatives each."""

    def __init__(self, rows: int, max_top: int) -> None:
        self.tokens = np.zeros(rows, np.int64)
        self.faults = np.zeros(rows, np.int64)
        self.logprobs = np.zeros(rows, np.float64)
        self.ranks = np.zeros(rows, np.int64)
        self.top_ids = np.zeros((rows, max(1, max_top)), np.int64)
        self.top = np.zeros((rows, max(1, max_top)), np.float64)


class KVPool:
    """Keys and values of all layers, in one allocation that takes memory where it is written.

    [num_layers, 2 (key, value), num_blocks, num_kv_heads, block_size, head_dim] of `dtype`.
    """

    def __init__(
        self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: str
    ) -> None:
        self.num_layers, self.num_blocks, self.block_size = num_layers, num_blocks, block_size
        self.block_bytes = num_kv_heads * block_size * head_dim * ITEM_BYTES[dtype]
        # Small pages: blocks of a layer lie far apart, and a huge page would come whole for each.
        self.buffer = Buffer(2 * num_layers * num_blocks * self.block_bytes, huge=False)

    @property
    def num_bytes(self) -> int:
        """Memory of the pool."""
        return self.buffer.nbytes

    def key_offset(self, layer: int) -> int:
        """Bytes from the pool's start to the keys of a layer."""
        return 2 * layer * self.num_blocks * self.block_bytes

    def value_offset(self, layer: int) -> int:
        """As `key_offset`."""
        return self.key_offset(layer) + self.num_blocks * self.block_bytes

    def copy_blocks(self, runtime: Runtime, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks of every layer; all are read before any is written."""
        if copies:
            pairs = np.array(copies, np.int64).reshape(-1, 2)
            runtime._native.copy_blocks(
                self.buffer, 2 * self.num_layers, self.num_blocks, self.block_bytes, pairs
            )


HAS_FAULTS, HAS_SCORES, HAS_PROMPT = 1, 2, 4
"""Notes of a step: some entry has a fault, a sampled token has scores, a prompt token has."""


class Slots:
    """What is remembered of the sequences that run, a slot for each: tokens, block table, sampling.

    A step is one call (`Program.step`) with its entries, tuples of

        request, slot, epoch, start, n, samples, logit_rows, new_blocks, admission

    as in pagedcli's `PlanEntry` (epoch and admission are not looked at): compute positions start to start + n - 1 of
    the slot's sequence and, if `samples`, the token after them. An entry that computes a position without a token, or
    beyond the slot's blocks, is an AssertionError. The `row` of an admission holds addresses of arrays; the caller
    keeps those alive until the slot is freed.

    Args:
        slots: Sequences that can run.
        max_model_len: Tokens of the longest.
        block_size: Tokens of a block.
        vocab_size: Rows of the head.
        max_top: Most alternatives whose log-probabilities may be asked for.
    """

    def __init__(
        self, slots: int, *, max_model_len: int, block_size: int, vocab_size: int, max_top: int
    ) -> None:
        self._native = _native.Slots(slots, max_model_len, block_size, vocab_size, max(1, max_top))

    @property
    def seconds(self) -> float:
        """Time inside the kernels, all of it without the interpreter's lock."""
        return self._native.seconds

    def admit(
        self,
        slot: int,
        tokens: tuple[int, ...],
        table: tuple[int, ...],
        row: npt.NDArray[np.void],
        prompt_top: int = 0,
    ) -> None:
        """A sequence starts in a slot.

        Args:
            slot: 0 to slots - 1.
            tokens: All that are known.
            table: Its blocks.
            row: [1] of SAMPLE_ROW; tokens, position and logit_row are filled in for every step.
            prompt_top: Alternatives for prompt tokens whose rows of logits are asked for.
        """
        self._native.admit(slot, tokens, table, row, prompt_top)

    def free(self, slot: int) -> None:
        """Forget a slot; nothing happens to one that is free."""
        self._native.free(slot)

    def lay_out(self, entries: tuple[Any, ...]) -> list[npt.NDArray[Any]]:
        """The arrays of a step as `Program.run` takes them, for logits that come from elsewhere; see `read`."""
        found = self._native.lay_out(entries)
        kinds = (*(np.int64,) * 3, *(np.int32,) * 3, np.int64)
        arrays = [np.frombuffer(part, kind).copy() for part, kind in zip(found, kinds, strict=True)]
        arrays[5] = arrays[5].reshape(len(entries), -1)
        return arrays

    def read(self, runtime: Runtime, logits: npt.NDArray[np.float32]) -> tuple[tuple[int, ...], int]:
        """Sample from logits, [rows of the step that was laid out, vocab_size]; returns what `Program.step` does."""
        return self._native.read(runtime._native, logits)

    def scores(self) -> list[tuple[int, int, float, int, tuple[tuple[int, float], ...]]]:
        """(entry, token, log-probability, rank, ((token, log-probability), ...)) of sampled tokens."""
        return self._native.scores()

    def prompt_scores(self) -> list[tuple[int, int, float, int, tuple[tuple[int, float], ...]]]:
        """As `scores`, of prompt tokens, in the order of the entries and their rows."""
        return self._native.prompt_scores()

    def faults(self) -> tuple[int, ...]:
        """Of each entry of the last step, one of the FAULT numbers."""
        return self._native.faults()


class Program:
    """Kernel calls recorded once and run once per step.

    Every op returns a value id. A value may be used any number of times; buffers are shared by values that do not live
    at the same time, and `finish` fuses gate_up + gated where that is possible.
    """

    def __init__(self, runtime: Runtime, dtype: str, block_size: int) -> None:
        self.runtime, self.dtype = runtime, dtype
        self._native = _native.Program(runtime._native, DTYPES[dtype], block_size)

    def embedding(self, table: PackedWeight | QuantizedWeight) -> int:
        """[num_tokens, hidden_size] of the step's token ids."""
        if isinstance(table, QuantizedWeight):
            return self._native.quantized_embedding(table.in_features, *table.arguments)
        return self._native.embedding(table.buffer, table.out_features, table.in_features)

    def rms_norm(self, x: int, weight: Buffer, eps: float) -> int:
        """Row by row, x / sqrt(mean(x^2) + eps) * weight."""
        return self._native.norm(x, -1, weight, eps)[0]

    def add_rms_norm(self, x: int, residual: int, weight: Buffer, eps: float) -> tuple[int, int]:
        """(norm of the sum, the sum rounded to the dtype)."""
        return self._native.norm(x, residual, weight, eps)

    def linear(self, x: int, weight: PackedWeight, bias: Buffer | None = None) -> int:
        """Row by row, x @ weight.T + bias, of the program's dtype."""
        return self._native.linear(x, weight.buffer, weight.out_features, bias, False)

    def head(self, x: int, weight: PackedWeight, bias: Buffer | None = None) -> int:
        """As `linear`, the result in float32 without a rounding between."""
        return self._native.linear(x, weight.buffer, weight.out_features, bias, True)

    def linear_quantized(
        self,
        x: int,
        weight: QuantizedWeight,
        bias: Buffer | None = None,
        *,
        activation: str = "int8",
        float32_out: bool = False,
    ) -> int:
        """Row by row, x @ weight.T + bias; `finish` fuses it with gated and with a residual as it does `linear`.

        Args:
            x: [rows, in_features].
            weight: Packed.
            bias: [out_features] float32.
            activation: What x is rounded to before: "int8" in blocks with a scale each, "bfloat16" (the weight is
                then rounded too), or "float32".
            float32_out: As `head`.
        """
        return self._native.quantized_linear(
            x, ROW_KINDS[activation], bias, -1, 0, float32_out, *weight.arguments
        )

    def linear_segments(
        self,
        x: int,
        segments: Sequence[tuple[PackedWeight | QuantizedWeight, Buffer | None]],
        *,
        activation: str = "int8",
        float32_out: bool = False,
    ) -> int:
        """Outputs of several weights and their biases over one input, side by side in one value."""
        features = sum(weight.out_features for weight, _ in segments)
        out, column = self._native.allocate(x, features, float32_out), 0
        for weight, bias in segments:
            if isinstance(weight, QuantizedWeight):
                kind = ROW_KINDS[activation]
                self._native.quantized_linear(x, kind, bias, out, column, False, *weight.arguments)
            else:
                self._native.linear_into(x, weight.buffer, weight.out_features, bias, out, column)
            column += weight.out_features
        return out

    def rope_kv_write(
        self,
        qkv: int,
        heads: tuple[int, int, int],
        angles: tuple[Buffer, Buffer],
        kv: KVPool,
        layer: int,
        norms: tuple[Buffer, Buffer, float] | None = None,
    ) -> int:
        """Norm and rotate q and k, write k and v at the step's slots; returns q.

        Args:
            qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim].
            heads: (num_heads, num_kv_heads, head_dim).
            angles: Cosines and sines, [max_positions, head_dim / 2] float32.
            kv: Written.
            layer: Layer of `kv`.
            norms: Weights [head_dim] float32 of q and k, and eps.
        """
        q_norm, k_norm, eps = norms if norms is not None else (None, None, 0.0)
        return self._native.rope(
            qkv, *heads, *angles, q_norm, k_norm, eps, kv.buffer, kv.key_offset(layer), kv.value_offset(layer)
        )

    def attention(
        self, q: int, heads: tuple[int, int, int], scale: float, window: int | None, kv: KVPool, layer: int
    ) -> int:
        """Causal attention over the cached keys, [rows, num_heads * head_dim]."""
        return self._native.attention(
            q, *heads, scale, window or 0, kv.buffer, kv.key_offset(layer), kv.value_offset(layer)
        )

    def gated(self, gate_up: int, activation: str) -> int:
        """activation(first half) * second half; activation is "silu", "gelu" or "gelu_tanh"."""
        return self._native.gated(gate_up, ACTIVATIONS[activation])

    def add(self, x: int, residual: int) -> int:
        """The sum, rounded once."""
        return self._native.add(x, residual)

    def logit_rows(self, x: int) -> int:
        """The rows of the step's logit_rows."""
        return self._native.select(x)

    def finish(self, output: int, *, fuse: bool = True) -> None:
        """End the recording; `output` is what `logits` returns."""
        self._native.finish(output, fuse)

    def run(
        self,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        slot_mapping: npt.NDArray[np.int64],
        query_start: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_table: npt.NDArray[np.int32],
        logit_rows: npt.NDArray[np.int64],
    ) -> None:
        """One step. Arrays as in pagedcli's ForwardBatch, C-contiguous; checked against each other."""
        self._native.run(token_ids, positions, slot_mapping, query_start, seq_lens, block_table, logit_rows)

    def step(self, slots: Slots, entries: tuple[Any, ...]) -> tuple[tuple[int, ...], int]:
        """One step of some slots, sampling included; memory for logits is bounded, and `logits` has none of them.

        Returns:
            The token of each entry (-1: none was sampled, or it has a fault), and the HAS_ notes joined by or.
        """
        return slots._native.step(self._native, entries)

    def time_calls(self, *step: npt.NDArray[Any]) -> list[tuple[str, float]]:
        """As `run`, call by call: the kernel and the seconds of each, for measurements."""
        return self._native.time_calls(*step)

    def logits(self) -> npt.NDArray[np.float32]:
        """The output of the last run, [rows, features]; a view that the next run overwrites."""
        return np.asarray(self._native)

    def describe(self) -> str:
        """The calls, one a line: op, shapes, buffers."""
        return self._native.describe()

    @property
    def workspace_bytes(self) -> int:
        """Memory of the buffers between ops, as of the largest step so far."""
        return self._native.workspace_bytes()
