"""Sampling by our CUDA kernels, of the requests that `sampler` samples with torch. Imports torch, numpy and `ops`.

A slot's wishes are packed once, when its request is first sampled for; each step fills in what changes and sends all
rows to the device in one transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedcli.ops.cuda_sampling import ROW, CudaSampling, LogprobTensors
from pagedcli.runtime.sampler import LogprobRequest, Logprobs, SampleRequest
from pagedcli.runtime.sampling_rows import SamplingRow
from pagedcli.runtime.transfer import integers, to_device

_COPIED = (
    *("temperature", "top_p", "min_p", "top_k"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"),
)


@dataclass(frozen=True, slots=True)
class _Packed:
    """A slot's row as the kernel wants it; `room` is kept because the row points to it."""

    row: SamplingRow
    packed: bytes
    room: Tensor | None


class CudaSampler:
    """Implements `Sampler`.

    Args:
        kernels: Of the ops that compute the logits.
        vocab_size: Columns of the logits, at most `kernels.max_vocabulary`.
        device: Of the logits.
    """

    def __init__(self, kernels: CudaSampling, vocab_size: int, device: torch.device) -> None:
        self._kernels = kernels
        self._vocab_size = vocab_size
        self._device = device
        self._slots: dict[int, _Packed] = {}

    def sample(
        self, logits: Tensor, requests: Sequence[SampleRequest], store: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `sampler.sample`."""
        rows = to_device(self._rows(requests, store), self._device)
        chosen = torch.empty((2, len(requests)), dtype=torch.int64, device=self._device)
        self._kernels.sample(logits, rows, chosen)
        return chosen[0], chosen[1]

    def logprobs(self, logits: Tensor, requests: Sequence[LogprobRequest], tokens: Tensor) -> Logprobs:
        """As `sampler.logprobs`, to a part in a million."""
        num_top = tuple(request.num_top for request in requests)
        most = min(max(1, *num_top), self._vocab_size)
        wanted = integers(
            [value for r in requests for value in (r.logit_row, min(r.num_top, most))], self._device
        )
        logit_rows, tops = wanted.view(-1, 2).unbind(1)
        out = LogprobTensors.empty(len(requests), most, self._device)
        self._kernels.logprobs(logits, logit_rows, tokens, tops, out)
        return Logprobs(tokens, out.chosen, out.ranks, out.top_ids, out.top, num_top)

    def _rows(self, requests: Sequence[SampleRequest], store: Tensor) -> np.ndarray[Any, Any]:
        """The bytes of [len(requests)] of `ROW`."""
        joined = bytearray().join([self._packed(request, store).packed for request in requests])
        rows = np.frombuffer(joined, ROW)
        rows["logit_row"] = [request.logit_row for request in requests]
        rows["position"] = [request.position for request in requests]
        slots = np.array([request.slot for request in requests], np.uint64)
        rows["tokens"] = store.data_ptr() + slots * (store.stride(0) * store.element_size())
        return np.frombuffer(joined, np.uint8)

    def _packed(self, request: SampleRequest, store: Tensor) -> _Packed:
        known = self._slots.get(request.slot)
        if known is None or known.row is not request.row:
            known = self._pack(request.row, store.shape[1])
            self._slots[request.slot] = known
        return known

    def _pack(self, row: SamplingRow, max_tokens: int) -> _Packed:
        room = self._room(row, max_tokens)
        packed = np.zeros(1, ROW)
        for name in _COPIED:
            packed[name] = getattr(row.params, name)
        packed["seed"] = row.seed & (2**64 - 1)
        packed["sample_index"], packed["num_prompt"] = row.sample_index, row.num_prompt
        words = row.bad_words
        arrays = (
            ("forbidden", "num_forbidden", row.forbidden),
            ("early", "num_early", row.early_forbidden),
            ("bias_ids", "num_bias", row.bias_ids),
            ("bias", "num_bias", row.bias),
            ("bad_heads", "num_bad", None if words is None else words.heads),
            ("bad_last", "num_bad", None if words is None else words.last),
        )
        for name, count, tensor in arrays:
            if tensor is not None:
                packed[name], packed[count] = tensor.data_ptr(), len(tensor)
        packed["bad_length"] = 0 if words is None else words.heads.shape[1]
        packed["room"] = 0 if room is None else room.data_ptr()
        return _Packed(row, packed.tobytes(), room)

    def _room(self, row: SamplingRow, max_tokens: int) -> Tensor | None:
        """For as many tokens as penalties and bias can ever change."""
        num_bias = 0 if row.bias_ids is None else len(row.bias_ids)
        if not row.penalizes and not num_bias:
            return None
        limit = row.params.max_tokens
        seen = max_tokens if limit is None else min(max_tokens, row.num_prompt + limit)
        count = min(self._vocab_size, (seen if row.penalizes else 0) + num_bias)
        return torch.empty(count * self._kernels.room_bytes, dtype=torch.uint8, device=self._device)
