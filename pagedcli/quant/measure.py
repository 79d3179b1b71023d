"""Measures a written checkpoint beside its original: held-out text, greedy continuations, speed. May import torch.

A model is in memory only while it runs: the two take turns, since a machine's speed drifts, and are not there at once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from pagedcli.checkpoint.base import ITEM_SIZES, Checkpoint
from pagedcli.errors import ConfigError
from pagedcli.quant.calibration import Calibration
from pagedcli.quant.calibration_text import find_texts
from pagedcli.quant.evaluation import Evaluation, Window, evaluate
from pagedcli.quant.memory import MAX_EVAL_TOKENS
from pagedcli.quant.quality import LinearQuality, Quality
from pagedcli.quant.request import Engines, Watcher
from pagedcli.text.tokenizer import Tokenizer

EVAL_WINDOW = 512
MIN_EVAL_TOKENS = 64
OWN_TEXT = "a held-out text that comes with paged"
GREEDY_TOKENS = 64
# Turns of each model, whose median speed is reported.
TURNS = 3
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "To install the package, first",
    "The three most important rules of cooking are",
    "def fibonacci(n):",
    "In 1969, two people",
    "Question: What is 12 times 7?\nAnswer:",
    "Dear Sir or Madam,",
)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Text that no calibration has seen.

    Attributes:
        source: For the report.
        windows: Token ids of each window; they follow one another.
        window: Tokens of a window, and from one to the next.
        notes: What a user should hear.
    """

    source: str
    windows: tuple[Window, ...]
    window: int
    notes: tuple[str, ...]


def held_out(name: str | None, tokenizer: Tokenizer, max_position: int) -> HeldOut:
    """The text of --eval, or our own.

    Raises:
        ConfigError: It cannot be read, or is too short to tell anything.
    """
    ids = _held_out_ids(name, tokenizer)
    if len(ids) < MIN_EVAL_TOKENS:
        raise ConfigError(
            f"--eval {name}: has {len(ids)} tokens, at least {MIN_EVAL_TOKENS} are needed: give more text"
        )
    notes: tuple[str, ...] = ()
    if len(ids) > MAX_EVAL_TOKENS:
        notes = (f"--eval: the first {MAX_EVAL_TOKENS:,} of {len(ids):,} tokens are used",)
    used = np.asarray(ids[:MAX_EVAL_TOKENS], np.int64)
    window = min(EVAL_WINDOW, max_position)
    windows = [used[start : start + window] for start in range(0, len(used), window)]
    source = OWN_TEXT if name is None else Path(name).name
    return HeldOut(source, tuple(part for part in windows if len(part) > 1), window, notes)


def _held_out_ids(name: str | None, tokenizer: Tokenizer) -> list[int]:
    if name is None:
        text = files("pagedcli.quant").joinpath("data", "heldout.txt").read_text(encoding="utf-8")
        return tokenizer.encode(text)
    ids: list[int] = []
    for piece in find_texts(name, flag="--eval"):
        ids += piece.encode(tokenizer)
        if len(ids) > MAX_EVAL_TOKENS:
            break
    return ids


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What a model does in the engine: greedy continuations of `PROMPTS`, and its speed in each of its turns."""

    greedy: tuple[tuple[int, ...], ...]
    rates: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        """Of the median turn."""
        return statistics.median(self.rates)


def behave_in_turns(
    engines: Engines, models: Sequence[Path], tokenizer: Tokenizer, watcher: Watcher
) -> list[Behaviour]:
    """Run models one after the other, and that `TURNS` times; the first time they continue the prompts, too."""
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    greedy: list[list[list[int]]] = []
    rates: list[list[float]] = [[] for _ in models]
    with watcher.phase("run both in turns"):
        for turn in range(TURNS):
            for which, model in enumerate(models):
                watcher.progress(turn * len(models) + which, TURNS * len(models), model.name)
                with engines.open(model) as session:
                    if turn == 0:
                        greedy.append(
                            session.write(prompts, max_tokens=GREEDY_TOKENS, temperature=0.0, seed=0)
                        )
                    rates[which].append(session.tokens_per_second())
    return [
        Behaviour(tuple(map(tuple, texts)), tuple(speeds))
        for texts, speeds in zip(greedy, rates, strict=True)
    ]


def first_divergence(first: Behaviour, second: Behaviour) -> float:
    """Tokens until the first that differs, mean over the prompts; all of them where none differs."""
    lengths = []
    for a, b in zip(first.greedy, second.greedy, strict=True):
        pairs = zip(a, b, strict=False)
        lengths.append(next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b))))
    return statistics.fmean(lengths)


@dataclass(frozen=True, slots=True)
class Pair:
    """The original and its quantized form."""

    original: Checkpoint
    quantized: Checkpoint


def compare(pair: Pair, text: HeldOut, *, folded: bool, watcher: Watcher) -> Evaluation:
    """Both on held-out text; `folded` as in `evaluate`."""

    def layers(done: int, total: int) -> None:
        watcher.progress(done, total, f"layer {done} of {total}")

    with watcher.phase("compare with the original on held-out text"):
        return evaluate(pair.original, pair.quantized, text.windows, folded=folded, progress=layers)


def make_report(
    pair: Pair,
    found: Evaluation,
    *,
    methods: Mapping[str, str],
    text: HeldOut,
    calibration: Calibration,
    before: Behaviour,
    after: Behaviour,
    notes: tuple[str, ...] = (),
) -> Quality:
    """The quality report.

    Args:
        pair: Both checkpoints, the quantized one as it lies on the disk.
        found: Of `compare`.
        methods: How each linear was quantized, by name; "kept" where it was not.
        text: Held-out.
        calibration: What was calibrated with.
        before: The original in the engine.
        after: The quantized model in the engine.
        notes: What happened to linears on the way.
    """
    return Quality(
        perplexity_original=found.perplexity_original,
        perplexity_quantized=found.perplexity_quantized,
        kl_mean=found.kl_mean,
        top1_agreement=found.top1_agreement,
        first_divergence=first_divergence(before, after),
        bits_per_weight=bits_per_weight(pair.quantized, methods),
        bytes=pair.quantized.stored_bytes(),
        original_bytes=pair.original.stored_bytes(),
        layers=tuple(LinearQuality(name, error, methods[name]) for name, error in found.errors.items()),
        calibration=calibration.report(),
        eval_source=text.source,
        eval_tokens=found.scored_tokens,
        eval_window=text.window,
        eval_stride=text.window,
        tokens_per_second_before=before.tokens_per_second,
        tokens_per_second_after=after.tokens_per_second,
        turns=TURNS,
        notes=notes,
        repeats_one_token=_repeats(after) and not _repeats(before),
    )


def bits_per_weight(checkpoint: Checkpoint, linears: Iterable[str]) -> float:
    """Bits that the weights of some linears take on average, quantized or not."""
    found = checkpoint.quantization
    size, count = (0, 0) if found is None else (found.num_bytes, found.num_weights)
    for name in linears:
        if checkpoint.quantized(name) is None:
            tensor = checkpoint.tensor(f"{name}.weight")
            count += math.prod(tensor.shape)
            size += math.prod(tensor.shape) * ITEM_SIZES[tensor.dtype]
    return 8 * size / count


def _repeats(behaviour: Behaviour) -> bool:
    return all(len(set(row)) == 1 for row in behaviour.greedy)
