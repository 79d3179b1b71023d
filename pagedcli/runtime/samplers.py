"""Who samples: our CUDA kernels where the ops have them, else torch. May import torch and `ops`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pagedcli.ops.cuda_ops import CudaOps
from pagedcli.runtime import sampler
from pagedcli.runtime.cuda_sampler import CudaSampler
from pagedcli.runtime.sampler import LogprobRequest, Logprobs, SampleRequest


class Sampler(Protocol):
    """Chooses tokens and tells how probable they were; both functions as in `sampler`."""

    def sample(
        self, logits: Tensor, requests: Sequence[SampleRequest], store: Tensor, /
    ) -> tuple[Tensor, Tensor]:
        """Tokens [len(requests)] int64 and faults [len(requests)] int64, on the device."""

    def logprobs(self, logits: Tensor, requests: Sequence[LogprobRequest], tokens: Tensor, /) -> Logprobs:
        """Log-probabilities under the model's own distribution."""


class TorchSampler:
    """Implements `Sampler` on torch: the reference."""

    def sample(
        self, logits: Tensor, requests: Sequence[SampleRequest], store: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `sampler.sample`."""
        return sampler.sample(logits, requests, store)

    def logprobs(self, logits: Tensor, requests: Sequence[LogprobRequest], tokens: Tensor) -> Logprobs:
        """As `sampler.logprobs`."""
        return sampler.logprobs(logits, requests, tokens)


def sampler_for(ops: object, vocab_size: int) -> Sampler:
    """The sampler for the logits of these ops."""
    if isinstance(ops, CudaOps) and ops.has_sampling and vocab_size <= ops.sampling.max_vocabulary:
        return CudaSampler(ops.sampling, vocab_size, torch.device(ops.device))
    return TorchSampler()


def sampling_notes(ops: object, vocab_size: int) -> tuple[str, ...]:
    """What a user should know of the choice."""
    if not isinstance(ops, CudaOps) or not ops.has_sampling or vocab_size <= ops.sampling.max_vocabulary:
        return ()
    most = f"{ops.sampling.max_vocabulary:,} tokens"
    return (
        f"torch's sampling is used: our CUDA kernel takes up to {most}, the vocabulary has {vocab_size:,}",
    )
