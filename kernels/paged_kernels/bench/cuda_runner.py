"""Cases on our CUDA kernels, beside torch's own ops. Imports torch.

The library is that of nvcc on a GPU, or the emulated one with tensors in host memory, for tests. Kernels are called as
the engine calls them: one row of a sequence by the decode kernel, more by the prefill kernel, products of many rows of
4-bit weights by dequantizing for cuBLAS.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from paged_kernels import cuda_abi, cuda_pack
from paged_kernels.bench.cases import Case, Opened, UnavailableError
from paged_kernels.bench.data import NORM_EPS, TOP_P, Array, Data, in_top_p
from paged_kernels.bench.torch_runner import VARIANTS, Made, TorchRunner, made, opened

VARIANT = "cuda"
SPLIT = 256
"""Tokens to a split of attention, as for sequences of up to 8,192."""
BLOCKS_PER_PROCESSOR = 4


class CudaRunner(TorchRunner):
    """Opens cases on torch and on our kernels.

    Args:
        threads: Compute threads of a CPU.
        device: "cuda" and the like; "cpu" with an emulated library.
        cold_bytes: Of the copies of a case's weights or keys together, at least.
        library: As `cuda_abi.load` gives it.
    """

    variants: tuple[str, ...] = (*VARIANTS, VARIANT)

    def __init__(self, threads: int, device: str, cold_bytes: int, library: ctypes.CDLL) -> None:
        super().__init__(threads, device, cold_bytes)
        self.library = library
        on_gpu = self.device.type == "cuda"
        self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count if on_gpu else 1

    def open(self, case: Case, variant: str) -> Opened:
        """As `TorchRunner.open`.

        Raises:
            UnavailableError: There is nothing for the case.
        """
        if variant != VARIANT:
            return super().open(case, variant)
        if case.op != "sampler" and case.format.dtype not in cuda_abi.DTYPES:
            raise UnavailableError(f"the CUDA kernels do not compute in {case.format.dtype}")
        make = _MAKE.get(case.op)
        if make is None:
            raise UnavailableError("no kernel of ours is measured for this op")
        return opened(self, self.data_of(case), make)

    def call(self, name: str, *arguments: Any) -> None:
        """Start a kernel on the current stream.

        Raises:
            CudaKernelError: It did not start.
        """
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else None
        cuda_abi.check(name, getattr(self.library, f"paged_cuda_{name}")(*arguments, stream))


def _code(data: Data) -> int:
    return cuda_abi.DTYPES[data.dtype]


# ---- row by row


def _norm(runner: CudaRunner, data: Data) -> Made:
    x, weight = runner.tensor(data.x), runner.tensor(data.norm_weight)
    residual = x.clone()

    def call() -> Tensor:
        out, total = torch.empty_like(x), torch.empty_like(x)
        addresses = (tensor.data_ptr() for tensor in (out, total, x, residual, weight))
        runner.call("rms_norm", *addresses, *x.shape, NORM_EPS, _code(data))
        return out

    return made(runner, "rms_norm", [call])


def _gated(runner: CudaRunner, data: Data) -> Made:
    x = runner.tensor(data.x)

    def call() -> Tensor:
        out = x.new_empty((len(x), data.case.outputs))
        runner.call("gated", out.data_ptr(), x.data_ptr(), *out.shape, 0, _code(data))
        return out

    return made(runner, "gated", [call])


def _embedding(runner: CudaRunner, data: Data) -> Made:
    table = runner.tensor(data.table)

    def call(ids: Tensor) -> Tensor:
        out = table.new_empty((len(ids), table.shape[1]))
        runner.call("rows", out.data_ptr(), table.data_ptr(), ids.data_ptr(), *out.shape, _code(data))
        return out

    turns = [runner.tensor(data.other_ids(turn), torch.int64) for turn in range(64)]
    return made(runner, "rows", [partial(call, ids) for ids in turns])


def _rope(runner: CudaRunner, data: Data) -> Made:
    """Queries, and the keys out of their cells, side by side."""
    case = data.case
    num_heads, num_kv_heads, head_dim = case.heads
    x = runner.tensor(data.x)
    cos, sin = (runner.tensor(part, torch.float32) for part in data.angles)
    positions = torch.arange(case.rows, device=runner.device)
    slots = runner.tensor(data.cells(0)[: case.rows], torch.int64)
    keys, values = torch.zeros(
        (2, data.block_table.size, num_kv_heads, case.page_size, head_dim),
        dtype=x.dtype,
        device=runner.device,
    )

    def call() -> Tensor:
        q = x.new_empty((case.rows, num_heads * head_dim))
        tensors = (x, cos, sin, positions, slots, None, None, q, keys, values)
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        sizes = (case.rows, num_heads, num_kv_heads, head_dim, case.page_size, _code(data), 0.0)
        runner.call("rope_kv_write", cuda_abi.PagedRope(*addresses, *sizes))
        return q

    def both() -> Tensor:
        q = call()
        at = keys[slots // case.page_size, :, slots % case.page_size]
        return torch.cat((q, at.reshape(case.rows, -1)), 1)

    return Made([call], lambda: runner.sampled(both()), "rope_kv_write")


# ---- products


def _linear(runner: CudaRunner, data: Data) -> Made:
    """W4A16; of many rows, dequantized for torch's product."""
    case, item = data.case, data.case.format
    takes = item.bits == 4 and not item.offsets and not item.reordered
    if not takes or not cuda_pack.fits(case.outputs, case.inputs, item.group_size):
        raise UnavailableError("dense products are cuBLAS's, and the kernels take 4 bits with zero points")
    x = runner.tensor(data.x)
    weights = runner.copies((*case.weight_key, VARIANT), lambda: _pack(runner, data))
    is_many = case.rows > runner.library.paged_cuda_w4a16_max_rows()
    call = _dequantized if is_many else _product
    scratch = torch.zeros(
        runner.library.paged_cuda_w4a16_scratch(_abi(data, weights[0])),
        dtype=torch.uint8,
        device=runner.device,
    )
    calls = [partial(call, runner, data, x, weight, scratch) for weight in weights]
    return made(runner, "w4a16_dequantize, linear" if is_many else "w4a16", calls)


def _pack(runner: CudaRunner, data: Data) -> list[Tensor]:
    codes, kind = data.codes, cuda_pack.ZERO_BIAS[data.dtype]
    packed = torch.from_numpy(cuda_pack.pack_codes(codes.codes).view("int32")).to(runner.device)
    assert codes.zeros is not None, "the kernels take codes with zero points"
    return [packed, runner.tensor(codes.scales.T), runner.tensor(codes.zeros.T.astype("float32") + kind)]


def _abi(data: Data, weight: tuple[Tensor, ...]) -> cuda_abi.PagedCodes:
    case = data.case
    addresses = (tensor.data_ptr() for tensor in weight)
    return cuda_abi.PagedCodes(
        *addresses, None, case.outputs, case.inputs, case.format.group_size, _code(data)
    )


def _product(
    runner: CudaRunner, data: Data, x: Tensor, weight: tuple[Tensor, ...], scratch: Tensor
) -> Tensor:
    out = x.new_empty((len(x), data.case.outputs))
    addresses = (out.data_ptr(), x.data_ptr(), len(x), scratch.data_ptr())
    runner.call("w4a16", _abi(data, weight), *addresses)
    return out


def _dequantized(
    runner: CudaRunner, data: Data, x: Tensor, weight: tuple[Tensor, ...], scratch: Tensor
) -> Tensor:
    dense = x.new_empty((data.case.outputs, data.case.inputs))
    runner.call("w4a16_dequantize", _abi(data, weight), dense.data_ptr())
    return functional.linear(x, dense)


# ---- attention


def _attention(runner: CudaRunner, data: Data) -> Made:
    """Sequences of equal length; the plan of who computes what is made once, as in a step of all layers."""
    case = data.case
    each, (num_heads, num_kv_heads, head_dim) = case.rows // case.sequences, case.heads
    tile_rows = runner.library.paged_cuda_attention_tile_rows(head_dim)
    if not tile_rows:
        raise UnavailableError(f"there is no CUDA kernel for heads of {head_dim}")
    integers = partial(torch.tensor, dtype=torch.int32, device=runner.device)
    num_splits = -(-case.context // SPLIT)
    q = runner.tensor(data.x)
    table = torch.from_numpy(data.block_table).to(runner.device)
    start = integers([each * at for at in range(case.sequences + 1)])
    lengths = integers([case.context] * case.sequences)
    partial_sums = torch.empty((case.sequences, num_heads, num_splits, head_dim + 2), device=runner.device)
    rows_of = range(0, each * num_heads // num_kv_heads, tile_rows)
    work = integers(
        [*range(case.sequences)]
        if each == 1
        else [(at, first) for at in range(case.sequences) for first in rows_of]
    )
    parallel = min(
        num_splits, -(-BLOCKS_PER_PROCESSOR * runner.processors // (case.sequences * num_kv_heads))
    )

    def call(keys: Tensor, values: Tensor) -> Tensor:
        out = torch.empty_like(q)
        tensors = (q, keys, values, table, start, lengths, out, partial_sums)
        addresses = (tensor.data_ptr() for tensor in tensors)
        sizes = (table.shape[1], case.page_size, *case.heads, _code(data), 0, SPLIT, num_splits)
        arguments = cuda_abi.PagedAttention(*addresses, *sizes, head_dim**-0.5)
        if each == 1:
            runner.call("attention_decode", arguments, work.data_ptr(), len(work), parallel)
        else:
            runner.call("attention_prefill", arguments, work.data_ptr(), len(work))
        return out

    layers = runner.copies(("pages", case), lambda: runner.pages(data))
    name = "attention_decode, attention_merge" if each == 1 else "attention_prefill"
    return made(runner, name, [partial(call, keys, values) for keys, values in layers])


# ---- sampling


def _sampler(runner: CudaRunner, data: Data) -> Made:
    """Rows that all want the same, each with random numbers of its own."""
    case, most = data.case, runner.library.paged_cuda_sample_max_vocabulary()
    if case.inputs > most:
        raise UnavailableError(f"the CUDA kernel takes vocabularies of up to {most:,} tokens")
    rows = np.zeros(case.rows, cuda_abi.PagedSampleRow)
    rows["logit_row"] = rows["seed"] = np.arange(case.rows)
    rows["top_p"] = rows["repetition_penalty"] = 1.0
    if case.name == "top-p":
        rows["temperature"], rows["top_p"] = 1.0, TOP_P
    logits = runner.tensor(data.logits, torch.float32)
    on_device = runner.tensor(rows.view(np.uint8), torch.uint8)

    def call() -> Tensor:
        chosen = torch.empty((2, case.rows), dtype=torch.int64, device=runner.device)
        tensors = (logits, on_device, chosen[0], chosen[1])
        addresses = (tensor.data_ptr() for tensor in tensors)
        runner.call("sample", cuda_abi.PagedSample(*addresses, case.inputs, case.rows, case.inputs))
        return chosen[0]

    def result() -> Array:
        tokens = call().cpu().numpy()[data.sample.rows]
        return tokens if case.name == "greedy" else in_top_p(data.logits[data.sample.rows], tokens)

    return Made([call], result, "sample")


_MAKE: dict[str, Callable[[CudaRunner, Data], Made]] = {
    "linear": _linear,
    "norm": _norm,
    "gated": _gated,
    "embedding": _embedding,
    "rope": _rope,
    "attention": _attention,
    "sampler": _sampler,
}
