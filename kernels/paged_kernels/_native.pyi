"""The compiled module: kernels/src/binding. `native`, `quantized` and `gptq` are the typed ways to it."""

from collections.abc import Sequence
from typing import Any, TypeAlias, final

# Anything with the buffer protocol, C-contiguous; sizes and element sizes are checked. bfloat16 is 2-byte integers.
_Readable: TypeAlias = Any
_Writable: TypeAlias = Any

ABI_VERSION: int

class Error(ValueError):
    """A caller's mistake, or what this machine cannot do, in one line with the numbers."""

def available_isas() -> tuple[str, ...]:
    """Variants that are built and that this machine can run, best first."""

def gptq_strip(
    state: _Readable,
    unit: _Readable,
    scales: _Readable,
    zeros: _Readable,
    groups: _Readable,
    errors: _Writable,
    codes: _Writable,
    top: int,
) -> None:
    """See `gptq.round_strip`; any thread may call it, without the GIL."""

def gptq_losses(
    weights: _Readable,
    scales: _Readable,
    zeros: _Readable,
    importance: _Readable,
    losses: _Writable,
    top: int,
) -> None:
    """See `gptq.losses`; any thread may call it, without the GIL."""

@final
class Buffer:
    """Zeroed memory, aligned to 64 bytes (2 MB and in huge pages if large); bytes by the buffer protocol."""

    def __new__(cls, num_bytes: int, huge: bool = True) -> Buffer: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Runtime:
    """A variant and a pool of threads; calls are made by one thread at a time, without the GIL."""

    def __new__(cls, threads: int, cpus: Sequence[int], isa: str) -> Runtime: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def bind_caller(self) -> None: ...
    def pack(
        self,
        packed: Buffer,
        dtype: int,
        row_offset: int,
        rows: int,
        in_features: int,
        source: _Readable,
        source_dtype: int,
        order: _Readable | None,
    ) -> None: ...
    def pack_quantized(self, *arguments: Any) -> None:
        """A weight's ten arguments (`QuantizedWeight.arguments`), row_offset, in_features, codes, scales, zeros."""

    def copy_blocks(
        self, pool: Buffer, planes: int, num_blocks: int, block_bytes: int, copies: _Readable
    ) -> None: ...
    def call(self, kernel: str, params: _Readable) -> None:
        """One kernel on a parameter struct of include/paged/kernels.h, unchecked: for tests and measurements."""

    def sample(
        self,
        logits: _Readable,
        rows: _Readable,
        tokens: _Writable,
        faults: _Writable,
        logprobs: _Writable,
        ranks: _Writable,
        top_ids: _Writable,
        top: _Writable,
    ) -> None: ...
    def logprobs(
        self,
        logits: _Readable,
        logit_rows: _Readable,
        tokens: _Readable,
        num_top: _Readable,
        logprobs: _Writable,
        ranks: _Writable,
        top_ids: _Writable,
        top: _Writable,
    ) -> None: ...

@final
class Program:
    """A recorded list of kernel calls; values are small integers. As a buffer: the output of the last run."""

    def __new__(cls, runtime: Runtime, dtype: int, block_size: int) -> Program: ...
    def embedding(self, table: Buffer, vocab_size: int, hidden_size: int) -> int: ...
    def norm(self, x: int, residual: int, weight: Buffer, eps: float) -> tuple[int, int]: ...
    def linear(
        self, x: int, weight: Buffer, out_features: int, bias: Buffer | None, float32_out: bool
    ) -> int: ...
    def allocate(self, x: int, features: int, float32_out: bool) -> int: ...
    def linear_into(
        self, x: int, weight: Buffer, out_features: int, bias: Buffer | None, out: int, column: int
    ) -> None: ...
    def quantized_linear(
        self,
        x: int,
        row_kind: int,
        bias: Buffer | None,
        out: int,
        column: int,
        float32_out: bool,
        *weight: Any,
    ) -> int:
        """`out`: the value whose columns are written, or -1; `weight`: `QuantizedWeight.arguments`."""

    def quantized_embedding(self, hidden_size: int, *weight: Any) -> int: ...
    def rope(
        self,
        qkv: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        cos: Buffer,
        sin: Buffer,
        q_norm: Buffer | None,
        k_norm: Buffer | None,
        eps: float,
        kv: Buffer,
        key_offset: int,
        value_offset: int,
    ) -> int: ...
    def attention(
        self,
        q: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int,
        kv: Buffer,
        key_offset: int,
        value_offset: int,
    ) -> int: ...
    def gated(self, gate_up: int, activation: int) -> int: ...
    def add(self, x: int, residual: int) -> int: ...
    def select(self, x: int) -> int: ...
    def finish(self, output: int, fuse: bool) -> None: ...
    def run(
        self,
        token_ids: _Readable,
        positions: _Readable,
        slot_mapping: _Readable,
        query_start: _Readable,
        seq_lens: _Readable,
        block_table: _Readable,
        logit_rows: _Readable,
    ) -> None: ...
    def time_calls(
        self,
        token_ids: _Readable,
        positions: _Readable,
        slot_mapping: _Readable,
        query_start: _Readable,
        seq_lens: _Readable,
        block_table: _Readable,
        logit_rows: _Readable,
    ) -> list[tuple[str, float]]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def describe(self) -> str: ...
    def workspace_bytes(self) -> int: ...

# Request, slot, epoch, start, n, samples, logit_rows, new_blocks, admission: pagedcli's PlanEntry.
_Entry: TypeAlias = tuple[int, int, int, int, int, bool, tuple[int, ...], tuple[int, ...], object]
_Score: TypeAlias = tuple[int, int, float, int, tuple[tuple[int, float], ...]]

@final
class Slots:
    """Tokens, block tables and sampling of the sequences that run; what the caller breaks is an AssertionError."""

    def __new__(
        cls, slots: int, max_model_len: int, block_size: int, vocab_size: int, max_top: int
    ) -> Slots: ...
    @property
    def seconds(self) -> float: ...
    def free(self, slot: int) -> None: ...
    def admit(
        self, slot: int, tokens: tuple[int, ...], table: tuple[int, ...], row: _Readable, prompt_top: int
    ) -> None: ...
    def step(self, program: Program, entries: tuple[_Entry, ...]) -> tuple[tuple[int, ...], int]: ...
    def lay_out(
        self, entries: tuple[_Entry, ...]
    ) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]: ...
    def read(self, runtime: Runtime, logits: _Readable) -> tuple[tuple[int, ...], int]: ...
    def scores(self) -> list[_Score]: ...
    def prompt_scores(self) -> list[_Score]: ...
    def faults(self) -> tuple[int, ...]: ...
