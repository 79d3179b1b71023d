"""Starts `CudaOps`: loads the library, tries every kernel once against torch's own op. Imports torch, `paged_kernels`.

A kernel whose result is off is not used: torch's op takes its place and a note says so, or, if the user wants none of
that (--strict-kernels), the start fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from paged_kernels import cuda_abi
from torch import Tensor

from pagedcli.errors import ConfigError
from pagedcli.ops.batch import ForwardBatch
from pagedcli.ops.cuda_ops import CudaOps
from pagedcli.ops.cuda_sampling_check import sampling_difference
from pagedcli.ops.protocol import AttentionShape, HeadNorms
from pagedcli.ops.torch_ops import TorchOps
from pagedcli.ops.weights import EmbeddingTable, Vector

SHAPE = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=128, scale=128**-0.5, window=None)
BOUNDS = {"bfloat16": 2e-2, "float16": 4e-3}
"""Largest difference from torch's op, in parts of the largest value."""
BLOCK_SIZE = 16
LENGTHS = (200, 90)
NEW_ROWS = (1, 80 - 1)
PRODUCT_ROWS = (5, 40, 80)
"""One for each way in which a product with 4-bit weights is computed."""


def open_cuda_ops(device: str, dtype: str, library: Path | None, *, strict: bool) -> TorchOps:
    """Our kernels where they are built and right, else torch's ops, with notes that say so.

    Args:
        device: "cuda" or "cuda:0" and the like.
        dtype: "bfloat16" or "float16" for our kernels.
        library: As `paged_kernels.cuda_build.library_path` names it; it need not be there.
        strict: Refuse to run torch's op in the place of a kernel.

    Raises:
        ConfigError: `strict`, and a kernel is missing or wrong.
    """
    missing = _why_missing(dtype, library)
    if missing is None and library is not None:
        ours = CudaOps(device, dtype, cuda_abi.load(library))
        for name, reason in wrong_kernels(ours, TorchOps(device, dtype)).items():
            _refuse(strict, f"the CUDA kernel for {name} is not right on this GPU ({reason})")
            ours.replace(name, reason)
        return ours
    _refuse(strict, f"our CUDA kernels cannot be used: {missing}")
    return TorchOps(device, dtype, notes=(f"torch's ops are used instead of our CUDA kernels: {missing}",))


def _why_missing(dtype: str, library: Path | None) -> str | None:
    if dtype not in cuda_abi.DTYPES:
        return f"they compute in {' or '.join(sorted(cuda_abi.DTYPES))}, not {dtype}"
    if library is None or not library.is_file():
        return "they are not built (run: paged build-cuda)"
    return None


def _refuse(strict: bool, reason: str) -> None:
    if strict:
        raise ConfigError(
            f"device.strict_kernels is set, and {reason}: leave out --strict-kernels to take torch's op"
        )


@dataclass(frozen=True, slots=True)
class _Codes:
    """A `QuantizedPart` of 4 bits."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8]
    name: str = "codes"
    bits: int = 4
    group_size: int = 64
    offsets: None = None
    g_idx: NDArray[np.int32] | None = None

    @classmethod
    def random(cls, outputs: int, inputs: int, *, act_order: bool) -> _Codes:
        """Of groups that lie in a row, or whose columns are mixed."""
        rng = np.random.default_rng(0)
        groups = (outputs, inputs // 64)
        # Scales that both 16-bit types hold exactly.
        scales = (2.0 ** rng.integers(-7, -4, groups)).astype(np.float32)
        return cls(
            rng.integers(0, 16, (outputs, inputs), dtype=np.uint8),
            scales,
            rng.integers(0, 16, groups, dtype=np.uint8),
            g_idx=rng.permutation(np.arange(inputs, dtype=np.int32) // 64) if act_order else None,
        )

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> NDArray[np.float32]:
        group = np.arange(self.shape[1]) // self.group_size if self.g_idx is None else self.g_idx
        return (self.codes - self.zeros[:, group].astype(np.float32)) * self.scales[:, group]

    def rows(self, first: int, last: int) -> _Codes:
        return replace(
            self, codes=self.codes[first:last], scales=self.scales[first:last], zeros=self.zeros[first:last]
        )


class _Cache:
    """A `KVCache` of one layer.

    Args:
        key: [num_blocks, kv heads, block size, head_dim].
        value: As `key`.
    """

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.num_blocks, self.block_size = len(key), BLOCK_SIZE
        self._key, self._value = key, value

    @classmethod
    def random(cls, numbers: Callable[..., Tensor]) -> _Cache:
        num_blocks = sum(-(-length // BLOCK_SIZE) for length in LENGTHS)
        shape = (num_blocks, SHAPE.num_kv_heads, BLOCK_SIZE, SHAPE.head_dim)
        return cls(numbers(*shape), numbers(*shape))

    def clone(self) -> _Cache:
        return _Cache(self._key.clone(), self._value.clone())

    def key(self, layer: int) -> Tensor:
        return self._key

    def value(self, layer: int) -> Tensor:
        return self._value


def _batch(device: torch.device) -> ForwardBatch:
    def array(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    widths = [-(-length // BLOCK_SIZE) for length in LENGTHS]
    tables = [list(range(sum(widths[:i]), sum(widths[: i + 1]))) for i in range(len(widths))]
    rows = [
        (table, at)
        for table, length, new in zip(tables, LENGTHS, NEW_ROWS, strict=True)
        for at in range(length - new, length)
    ]
    return ForwardBatch(
        token_ids=array(list(range(len(rows)))[::-1]),
        positions=array([at for _, at in rows]),
        slot_mapping=array([table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for table, at in rows]),
        query_start=array([0, NEW_ROWS[0], sum(NEW_ROWS)], torch.int32),
        seq_lens=array(LENGTHS, torch.int32),
        block_table=array([[*table, *[0] * (max(widths) - len(table))] for table in tables], torch.int32),
        logit_rows=array([0, len(rows) - 1]),
        query_lens=NEW_ROWS,
        host_seq_lens=LENGTHS,
    )


def wrong_kernels(ours: CudaOps, reference: TorchOps) -> dict[str, str]:
    """Ops whose kernel does not start or is off by more than its rounding, with what was found."""
    device, kind = torch.device(ours.device), getattr(torch, ours.dtype)
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, kind)

    rows, features = sum(NEW_ROWS), SHAPE.q_size
    batch, cache = _batch(device), _Cache.random(numbers)
    x, y, weight = (
        numbers(rows, features),
        numbers(rows, features),
        Vector("norm", features, numbers(features)),
    )
    table = torch.as_tensor(np.linspace(-1, 1, 512 * SHAPE.head_dim // 2, dtype=np.float32).reshape(512, -1))
    rope = {id(ops): ops.load_rope(table.numpy(), table.flip(0).numpy()) for ops in (ours, reference)}
    head = Vector("head", SHAPE.head_dim, numbers(SHAPE.head_dim))
    qkv = numbers(rows, SHAPE.q_size + 2 * SHAPE.kv_size)
    norms = HeadNorms(head, head, 1e-6)
    stored = [_Codes.random(256, features, act_order=mixed) for mixed in (False, True)]
    codes = {
        id(ops): [ops.load_quantized([part], None, "none") for part in stored] for ops in (ours, reference)
    }

    def rotated(ops: TorchOps) -> Tensor:
        written = cache.clone()
        q = ops.rope_kv_write(qkv, SHAPE, rope[id(ops)], norms, batch, written, 0)
        return torch.cat((q.flatten(), written.key(0).flatten(), written.value(0).flatten()))

    cases: dict[str, Callable[[TorchOps], Tensor]] = {
        "embedding": lambda ops: ops.embedding(EmbeddingTable("table", rows, features, x), batch),
        "rms_norm": lambda ops: ops.rms_norm(x, weight, 1e-5),
        "add_rms_norm": lambda ops: torch.cat(ops.add_rms_norm(x.clone(), y.clone(), weight, 1e-5)),
        "gated": lambda ops: ops.gated(x, "silu"),
        "add": lambda ops: ops.add(x.clone(), y.clone()),
        "rope_kv_write": rotated,
        "attention": lambda ops: ops.attention(x, SHAPE, batch, cache, 0),
        "linear": lambda ops: torch.cat(
            [ops.linear(x[:count], each).flatten() for count in PRODUCT_ROWS for each in codes[id(ops)]]
        ),
    }
    wrong: dict[str, str] = {}
    ours.poison = True
    for name, compute in cases.items():
        reason = _difference(compute, ours, reference)
        if reason is not None:
            wrong[name] = reason
        batch.scratch.clear()
    ours.poison = False
    reason = sampling_difference(ours.sampling, device)
    return wrong if reason is None else wrong | {"sampling": reason}


def _difference(compute: Callable[[TorchOps], Tensor], ours: CudaOps, reference: TorchOps) -> str | None:
    expected = compute(reference).double()
    try:
        got = compute(ours).double()
    except cuda_abi.CudaKernelError as error:
        return str(error)
    largest = float(expected.abs().max())
    off = float((got - expected).abs().max()) / largest
    return None if off <= BOUNDS[ours.dtype] else f"off by {off:.2%} of the largest value"
