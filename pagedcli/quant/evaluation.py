"""How much a quantized checkpoint differs from its original on held-out text. May import torch.

Both are streamed layer by layer. Perplexity, KL and agreement compare the two models as wholes, each on its own
activations. The error of a linear compares its outputs for the *same* input, the original's, so that it tells where the
loss arises and not where it has grown to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedcli.checkpoint.base import Checkpoint
from pagedcli.models.layers import DecoderLayer
from pagedcli.ops.weights import FusedLinear
from pagedcli.quant.evaluation_model import Head, State, StreamedModel
from pagedcli.quant.memory import SCORED_ROWS

_Layers = tuple[DecoderLayer, DecoderLayer]
Window = np.ndarray[Any, np.dtype[np.int64]]
Progress = Callable[[int, int], None]
"""Told (layers done, layers)."""

ERROR_WINDOWS = 1
# AWQ may fold a scale of each channel out of these into the linear that follows; such a scale is no error.
_FOLDED = ("v_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured.

    Attributes:
        perplexity_original: Of the original on the scored tokens.
        perplexity_quantized: Of the quantized model.
        kl_mean: Mean over scored positions of KL(original || quantized), nats.
        top1_agreement: Part of the scored positions at which both find the same token likeliest.
        scored_tokens: Positions that were scored: all but the first of each window.
        errors: Relative squared error of each linear's output for the same input, by name without ".weight".
    """

    perplexity_original: float
    perplexity_quantized: float
    kl_mean: float
    top1_agreement: float
    scored_tokens: int
    errors: Mapping[str, float]

    @property
    def perplexity_increase(self) -> float:
        """As a part of the original's."""
        return self.perplexity_quantized / self.perplexity_original - 1.0


def evaluate(
    original: Checkpoint,
    quantized: Checkpoint,
    windows: Sequence[Window],
    *,
    folded: bool,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Compare two checkpoints of one model.

    Args:
        original: The reference.
        quantized: Its quantized form.
        windows: Token ids, each evaluated from position 0.
        folded: Whether scales may be folded between linears (AWQ); see `_FOLDED`.
        progress: Told after each layer.
    """
    with torch.inference_mode():
        first, second = StreamedModel.open(original), StreamedModel.open(quantized)
        states, others = first.embed(windows), second.embed(windows)
        errors = _Errors(folded)
        for index in range(first.spec.num_layers):
            layer, other = first.layer(index), second.layer(index)
            states = [
                _measure(errors, first, second, (layer, other), index, state)
                if number < ERROR_WINDOWS
                else first.run(layer, index, state)
                for number, state in enumerate(states)
            ]
            others = [second.run(other, index, state) for state in others]
            progress(index + 1, first.spec.num_layers)
        score, heads = _Score(), (first.head(), second.head())
        for ids, state, other_state in zip(windows, states, others, strict=True):
            score.add(ids, (heads[0], state), (heads[1], other_state))
    return score.evaluation(errors.by_name())


def _measure(
    errors: _Errors, first: StreamedModel, second: StreamedModel, layers: _Layers, index: int, state: State
) -> State:
    """Run both forms of a layer on one state of the original's and compare what each linear gives.

    Returns:
        The original's state after the layer.
    """
    expected: list[tuple[Tensor, Tensor]] = []
    first.ops.tap = lambda _, x, out: expected.append((x, out))
    after = first.run(layers[0], index, state)
    first.ops.tap = None
    second.ops.tap = lambda linear, x, _: errors.add(linear, x, *expected.pop(0))
    second.run(layers[1], index, state)
    second.ops.tap = None
    return after


@dataclass(slots=True)
class _Errors:
    """Sums of each linear's outputs by channel, y of the original and z of the quantized: y*y, y*z, z*z."""

    folded: bool
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, linear: FusedLinear, x: Tensor, original_x: Tensor, expected: Tensor) -> None:
        """Count one window of a fused linear.

        Args:
            linear: The quantized one.
            x: What it read, [rows, in_features].
            original_x: What the original read; it differs by the errors before and, if scales are folded, by a factor
                of each channel.
            expected: What the original gave, [rows, out_features].
        """
        same = original_x * _channel_scales(original_x, x) if self.folded else original_x
        found = torch.nn.functional.linear(same, linear.weight, linear.bias)
        sizes = [part.size for part in linear.parts]
        for part, y, z in zip(
            linear.parts, torch.split(expected, sizes, 1), torch.split(found, sizes, 1), strict=True
        ):
            y, z = y.double(), z.double()
            new = torch.stack([(y * y).sum(0), (y * z).sum(0), (z * z).sum(0)])
            self.sums[part.name] = self.sums[part.name] + new if part.name in self.sums else new

    def by_name(self) -> dict[str, float]:
        """Relative squared error of each linear."""
        return {name: self._error(name, sums) for name, sums in self.sums.items()}

    def _error(self, name: str, sums: Tensor) -> float:
        yy, yz, zz = sums
        if self.folded and name.rsplit(".", 1)[-1] in _FOLDED:
            wrong = yy - torch.where(zz > 0, yz * yz / zz.clamp_min(1e-300), torch.zeros_like(zz))
        else:
            wrong = yy - 2 * yz + zz
        return float(wrong.clamp_min(0).sum() / yy.sum().clamp_min(1e-300))


def _channel_scales(original: Tensor, x: Tensor) -> Tensor:
    """The factors that bring `original` nearest to `x`, [features]."""
    size = (original * original).sum(0)
    return torch.where(size > 0, (original * x).sum(0) / size.clamp_min(1e-30), torch.ones_like(size))


@dataclass(slots=True)
class _Score:
    """Sums over scored positions."""

    count: int = 0
    agreed: int = 0
    loss: float = 0.0
    other_loss: float = 0.0
    divergence: float = 0.0

    def add(self, ids: Window, first: tuple[Head, State], second: tuple[Head, State]) -> None:
        """Score a window, a few rows at a time, so that no whole window of logits exists."""
        hidden, other = (head.hidden(state)[:-1] for head, state in (first, second))
        targets = torch.from_numpy(ids[1:])
        for start in range(0, len(targets), SCORED_ROWS):
            rows = slice(start, start + SCORED_ROWS)
            logits, other_logits = first[0].logits(hidden[rows]), second[0].logits(other[rows])
            self._add_rows(logits.double(), other_logits.double(), targets[rows])

    def _add_rows(self, logits: Tensor, other_logits: Tensor, targets: Tensor) -> None:
        log_p, log_q = logits.log_softmax(1), other_logits.log_softmax(1)
        self.count += len(targets)
        self.agreed += int((log_p.argmax(1) == log_q.argmax(1)).sum())
        self.loss -= float(log_p.gather(1, targets[:, None]).sum())
        self.other_loss -= float(log_q.gather(1, targets[:, None]).sum())
        self.divergence += float((log_p.exp() * (log_p - log_q)).sum())

    def evaluation(self, errors: Mapping[str, float]) -> Evaluation:
        """Means of the sums."""
        return Evaluation(
            perplexity_original=_perplexity(self.loss, self.count),
            perplexity_quantized=_perplexity(self.other_loss, self.count),
            kl_mean=max(0.0, self.divergence / self.count),
            top1_agreement=self.agreed / self.count,
            scored_tokens=self.count,
            errors=errors,
        )


def _perplexity(loss: float, count: int) -> float:
    """Infinity where the loss is beyond any number."""
    mean = loss / count
    return math.exp(mean) if mean < 700 else math.inf
