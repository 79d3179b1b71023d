"""Starts `CudaOps`: loads the library, tries every kernel once against torch's own op. Imports torch, `paged_kernels`.

A kernel whose result is off is not used: torch's op takes its place and a note says so, or, if the user wants none of
that (--strict-kernels), the start fails.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from pagedcli.ops.cuda_ops import ACTIVATIONS, CudaOps
from pagedcli.ops.cuda_sampling_check import sampling_difference
from pagedcli.ops.protocol import AttentionShape, HeadNorms
from pagedcli.ops.torch_ops import TorchOps
from pagedcli.ops.weights import EmbeddingTable, Vector

BOUNDS = {"bfloat16": 2e-2, "float16": 4e-3}
"""Largest difference from torch's op, in parts of the largest value."""
BLOCK_SIZE = 16
LENGTHS = (200, 90)
NEW_ROWS = (1, 80 - 1)
PRODUCT_ROWS = (5, 40, 80)
"""One for each way in which a product with 4-bit weights is computed."""


@dataclass(frozen=True, slots=True)
class TriedSizes:
    """Of the model to come, because there are kernels for each.

    Attributes:
        head_dim: Of its attention.
        vocab_size: Of its logits.
    """

    head_dim: int = 128
    vocab_size: int = 2001

    def known_to(self, ops: CudaOps) -> TriedSizes:
        """The same, but sizes that there is a kernel for: others go to torch's ops anyway."""
        usual = TriedSizes()
        most = ops.sampling.max_vocabulary
        return TriedSizes(
            self.head_dim if ops.has_heads(self.head_dim) else usual.head_dim,
            self.vocab_size if usual.vocab_size <= self.vocab_size <= most else usual.vocab_size,
        )

    @property
    def attention(self) -> AttentionShape:
        """Of a group of four heads."""
        return AttentionShape(8, 2, self.head_dim, scale=self.head_dim**-0.5, window=None)


def open_cuda_ops(
    device: str, dtype: str, library: Path | None, *, strict: bool, sizes: TriedSizes | None = None
) -> TorchOps:
    """Our kernels where they are built and right, else torch's ops, with notes that say so.

    Args:
        device: "cuda" or "cuda:0" and the like.
        dtype: "bfloat16" or "float16" for our kernels.
        library: As `paged_kernels.cuda_build.library_path` names it; it need not be there.
        strict: Refuse to run torch's op in the place of a kernel.
        sizes: With which the kernels are tried.

    Raises:
        ConfigError: `strict`, and a kernel is missing or wrong; or one that brought the GPU to a halt.
    """
    loaded = _load(dtype, library)
    if not isinstance(loaded, str):
        # The trial's weights and sizes are no part of what the model is loaded into.
        tried, ours = CudaOps(device, dtype, loaded), CudaOps(device, dtype, loaded)
        for name, reason in wrong_kernels(tried, TorchOps(device, dtype), sizes or TriedSizes()).items():
            _refuse(strict, f"the CUDA kernel for {name} is not right on this GPU ({reason})")
            ours.replace(name, reason)
        return ours
    _refuse(strict, f"our CUDA kernels cannot be used: {loaded}")
    return TorchOps(device, dtype, notes=(f"torch's ops are used instead of our CUDA kernels: {loaded}",))


def _load(dtype: str, library: Path | None) -> ctypes.CDLL | str:
    """The library, or why it cannot be used."""
    if dtype not in cuda_abi.DTYPES:
        return f"they compute in {' or '.join(sorted(cuda_abi.DTYPES))}, not {dtype}"
    if library is None or not library.is_file():
        return "they are not built (run: paged build-cuda)"
    try:
        return cuda_abi.load(library)
    except (OSError, AttributeError) as error:
        return f"{library} cannot be loaded: {error} (run: paged build-cuda --force)"


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
    def random(cls, shape: AttentionShape, numbers: Callable[..., Tensor]) -> _Cache:
        num_blocks = sum(-(-length // BLOCK_SIZE) for length in LENGTHS)
        sizes = (num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        return cls(numbers(*sizes), numbers(*sizes))

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


def wrong_kernels(ours: CudaOps, reference: TorchOps, sizes: TriedSizes) -> dict[str, str]:
    """Ops whose kernel does not start or is off by more than its rounding, with what was found.

    Raises:
        ConfigError: A kernel brought the GPU to a halt: nothing can be computed on it in this process any more.
    """
    device, sizes = torch.device(ours.device), sizes.known_to(ours)
    wrong: dict[str, str] = {}
    ours.poison = True
    for name, compute in _cases(ours, reference, sizes.attention).items():
        reason = _difference(name, compute, ours, reference)
        if reason is not None:
            wrong[name] = reason
    ours.poison = False
    with _halting("sampling"):
        reason = sampling_difference(ours.sampling, device, sizes.vocab_size)
    return wrong if reason is None else wrong | {"sampling": reason}


def _cases(
    ours: CudaOps, reference: TorchOps, shape: AttentionShape
) -> dict[str, Callable[[TorchOps], Tensor]]:
    """What each op is tried with."""
    device, kind = torch.device(ours.device), getattr(torch, ours.dtype)
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, kind)

    rows, features = sum(NEW_ROWS), shape.q_size
    batch, cache = _batch(device), _Cache.random(shape, numbers)
    x, y, weight = (
        numbers(rows, features),
        numbers(rows, features),
        Vector("norm", features, numbers(features)),
    )
    table = torch.as_tensor(np.linspace(-1, 1, 512 * shape.head_dim // 2, dtype=np.float32).reshape(512, -1))
    rope = {id(ops): ops.load_rope(table.numpy(), table.flip(0).numpy()) for ops in (ours, reference)}
    head = Vector("head", shape.head_dim, numbers(shape.head_dim))
    qkv = numbers(rows, shape.q_size + 2 * shape.kv_size)
    stored = [_Codes.random(256, features, act_order=mixed) for mixed in (False, True)]
    codes = {
        id(ops): [ops.load_quantized([part], None, "none") for part in stored] for ops in (ours, reference)
    }

    def rotated(ops: TorchOps, norms: HeadNorms | None) -> Tensor:
        written = cache.clone()
        q = ops.rope_kv_write(qkv, shape, rope[id(ops)], norms, batch, written, 0)
        return torch.cat((q.flatten(), written.key(0).flatten(), written.value(0).flatten()))

    def attended(ops: TorchOps) -> Tensor:
        batch.scratch.clear()
        return ops.attention(x, shape, batch, cache, 0)

    return {
        "embedding": lambda ops: ops.embedding(EmbeddingTable("table", rows, features, x), batch),
        "rms_norm": lambda ops: ops.rms_norm(x, weight, 1e-5),
        "add_rms_norm": lambda ops: torch.cat(ops.add_rms_norm(x.clone(), y.clone(), weight, 1e-5)),
        "gated": lambda ops: torch.cat([ops.gated(x, activation) for activation in ACTIVATIONS]),
        "add": lambda ops: ops.add(x.clone(), y.clone()),
        "rope_kv_write": lambda ops: torch.cat(
            [rotated(ops, norms) for norms in (HeadNorms(head, head, 1e-6), None)]
        ),
        "attention": attended,
        "linear": lambda ops: torch.cat(
            [ops.linear(x[:count], each).flatten() for count in PRODUCT_ROWS for each in codes[id(ops)]]
        ),
    }


def _difference(
    name: str, compute: Callable[[TorchOps], Tensor], ours: CudaOps, reference: TorchOps
) -> str | None:
    expected = compute(reference).double()
    with _halting(name):
        try:
            got = compute(ours).double()
        except cuda_abi.CudaKernelError as error:
            return str(error)
        off = float((got - expected).abs().max()) / float(expected.abs().max())
    return None if off <= BOUNDS[ours.dtype] else f"off by {off:.2%} of the largest value"


@contextmanager
def _halting(name: str) -> Iterator[None]:
    """What CUDA says of a kernel after it was started comes with whatever waits for it, and with all that follows."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ConfigError(
            f"the CUDA kernel for {name} brought the GPU to a halt ({str(error).splitlines()[0]}): build it for "
            "this GPU with paged build-cuda --force, or remove the library that it built to run torch's ops"
        ) from error
