"""Statistics of a linear's inputs: X^T X and the mean of |X|, summed in one order whatever the threads.

Imports torch. The error of a linear's output is a quadratic form of the error of its weights,
|X D^T|^2 = tr(D G D^T) with G = X^T X, so that a search needs one pass over the activations, not one for each try.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagedcli.quant.workers import Workers, row_blocks

_TILE = 256


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """Of all rows that a linear is applied to.

    Attributes:
        gram: [in, in], X^T X / rows, symmetric.
        rows: How many.
        samples: The rows themselves, [rows of the sample, in] each.
    """

    gram: Tensor
    rows: int
    samples: Sequence[Tensor]

    def mean_abs(self, workers: Workers) -> Tensor:
        """[in], mean of |x|."""
        total = torch.zeros(self.gram.shape[0], dtype=torch.float64)
        for part in workers.map(lambda sample: sample.abs().sum(0), self.samples):
            total += part
        return (total / self.rows).to(self.gram.dtype)


@contextmanager
def rounded_products(dtype: torch.dtype) -> Iterator[None]:
    """Let float32 products of matrices round what they multiply to bfloat16, if that is `dtype`; sums stay float32.

    A Gram matrix of rounded inputs is still one: no eigenvalue turns negative.
    """
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)  # newer than the oldest torch that will do
    if dtype is not torch.bfloat16 or not hasattr(matmul, "fp32_precision"):
        yield
        return
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def measure(samples: Sequence[Tensor], workers: Workers) -> InputStatistics:
    """Statistics of samples [rows, in] each, in their dtype."""
    features = samples[0].shape[1]
    rows = sum(sample.shape[0] for sample in samples)
    gram = samples[0].new_zeros((features, features))

    def fill(columns: slice) -> None:
        # Half of it, tile by tile; the samples are added in their order.
        out = gram[columns, columns.start :]
        for sample in samples:
            out.addmm_(sample[:, columns].T, sample[:, columns.start :])
        out.div_(rows)
        tile = gram[columns, columns]
        tile.copy_(tile.triu() + tile.triu(1).T)
        gram[columns.stop :, columns] = gram[columns, columns.stop :].T

    workers.map(fill, row_blocks(features, _TILE))
    return InputStatistics(gram, rows, samples)


def output_error(difference: Tensor, gram: Tensor, workers: Workers) -> float:
    """tr(D G D^T): the squared error of the output per row of X, for differences [out, in] of the weights."""
    return sum(workers.map(lambda rows: quadratic(difference[rows], gram), row_blocks(difference.shape[0])))


def quadratic(rows: Tensor, gram: Tensor) -> float:
    """tr(R G R^T) of some rows [rows, in]."""
    return float((rows @ gram).mul_(rows).sum(1).sum(dtype=torch.float64))
