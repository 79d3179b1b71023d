"""Calibration data: token ids in samples of one length, chosen by a seed. May import `text` and `errors`; no torch.

Texts are put in a seeded order, joined and cut, so that long ones are split and short ones packed; nothing but the
rest after the last full sample is left out. What was used is in the value: source, tokens, seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedcli.errors import ConfigError
from pagedcli.quant.calibration_text import SourceText, find_texts
from pagedcli.quant.self_written import SELF_WRITTEN, WriteText, write_texts
from pagedcli.text.tokenizer import Tokenizer

MIN_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Calibration:
    """Samples and where they come from.

    Attributes:
        samples: [samples, seq_len] int64 token ids.
        source: Name of the file or data set, or `self_written.SELF_WRITTEN`.
        seed: That chose them.
        notes: What a user should hear, a line each.
    """

    samples: np.ndarray[Any, np.dtype[np.int64]]
    source: str
    seed: int
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """In all samples."""
        return int(self.samples.size)

    def report(self) -> dict[str, Any]:
        """For quality.json."""
        return {"source": self.source, "tokens": self.tokens, "seed": self.seed}


def calibration_from_file(
    name: str, tokenizer: Tokenizer, *, samples: int, seq_len: int, seed: int
) -> Calibration:
    """Samples of a file or hub data set.

    Args:
        name: File, or hub data set as `owner/name:FILE`.
        tokenizer: Of the model.
        samples: At most so many.
        seq_len: Tokens of each.
        seed: Chooses them.

    Raises:
        ConfigError: The source cannot be read, or gives fewer than 8 full samples.
    """
    texts = find_texts(name, flag="--calibration")
    random.Random(seed).shuffle(texts)
    cut, rest = cut_samples(encoded(texts, tokenizer), samples, seq_len)
    source = Path(name).name if Path(name).expanduser().is_file() else name  # no path of this machine
    return _checked(source, cut, rest, samples, seq_len, seed)


def calibration_by_model(
    write: WriteText,
    tokenizer: Tokenizer,
    *,
    samples: int,
    seq_len: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Samples that the model writes itself; see `self_written`.

    Raises:
        ConfigError: It wrote fewer than 8 full samples (it ends every text at once).
    """
    texts = write_texts(write, tokenizer, tokens=samples * seq_len, seed=seed, progress=progress)
    cut, rest = cut_samples(texts, samples, seq_len)
    return _checked(SELF_WRITTEN, cut, rest, samples, seq_len, seed)


def encoded(texts: Iterable[SourceText], tokenizer: Tokenizer) -> Iterable[Sequence[int]]:
    """Token ids of one text after the other, made when they are asked for."""
    return (text.encode(tokenizer) for text in texts)


def cut_samples(
    texts: Iterable[Sequence[int]], samples: int, seq_len: int
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
    """The first `samples` samples of the joined texts, [n, seq_len], and the tokens that fill no sample."""
    wanted = samples * seq_len
    ids: list[int] = []
    for text in texts:
        ids.extend(text)
        if len(ids) >= wanted:
            break
    full = min(len(ids), wanted) // seq_len
    cut = np.asarray(ids[: full * seq_len], np.int64).reshape(full, seq_len)
    return cut, len(ids) - full * seq_len if full < samples else 0


def _checked(
    source: str, cut: np.ndarray[Any, np.dtype[np.int64]], rest: int, samples: int, seq_len: int, seed: int
) -> Calibration:
    full = len(cut)
    if full < MIN_SAMPLES:
        made = "1 full sample" if full == 1 else f"{full} full samples"
        raise ConfigError(
            f"calibration from {source}: {full * seq_len + rest:,} tokens make {made} of {seq_len}, "
            f"at least {MIN_SAMPLES} are needed: give more text, or a smaller --seq-len"
        )
    notes = (
        (f"calibration: {full} samples instead of {samples}: the text holds no more",)
        if full < samples
        else ()
    )
    return Calibration(cut, source, seed, notes)
