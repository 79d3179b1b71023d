"""Cases on torch: its own op for each, and the ops that the engine composes of them. Imports torch.

On a CPU calls are timed by the clock, on CUDA by events around the replay of a graph of them, so that what Python takes
to issue a call is not part of it; an op that cannot be recorded is timed as it is issued. Where torch has no op of the
kind, the shortest composition of its ops stands in. `Opened.op` says both. Torch has no paged attention: its own reads
keys that lie in one piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from paged_kernels import reference, torch_attention
from paged_kernels.bench.cases import Case, Opened, UnavailableError
from paged_kernels.bench.data import NORM_EPS, TOP_P, Data, in_top_p
from paged_kernels.torch_linear import tiled_linear

Array = npt.NDArray[Any]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LEAST_SECONDS = 0.002
"""Of one measurement: so many calls."""
LEAST_RECORDED, MOST_RECORDED = 16, 512
"""Calls in a CUDA graph."""
MAX_COPIES = 4096
ROWWISE_COPIES = 16
VARIANTS = ("torch", "torch-engine")
"""Torch's own op, and the engine's torch backend."""
INT4_GROUPS = (32, 64, 128, 256)


class TorchRunner:
    """Opens cases, one at a time.

    Args:
        threads: Compute threads of a CPU.
        device: "cpu", or "cuda" and the like.
        cold_bytes: Of the copies of a case's weights or keys together, at least.
    """

    variants: tuple[str, ...] = VARIANTS

    def __init__(self, threads: int, device: str, cold_bytes: int) -> None:
        torch.set_num_threads(threads)
        self.device = torch.device(device)
        self._cold_bytes = cold_bytes
        self._kept: tuple[Any, list[Any]] = (None, [])
        self._data: Data | None = None

    def open(self, case: Case, variant: str) -> Opened:
        """As `NativeRunner.open`.

        Raises:
            UnavailableError: Torch has nothing for the case.
        """
        make = (_OWN if variant == "torch" else _ENGINE).get(case.op)
        if make is None:
            raise UnavailableError("the engine's torch backend runs the same ops")
        return opened(self, self.data_of(case), make)

    def data_of(self, case: Case) -> Data:
        """The case's numbers; kept until another case comes."""
        if self._data is None or self._data.case != case:
            self._data = Data(case)
        return self._data

    # ---- what cases are made of

    def tensor(self, values: Array, dtype: torch.dtype | None = None) -> Tensor:
        """On the device, of the case's dtype."""
        assert self._data is not None, "a case is open"
        return torch.from_numpy(np.ascontiguousarray(values)).to(
            self.device, dtype or DTYPES[self._data.dtype]
        )

    def copies(self, key: Any, make: Callable[[], Sequence[Tensor]]) -> list[Any]:
        """Tuples of tensors that take turns; kept while the key is the same."""
        if self._kept[0] != key:
            self._kept = (None, [])
            first = tuple(make())
            size = max(1, sum(tensor.nbytes for tensor in first))
            count = min(max(2, -(-self._cold_bytes // size)), MAX_COPIES)
            self._kept = (
                key,
                [first, *(tuple(tensor.clone() for tensor in first) for _ in range(count - 1))],
            )
        return self._kept[1]

    def pages(self, data: Data) -> list[Tensor]:
        """Keys and values, [blocks, kv heads, page size, head_dim] each."""
        case = data.case
        shape = (data.block_table.size, case.heads[1], case.page_size, case.heads[2])
        caches = [torch.zeros(shape, dtype=DTYPES[data.dtype], device=self.device) for _ in data.kv]
        for cache, part in zip(caches, data.kv, strict=True):
            of_sequence = self.tensor(part)
            for sequence in range(case.sequences):
                slots = torch.from_numpy(data.cells(sequence)[: case.context]).to(self.device)
                cache[slots // case.page_size, :, slots % case.page_size] = of_sequence
        return caches

    def sampled(self, result: Tensor) -> Array:
        """The part of [rows, outputs] that is compared."""
        assert self._data is not None, "a case is open"
        found: Array = self._data.sample.of(result.float().cpu().numpy())
        return found


class Timer:
    """Times so many calls, in turns, that it takes some milliseconds.

    Args:
        calls: Take turns.
        device: On CUDA their work is recorded and replayed.

    Attributes:
        is_recorded: Whether what is timed is a replay.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]], device: torch.device) -> None:
        self._calls, self._device = calls, device
        self._next, self._count = 0, 1
        self._graph: Any = None
        self.is_recorded = False
        self._issue()  # the first call of an op may compile or look up something
        if device.type == "cuda":
            self._record()
        while self._count < len(calls) * 64 and self()[0] < LEAST_SECONDS:
            self._count *= 2

    def __call__(self) -> tuple[float, int]:
        """(seconds, calls)."""
        with torch.inference_mode():
            if self._device.type == "cuda":
                return _by_events(self._issue), self._count * (self._in_graph if self.is_recorded else 1)
            started = time.perf_counter()
            self._issue()
            return time.perf_counter() - started, self._count

    def _issue(self) -> None:
        if self.is_recorded:
            for _ in range(self._count):
                self._graph.replay()
            return
        first = self._next
        self._next += self._count
        for at in range(first, self._next):
            self._calls[at % len(self._calls)]()

    def _record(self) -> None:
        """All calls once, or some turns of them."""
        self._in_graph = min(MOST_RECORDED, len(self._calls) * -(-LEAST_RECORDED // len(self._calls)))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.inference_mode(), torch.cuda.graph(graph):
                for at in range(self._in_graph):
                    self._calls[at % len(self._calls)]()
        except RuntimeError:  # it asks the device for something on its way: timed as it is issued, and said
            torch.cuda.synchronize()
            return
        self._graph, self.is_recorded = graph, True


def _by_events(issue: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    issue()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@dataclass(frozen=True, slots=True)
class Made:
    """Calls that take turns, the sample of the result of one, and what is called."""

    calls: Sequence[Callable[[], Any]]
    result: Callable[[], Array]
    op: str


def made(runner: TorchRunner, op: str, calls: Sequence[Callable[[], Tensor]]) -> Made:
    """Of calls whose results are compared as they are."""
    return Made(calls, lambda: runner.sampled(calls[0]()), op)


def opened(runner: Any, data: Data, make: Callable[[Any, Data], Made]) -> Opened:
    """A case made, run once and compared, ready to be timed."""
    with torch.inference_mode():
        ready = make(runner, data)
        got = ready.result()
        timer = Timer(ready.calls, runner.device)
    is_issued = runner.device.type == "cuda" and not timer.is_recorded
    return Opened(timer, data.error(got), f"{ready.op} (issued one by one)" if is_issued else ready.op)


# ---- linears


def _linear(runner: TorchRunner, data: Data) -> Made:
    """Codes of 4 and 8 bits by torch's own products of them, where it has one for the shape; else `linear`."""
    x = runner.tensor(data.x)
    if _takes_int4(runner, data):
        return _int4(runner, data, x)
    if data.case.format.bits == 8 and runner.device.type == "cpu" and data.codes.zeros is not None:
        return _int8(runner, data, x)
    as_logits = data.case.op == "head"

    def call(weight: Tensor) -> Tensor:
        product = functional.linear(x, weight)
        return product.float() if as_logits else product

    op = "linear" if not data.case.format.bits else f"linear of {data.dtype}"
    return made(runner, op, [partial(call, weight) for (weight,) in _dense(runner, data)])


def _dense(runner: TorchRunner, data: Data) -> list[Any]:
    """Copies of the weight in the dtype, dequantized if it has codes."""

    def values() -> list[Tensor]:
        if not data.case.format.bits:
            return [runner.tensor(data.weight)]
        parts = np.array_split(np.arange(data.case.outputs), max(1, data.case.outputs // 512))
        return [torch.cat([runner.tensor(data.codes.values(part)) for part in parts])]

    return runner.copies((*data.case.weight_key, "dense"), values)


def _takes_int4(runner: TorchRunner, data: Data) -> bool:
    """Whether torch's product has such codes: whole zero points at 8, groups in order that divide the inputs."""
    case, item = data.case, data.case.format
    if item.bits != 4 or item.offsets or item.reordered or item.group_size not in INT4_GROUPS:
        return False
    return case.inputs % item.group_size == 0 and case.outputs % 16 == 0


def _int4(runner: TorchRunner, data: Data, x: Tensor) -> Made:
    """W4A16."""
    item, on_cpu = data.case.format, runner.device.type == "cpu"

    def pack() -> list[Tensor]:
        codes = torch.from_numpy(data.codes.codes)
        scales = torch.from_numpy(data.codes.scales).to(torch.bfloat16)
        pairs = torch.stack([scales.T, torch.zeros_like(scales.T)], dim=-1).contiguous().to(runner.device)
        if on_cpu:
            return [torch._convert_weight_to_int4pack_for_cpu(codes.int(), 2), pairs]
        halves = (codes[:, ::2] << 4 | codes[:, 1::2]).to(runner.device)
        return [torch._convert_weight_to_int4pack(halves, 8), pairs]

    product = torch._weight_int4pack_mm_for_cpu if on_cpu else torch._weight_int4pack_mm
    weights = runner.copies(data.case.weight_key, pack)
    calls = [partial(product, x, weight, item.group_size, pairs) for weight, pairs in weights]
    return made(runner, product.__name__, calls)


def _int8(runner: TorchRunner, data: Data, x: Tensor) -> Made:
    """W8A16 with a scale for each output: torch has no groups here."""

    def pack() -> list[Tensor]:
        codes = torch.from_numpy((data.codes.codes.astype(np.int16) - 128).astype(np.int8))
        return [codes, torch.from_numpy(data.codes.scales[:, 0].copy()).to(torch.bfloat16)]

    weights = runner.copies(data.case.weight_key, pack)
    calls = [partial(torch._weight_int8pack_mm, x, weight, scales) for weight, scales in weights]
    return made(runner, "_weight_int8pack_mm", calls)


def _engine_linear(runner: TorchRunner, data: Data) -> Made:
    """What the engine's torch backend runs: tiles of rows on a CPU, codes dequantized when they were loaded."""
    x = runner.tensor(data.x)
    product = tiled_linear if runner.device.type == "cpu" else functional.linear
    calls = [partial(product, x, weight, None) for (weight,) in _dense(runner, data)]
    return made(runner, product.__name__, calls)


# ---- row by row


def _norm(runner: TorchRunner, data: Data) -> Made:
    x, weight = runner.tensor(data.x), runner.tensor(data.norm_weight)
    shape = (data.case.inputs,)
    return made(runner, "+, rms_norm", [lambda: functional.rms_norm(x + x, shape, weight, NORM_EPS)])


def _engine_norm(runner: TorchRunner, data: Data) -> Made:
    x, weight = runner.tensor(data.x), runner.tensor(data.norm_weight)
    return made(runner, "add_rms_norm", [lambda: reference.add_rms_norm(x, x, weight, NORM_EPS)[0]])


def _gated(runner: TorchRunner, data: Data) -> Made:
    x = runner.tensor(data.x)
    half = data.case.outputs
    return made(runner, "silu, *", [lambda: functional.silu(x[:, :half]) * x[:, half:]])


def _engine_gated(runner: TorchRunner, data: Data) -> Made:
    x = runner.tensor(data.x)
    return made(runner, "gated", [lambda: reference.gated(x, "silu")])


def _embedding(runner: TorchRunner, data: Data) -> Made:
    table = runner.tensor(data.table)
    turns = [runner.tensor(data.other_ids(turn), torch.int64) for turn in range(64)]
    return made(runner, "embedding", [partial(functional.embedding, ids, table) for ids in turns])


def _engine_embedding(runner: TorchRunner, data: Data) -> Made:
    table = runner.tensor(data.table)
    turns = [runner.tensor(data.other_ids(turn), torch.int64) for turn in range(64)]
    return made(runner, "index_select", [partial(reference.embedding, table, ids) for ids in turns])


def _rope(runner: TorchRunner, data: Data) -> Made:
    """Queries and keys rotated together; keys and values copied to their cells."""
    case = data.case
    num_heads, num_kv_heads, head_dim = case.heads
    x = runner.tensor(data.x).view(case.rows, -1, head_dim)
    cos, sin = (runner.tensor(part, torch.float32).unsqueeze(1) for part in data.angles)
    slots = runner.tensor(data.cells(0)[: case.rows], torch.int64)
    turned, half = num_heads + num_kv_heads, head_dim // 2
    cells = torch.zeros(
        (2, data.block_table.size * case.page_size, num_kv_heads, head_dim),
        dtype=x.dtype,
        device=runner.device,
    )

    def rotate() -> Tensor:
        low, high = x[:, :turned, :half], x[:, :turned, half:]
        heads = torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)
        cells[0].index_copy_(0, slots, heads[:, num_heads:])
        cells[1].index_copy_(0, slots, x[:, turned:])
        return heads.reshape(case.rows, -1)

    return made(runner, "*, cat, index_copy_", [rotate])


# ---- attention


def _attention(runner: TorchRunner, data: Data) -> Made:
    """`scaled_dot_product_attention` of keys in one piece; a chunk's last rows see less by a mask."""
    case = data.case
    each = case.rows // case.sequences
    num_heads, num_kv_heads, head_dim = case.heads
    q = runner.tensor(data.x).view(case.sequences, each, num_heads, head_dim).transpose(1, 2)
    mask = None
    if 1 < each < case.context:
        seen = torch.arange(case.context).unsqueeze(0)
        mask = (seen <= torch.arange(case.context - each, case.context).unsqueeze(1)).to(runner.device)

    def pieces() -> list[Tensor]:
        shape = (case.sequences, num_kv_heads, case.context, head_dim)
        return [runner.tensor(part.transpose(1, 0, 2)).expand(shape).contiguous() for part in data.kv]

    def attend(key: Tensor, value: Tensor) -> Tensor:
        result = functional.scaled_dot_product_attention(
            *(q, key, value), attn_mask=mask, is_causal=each == case.context, enable_gqa=True
        )
        return result.transpose(1, 2).reshape(case.rows, -1)

    layers = runner.copies(("attention", case), pieces)
    return made(
        runner, "scaled_dot_product_attention", [partial(attend, key, value) for key, value in layers]
    )


def _engine_attention(runner: TorchRunner, data: Data) -> Made:
    """The engine's own composition over pages; its index tensors are made once a step, outside."""
    case = data.case
    each, heads = case.rows // case.sequences, torch_attention.Heads(*case.heads)
    table = torch.from_numpy(data.block_table).to(runner.device)
    lens = ([each] * case.sequences, [case.context] * case.sequences)
    rounds = torch_attention.plan_attention(heads, table, case.page_size, *lens, None)
    q = runner.tensor(data.x).view(case.rows, case.heads[0], case.heads[2])

    layers = runner.copies(("pages", case), lambda: runner.pages(data))
    scale = case.heads[2] ** -0.5

    def attend(key: Tensor, value: Tensor) -> Tensor:
        return torch_attention.paged_attention(q, key, value, rounds, scale).flatten(1)

    return made(runner, "paged_attention", [partial(attend, key, value) for key, value in layers])


# ---- sampling


def _sampler(runner: TorchRunner, data: Data) -> Made:
    """`argmax`; sampled: sort, cut, `multinomial`."""
    logits = runner.tensor(data.logits, torch.float32)

    def choose() -> Tensor:
        weights, order = logits.softmax(-1).sort(dim=-1, descending=True)
        weights = weights.masked_fill(weights.cumsum(-1) - weights >= TOP_P, 0.0)
        return order.gather(-1, weights.multinomial(1)).squeeze(-1)

    is_greedy = data.case.name == "greedy"
    call: Callable[[], Tensor] = (lambda: logits.argmax(-1)) if is_greedy else choose

    def result() -> Array:
        tokens = call().cpu().numpy()[data.sample.rows]
        return tokens if is_greedy else in_top_p(data.logits[data.sample.rows], tokens)

    return Made([call], result, "argmax" if is_greedy else "softmax, sort, multinomial")


_OWN: dict[str, Callable[[TorchRunner, Data], Made]] = {
    "linear": _linear,
    "head": _linear,
    "norm": _norm,
    "gated": _gated,
    "embedding": _embedding,
    "rope": _rope,
    "attention": _attention,
    "sampler": _sampler,
}
_ENGINE: dict[str, Callable[[TorchRunner, Data], Made]] = {
    "linear": _engine_linear,
    "head": _engine_linear,
    "norm": _engine_norm,
    "gated": _engine_gated,
    "embedding": _engine_embedding,
    "attention": _engine_attention,
}
