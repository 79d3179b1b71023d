"""Perplexity and KL by plain transformers in float32, on weights put in from any checkpoint that paged reads.

Nothing of ours is between the weights and the figures but the dequantization. The original's log-probabilities are
kept in a file, so that every later call compares with the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pagedcli.checkpoint import Checkpoint
from pagedcli.quant.source import Source


class Oracle:
    """transformers' model with weights put in, and the held-out text.

    Args:
        checkpoint: The original.
        ids: Tokens of the held-out text.
        window: Tokens that are read together; all but the first of a window are scored, windows do not overlap.
        kept: File for the original's log-probabilities, float16; made if it is not there.
    """

    def __init__(self, checkpoint: Checkpoint, ids: list[int], window: int, kept: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = dict(checkpoint.config)
        for key in ("quantization_config", "torch_dtype"):
            config.pop(key, None)
        kind = config.pop("model_type")
        self._original = checkpoint
        self._model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config)).float().eval()
        self._windows = [torch.tensor([ids[at : at + window]]) for at in range(0, len(ids) - 1, window)]
        self._kept, self._shape = kept, (len(ids), int(config["vocab_size"]))

    def load(self, checkpoint: Checkpoint) -> None:
        """Put in all weights of a checkpoint, dequantized."""
        source, state = Source(checkpoint), self._model.state_dict()
        for name in checkpoint.names():
            if name in state:
                state[name].copy_(source.tensor(name))

    def put(self, name: str, values: Tensor) -> None:
        """Put in one tensor."""
        self._model.state_dict()[name].copy_(values)

    def original(self) -> float:
        """The original's perplexity; its log-probabilities are written to the file."""
        self.load(self._original)
        partial = self._kept.with_suffix(".part")
        table = np.memmap(partial, np.float16, "w+", shape=self._shape)
        loss, first = 0.0, 0
        for ids, found in self._log_probabilities():
            table[first : first + len(ids)] = found.half().numpy()
            first += len(ids)
            loss += _loss(ids, found)
        table.flush()
        partial.rename(self._kept)
        return math.exp(loss / self._scored)

    def measure(self) -> tuple[float, float]:
        """(perplexity, mean of KL(original || what is loaded)) in nats; `original` has been called, now or before."""
        table = np.memmap(self._kept, np.float16, "r", shape=self._shape)
        loss, divergence, first = 0.0, 0.0, 0
        for ids, found in self._log_probabilities():
            expected = torch.from_numpy(np.array(table[first : first + len(ids)])).float()
            first += len(ids)
            loss += _loss(ids, found)
            divergence += float(expected.exp().mul_(expected.sub(found)).sum(1)[:-1].sum())
        return math.exp(loss / self._scored), divergence / self._scored

    @property
    def _scored(self) -> int:
        return sum(ids.shape[1] - 1 for ids in self._windows)

    def _log_probabilities(self) -> Iterator[tuple[Tensor, Tensor]]:
        with torch.inference_mode():
            for ids in self._windows:
                yield ids[0], self._model(ids, use_cache=False).logits[0].log_softmax(-1)


def _loss(ids: Tensor, found: Tensor) -> float:
    return -float(found[:-1].gather(1, ids[1:, None]).sum())
