"""The sampling kernels on torch tensors. Imports torch, numpy and `paged_kernels`.

A call allocates nothing and reads nothing back: whoever calls owns all tensors, so that it can be part of a CUDA graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from paged_kernels import cuda_abi
from torch import Tensor

ROW = np.dtype(cuda_abi.PagedSampleRow)
"""What a row wants of the sampler, as kernels/src/cuda/sampling.h tells; addresses are of device memory."""


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of `count` tokens.

    Attributes:
        chosen: [count] float64.
        ranks: [count] int64, 1 for the most probable.
        top_ids: [count, most] int64; of each row, as many are written as were asked for.
        top: [count, most] float64.
    """

    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor

    @classmethod
    def empty(cls, count: int, most: int, device: torch.device) -> LogprobTensors:
        """Room for them."""

        def room(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=kind, device=device)

        return cls(
            room(torch.float64, count),
            room(torch.int64, count),
            room(torch.int64, count, most),
            room(torch.float64, count, most),
        )


class CudaSampling:
    """The kernels of a library.

    Args:
        library: As `paged_kernels.cuda_abi.load` gives it.
        call: Starts a kernel by its name on the current stream.
    """

    def __init__(self, library: ctypes.CDLL, call: Callable[..., None]) -> None:
        self._library = library
        self._call = call

    @property
    def max_vocabulary(self) -> int:
        """Tokens of the largest vocabulary."""
        return int(self._library.paged_cuda_sample_max_vocabulary())

    @property
    def room_bytes(self) -> int:
        """Of a row's room, for each token whose logit is changed."""
        return int(self._library.paged_cuda_sample_room())

    def sample(self, logits: Tensor, rows: Tensor, chosen: Tensor) -> None:
        """Choose a token for each row.

        Args:
            logits: [any, vocab_size] float32.
            rows: The bytes of [count] of `ROW`, on the device.
            chosen: [2, count] int64: tokens and `Fault`s are written here.

        Raises:
            CudaKernelError: The vocabulary is larger than `max_vocabulary`, or the kernel did not start.
        """
        tokens, faults = chosen
        self._call(
            "sample",
            cuda_abi.PagedSample(
                _logits(logits),
                rows.data_ptr(),
                tokens.data_ptr(),
                faults.data_ptr(),
                logits.stride(0),
                len(tokens),
                logits.shape[1],
            ),
        )

    def logprobs(
        self, logits: Tensor, logit_rows: Tensor, tokens: Tensor, num_top: Tensor, out: LogprobTensors
    ) -> None:
        """Log-probabilities of given tokens under the unchanged logits.

        Args:
            logits: [any, vocab_size] float32.
            logit_rows: [count] int64, rows of the logits.
            tokens: [count] int64.
            num_top: [count] int64, alternatives, at most as many as `out` has room for.
            out: Where they are written.

        Raises:
            CudaKernelError: The kernel did not start.
        """
        read: list[Any] = [tensor.contiguous() for tensor in (logit_rows, tokens, num_top)]
        written = [out.chosen, out.ranks, out.top_ids, out.top]
        addresses = [tensor.data_ptr() for tensor in [*read, *written]]
        self._call(
            "logprobs",
            cuda_abi.PagedLogprobs(
                _logits(logits),
                *addresses,
                logits.stride(0),
                len(tokens),
                logits.shape[1],
                out.top.shape[1],
            ),
        )


def _logits(logits: Tensor) -> int:
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.stride(1) == 1, f"rows of logits with strides {logits.stride()}"
    return logits.data_ptr()
