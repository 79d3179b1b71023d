"""`CudaOps`: torch's ops with our CUDA kernels in the place of all but dense products. Imports torch, `paged_kernels`.

Values are torch tensors, kernels run on torch's current stream. The library is an argument: on a GPU the one that nvcc
built, in tests the same sources on the emulator, with tensors in host memory. What a kernel does not take (a head size,
odd features, a weight that is not 4 bits) goes to torch's op, and `report` says so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from paged_kernels import cuda_abi
from torch import Tensor

from pagedcli.ops.batch import ForwardBatch, KVCache
from pagedcli.ops.cuda_codes import CudaCodes, alike, all_quantized, is_codes, make_codes, why_not
from pagedcli.ops.cuda_sampling import CudaSampling
from pagedcli.ops.protocol import Activation, AttentionShape, HeadNorms, OpReport
from pagedcli.ops.torch_ops import TorchOps
from pagedcli.ops.weights import EmbeddingTable, FusedLinear, HostTensor, RopeTable, Shard, StoredPart, Vector

KERNELS = (
    "embedding",
    "rms_norm",
    "add_rms_norm",
    "rope_kv_write",
    "attention",
    "gated",
    "add",
    "logit_rows",
    "sampling",
)
"""Ops that are kernels of ours whatever the weights are."""
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh")
VECTOR = 8
"""Elements of a 16-byte load: features are multiples of it."""
LEAST_SPLIT = 128
MOST_SPLITS = 32
SPLIT_STEP = 32
BLOCKS_PER_PROCESSOR = 4


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Who computes the rows of a step, the same for all layers of one shape.

    Attributes:
        items: int32 [decodes]: sequences with one row.
        tiles: int32 [tiles, 2]: (sequence, first row-and-head) of all others.
        num_splits: Of the longest sequence that there may be.
        parallel: Thread blocks that share the splits of a head.
    """

    items: Tensor
    tiles: Tensor
    num_splits: int
    parallel: int


def split_size(max_positions: int) -> int:
    """Tokens to a split of attention: of the longest sequence alone, so that it is the same in every step."""
    wanted = -(-max_positions // MOST_SPLITS)
    return max(LEAST_SPLIT, -(-wanted // SPLIT_STEP) * SPLIT_STEP)


class CudaOps(TorchOps):
    """Implements `Ops`.

    Args:
        device: "cuda:0" and the like; "cpu" with an emulated library.
        dtype: "bfloat16" or "float16".
        library: As `paged_kernels.cuda_abi.load` gives it.

    Attributes:
        sampling: The sampling kernels; they are right where `has_sampling`.
    """

    def __init__(self, device: str, dtype: str, library: ctypes.CDLL) -> None:
        super().__init__(device, dtype)
        self._library = library
        self.sampling = CudaSampling(library, self._call)
        self._code = cuda_abi.DTYPES[dtype]
        self._max_positions = 0
        self._head_dim = 0
        self._scratch = torch.zeros(0, dtype=torch.uint8, device=self._device)
        self._replaced: dict[str, str] = {}
        self._dense_reasons: dict[str, int] = {}
        self._num_codes = 0
        self.poison = False
        """Fill what a kernel is to write with NaN first: memory that was freed may hold the right result."""
        on_gpu = self._device.type == "cuda"
        self._processors = (
            torch.cuda.get_device_properties(self._device).multi_processor_count if on_gpu else 1
        )

    def replace(self, name: str, reason: str) -> None:
        """Take torch's op in the place of a kernel, and say why.

        Args:
            name: Of the op, as in `report`.
            reason: For people.
        """
        self._replaced[name] = reason
        self.notes += (
            f"torch's {name} is used instead of our CUDA kernel, which is not right here: {reason}",
        )

    @property
    def has_sampling(self) -> bool:
        """Whether the sampling kernels may be used."""
        return "sampling" not in self._replaced

    def has_heads(self, head_dim: int) -> bool:
        """Whether attention and rotation of such heads are kernels of ours."""
        return bool(self._library.paged_cuda_attention_tile_rows(head_dim) > 0)

    def load_notes(self) -> tuple[str, ...]:
        """What torch computes of a loaded model because no kernel takes it."""
        dense = tuple(
            f"{count} fused linears are dequantized, which the 4-bit CUDA kernels do not take: {why}"
            for why, count in self._dense_reasons.items()
            if "linear" not in self._replaced
        )
        if self._head_dim and not self.has_heads(self._head_dim):
            dense += (f"torch's attention is used: there is no CUDA kernel for heads of {self._head_dim}",)
        return self.notes + dense

    def why_eager(self) -> str | None:
        """Why decode steps cannot be CUDA graphs; None: they can, with the heads of the model that was loaded."""
        ours = "attention" not in self._replaced and (not self._head_dim or self.has_heads(self._head_dim))
        return None if ours else super().why_eager()

    def report(self) -> dict[str, OpReport]:
        """The implementation that serves each op, by the op's name."""
        report = super().report()
        report["sampling"] = OpReport("torch", f"torch {torch.__version__} on {self._device}")
        ours = OpReport("cuda", f"our kernels on {self._device}")
        for name in KERNELS:
            if name not in self._replaced:
                report[name] = ours
        if self._num_codes:
            dense = "".join(f"; {count} dequantized: {why}" for why, count in self._dense_reasons.items())
            report["linear"] = OpReport(
                "cuda", f"4-bit kernel for {self._num_codes} fused linears{dense}; dense ones by cuBLAS"
            )
        return report

    # ---- weights

    def load_rope(self, cos: Any, sin: Any) -> RopeTable:
        """As in `TorchOps`; the table tells how long a sequence may become."""
        table = super().load_rope(cos, sin)
        self._max_positions = max(self._max_positions, table.max_positions)
        self._head_dim = table.head_dim
        return table

    def load_quantized(
        self, parts: Sequence[StoredPart], biases: Sequence[HostTensor] | None, shard: Shard
    ) -> FusedLinear:
        """As codes where the kernels take them, else dequantized."""
        reason = self._replaced.get("linear") or why_not(parts)
        if reason is not None or not all_quantized(parts):
            reason = reason or "a part is not quantized"
            self._dense_reasons[reason] = self._dense_reasons.get(reason, 0) + 1
            return super().load_quantized(parts, biases, shard)
        bias = None if biases is None else self._load_joined(biases)
        runs = alike(parts)
        sizes = [sum(part.shape[0] for part in run) for run in runs]
        biases_of = [None] * len(runs) if bias is None else torch.split(bias, sizes)
        codes = tuple(
            make_codes(run, of_run, self.dtype, self._device)
            for run, of_run in zip(runs, biases_of, strict=True)
        )
        self._num_codes += 1
        self.weight_bytes += sum(each.num_bytes for each in codes)
        needed = max(self._library.paged_cuda_w4a16_scratch(each.abi(self._code)) for each in codes)
        if needed > len(self._scratch):
            self._scratch = torch.zeros(needed, dtype=torch.uint8, device=self._device)
        return self._fused(parts, parts[0].shape[1], shard, codes)

    # ---- one step

    def embedding(self, table: EmbeddingTable, batch: ForwardBatch) -> Tensor:
        """[num_tokens, hidden_size]."""
        if not self._takes_rows("embedding", table.hidden_size):
            return super().embedding(table, batch)
        return self._rows(table.data, batch.token_ids)

    def logit_rows(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """The rows of `batch.logit_rows`, in that order."""
        if not self._takes_rows("embedding", x.shape[1]):
            return super().logit_rows(x, batch)
        return self._rows(x, batch.logit_rows)

    def rms_norm(self, x: Tensor, weight: Vector, eps: float) -> Tensor:
        """Computed in float32, rounded once."""
        if not self._takes_rows("rms_norm", x.shape[1]):
            return super().rms_norm(x, weight, eps)
        out = self._room(x, *x.shape)
        self._norm(out, None, x, None, weight, eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Vector, eps: float) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum), the sum in the place of `residual`."""
        if not self._takes_rows("add_rms_norm", x.shape[1]):
            return super().add_rms_norm(x, residual, weight, eps)
        out = self._room(x, *x.shape)
        self._norm(out, residual, x, residual, weight, eps)
        return out, residual

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The sum, in the place of `residual`."""
        if not self._takes_rows("add", x.shape[1]):
            return super().add(x, residual)
        self._call("add", _address(residual), _address(x), _address(residual), x.numel(), self._code)
        return residual

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(first half) * second half, [rows, features / 2]."""
        rows, features = gate_up.shape[0], gate_up.shape[1] // 2
        if not self._takes_rows("gated", features):
            return super().gated(gate_up, activation)
        out = self._room(gate_up, rows, features)
        self._call(
            "gated",
            _address(out),
            _address(gate_up),
            rows,
            features,
            ACTIVATIONS.index(activation),
            self._code,
        )
        return out

    def linear(self, x: Tensor, weight: FusedLinear) -> Tensor:
        """[rows, out_features]; codes by our kernel, or dequantized for a dense product of many rows."""
        if not is_codes(weight.weight):
            return super().linear(x, weight)
        products = [self._product(x, codes) for codes in weight.weight]
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)

    def rope_kv_write(
        self,
        qkv: Tensor,
        shape: AttentionShape,
        rope: RopeTable,
        norms: HeadNorms | None,
        batch: ForwardBatch,
        kv: KVCache,
        layer: int,
    ) -> Tensor:
        """Norm (if any) and rotate q and k, write k and v to the cache; returns q, [num_tokens, q_size]."""
        if not self._takes_heads("rope_kv_write", shape):
            return super().rope_kv_write(qkv, shape, rope, norms, batch, kv, layer)
        q = self._room(qkv, len(qkv), shape.q_size)
        weights = (None, None) if norms is None else (_address(norms.q.data), _address(norms.k.data))
        arguments = cuda_abi.PagedRope(
            _address(qkv), _address(rope.cos), _address(rope.sin), _address(batch.positions),
            _address(batch.slot_mapping), *weights, _address(q), _address(kv.key(layer)), _address(kv.value(layer)),
            len(qkv), shape.num_heads, shape.num_kv_heads, shape.head_dim, kv.block_size, self._code,
            0.0 if norms is None else norms.eps,
        )  # fmt: skip
        self._call("rope_kv_write", arguments)
        return q

    def attention(
        self, q: Tensor, shape: AttentionShape, batch: ForwardBatch, kv: KVCache, layer: int
    ) -> Tensor:
        """Causal attention of every row over its own sequence's cached keys, [num_tokens, q_size]."""
        if not self._takes_heads("attention", shape):
            return super().attention(q, shape, batch, kv, layer)
        key = f"cuda attention:{shape}"
        if key not in batch.scratch:
            batch.scratch[key] = self._plan_attention(shape, batch)
        plan: AttentionPlan = batch.scratch[key]
        out = self._room(q, *q.shape)
        # Of this call alone: the graphs of many sizes of batches share the memory between their kernels.
        size = (len(plan.items), shape.num_heads, plan.num_splits, shape.head_dim + 2)
        partial = torch.empty(size, device=self._device)
        arguments = cuda_abi.PagedAttention(
            _address(q), _address(kv.key(layer)), _address(kv.value(layer)), _address(batch.block_table),
            _address(batch.query_start), _address(batch.seq_lens), _address(out), _address(partial),
            batch.block_table.shape[1], kv.block_size, shape.num_heads, shape.num_kv_heads, shape.head_dim, self._code,
            shape.window or 0, split_size(self._max_positions), plan.num_splits, shape.scale,
        )  # fmt: skip
        self._call("attention_decode", arguments, _address(plan.items), len(plan.items), plan.parallel)
        self._call("attention_prefill", arguments, _address(plan.tiles), len(plan.tiles))
        return out

    # ---- helpers

    def _room(self, like: Tensor, *shape: int) -> Tensor:
        """Room for a kernel's result, of the dtype and on the device of `like`."""
        out = like.new_empty(shape)
        return out.fill_(torch.nan) if self.poison else out

    def _takes_rows(self, name: str, features: int) -> bool:
        return features % VECTOR == 0 and name not in self._replaced

    def _takes_heads(self, name: str, shape: AttentionShape) -> bool:
        return self.has_heads(shape.head_dim) and name not in self._replaced

    def _plan_attention(self, shape: AttentionShape, batch: ForwardBatch) -> AttentionPlan:
        group = shape.num_heads // shape.num_kv_heads
        rows = self._library.paged_cuda_attention_tile_rows(shape.head_dim)
        items = [index for index, count in enumerate(batch.query_lens) if count == 1]
        num_splits = -(-self._max_positions // split_size(self._max_positions))
        blocks = max(1, len(items) * shape.num_kv_heads)
        parallel = min(num_splits, -(-BLOCKS_PER_PROCESSOR * self._processors // blocks))
        if len(items) == len(batch.query_lens):
            # Made on the device, so that the step can be a CUDA graph.
            every = torch.arange(len(items), dtype=torch.int32, device=self._device)
            return AttentionPlan(every, every.new_empty((0, 2)), num_splits, parallel)
        tiles = [
            (index, first)
            for index, count in enumerate(batch.query_lens)
            if count > 1
            for first in range(0, count * group, rows)
        ]
        return AttentionPlan(
            items=torch.tensor(items, dtype=torch.int32, device=self._device),
            tiles=torch.tensor(tiles, dtype=torch.int32, device=self._device).view(-1, 2),
            num_splits=num_splits,
            parallel=parallel,
        )

    def _product(self, x: Tensor, codes: CudaCodes) -> Tensor:
        if codes.order is not None:
            ordered = self._room(x, *x.shape)
            self._call("columns", _address(ordered), _address(x), _address(codes.order), *x.shape)
            x = ordered
        abi = codes.abi(self._code)
        if len(x) > self._library.paged_cuda_w4a16_max_rows():
            dense = self._room(x, codes.out_features, codes.in_features)
            self._call("w4a16_dequantize", abi, _address(dense))
            return torch.nn.functional.linear(x, dense, codes.bias)
        out = self._room(x, len(x), codes.out_features)
        self._call("w4a16", abi, _address(out), _address(x), len(x), _address(self._scratch))
        return out

    def _rows(self, table: Tensor, ids: Tensor) -> Tensor:
        out = self._room(table, len(ids), table.shape[1])
        self._call(
            "rows", _address(out), _address(table), _address(ids), len(ids), table.shape[1], self._code
        )
        return out

    def _norm(
        self,
        out: Tensor,
        total: Tensor | None,
        x: Tensor,
        residual: Tensor | None,
        weight: Vector,
        eps: float,
    ) -> None:
        addresses = [None if tensor is None else _address(tensor) for tensor in (total, x, residual)]
        self._call("rms_norm", _address(out), *addresses, _address(weight.data), *x.shape, eps, self._code)

    def _call(self, name: str, *arguments: Any) -> None:
        """Start a kernel on the current stream.

        Raises:
            CudaKernelError: It did not start.
        """
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else None
        cuda_abi.check(name, getattr(self._library, f"paged_cuda_{name}")(*arguments, stream))


def _address(tensor: Tensor) -> int:
    """Where a tensor's elements begin; kernels want them without gaps."""
    assert tensor.is_contiguous(), f"a tensor of strides {tensor.stride()} and shape {tuple(tensor.shape)}"
    return tensor.data_ptr()
