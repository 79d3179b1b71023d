"""Calls the sampling kernels on numpy arrays, and what their rows ask for, plainly. Imports numpy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from paged_kernels import cuda_abi
from sampling_rule import Array

ROW = np.dtype(cuda_abi.PagedSampleRow)


def make_rows(count: int, **fields: Any) -> Array:
    """Rows that sample one row of logits each, greedy but for the fields."""
    rows = np.zeros(count, ROW)
    rows["logit_row"] = np.arange(count)
    rows["top_p"], rows["repetition_penalty"] = 1.0, 1.0
    for name, value in fields.items():
        rows[name] = value
    return rows


@dataclass
class Changes:
    """What changes the logits of a row.

    Attributes:
        tokens: Prompt and output.
        num_prompt: Of them prompt.
        penalties: Repetition, presence, frequency.
        bias: By id.
        forbidden, early: Ids.
        words: Heads and last tokens.
        min_tokens: Before which `early` is forbidden.
    """

    tokens: list[int] = field(default_factory=list)
    num_prompt: int = 0
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)
    bias: dict[int, float] = field(default_factory=dict)
    forbidden: list[int] = field(default_factory=list)
    early: list[int] = field(default_factory=list)
    words: list[tuple[list[int], int]] = field(default_factory=list)
    min_tokens: int = 0

    def apply(self, logits: Array) -> Array:
        """The changed logits in float64, token by token."""
        wide = logits.astype(np.float64)
        repetition, presence, frequency = self.penalties
        for token in set(self.tokens):
            wide[token] = wide[token] / repetition if wide[token] > 0 else wide[token] * repetition
        for token in set(self.tokens[self.num_prompt :]):
            wide[token] -= self.tokens[self.num_prompt :].count(token) * frequency
            wide[token] -= presence
        for token, bias in self.bias.items():
            wide[token] += bias
        banned = list(self.forbidden)
        if len(self.tokens) - self.num_prompt < self.min_tokens:
            banned += self.early
        banned += [
            last
            for head, last in self.words
            if len(head) <= len(self.tokens) and self.tokens[len(self.tokens) - len(head) :] == head
        ]
        wide[banned] = -np.inf
        return wide

    def fill(self, rows: Array, at: int, vocab_size: int, kept: list[Array]) -> None:
        """Row `at`; `kept` holds the arrays that it points into."""

        def address(values: Any, dtype: Any) -> int:
            kept.append(np.array(values, dtype))
            return int(kept[-1].ctypes.data)

        longest = max((len(head) for head, _ in self.words), default=0)
        heads = [[-1] * (longest - len(head)) + head for head, _ in self.words]
        columns: dict[str, Any] = {
            "tokens": address(self.tokens, np.int32), "position": len(self.tokens), "num_prompt": self.num_prompt,
            "min_tokens": self.min_tokens, "forbidden": address(self.forbidden, np.int64),
            "num_forbidden": len(self.forbidden), "early": address(self.early, np.int64),
            "num_early": len(self.early), "bias_ids": address(list(self.bias), np.int64),
            "bias": address(list(self.bias.values()), np.float64), "num_bias": len(self.bias),
            "bad_heads": address(heads, np.int64), "bad_last": address([last for _, last in self.words], np.int64),
            "num_bad": len(self.words), "bad_length": longest,
        }  # fmt: skip
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        for name, value in (columns | dict(zip(names, self.penalties, strict=True))).items():
            rows[name][at] = value
        # Exactly as much as may be needed, of 24 bytes each.
        room = np.full(24 * min(vocab_size, len(self.tokens) + len(self.bias)), 0xFF, np.uint8)
        rows["room"][at] = address(room, np.uint8)


def sampled(library: ctypes.CDLL, logits: Array, rows: Array) -> tuple[list[int], list[int]]:
    """Tokens and faults."""
    tokens, faults = (np.full(len(rows), -9, np.int64) for _ in range(2))
    arguments = cuda_abi.PagedSample(
        logits.ctypes.data, rows.ctypes.data, tokens.ctypes.data, faults.ctypes.data, logits.strides[0] // 4,
        len(rows), logits.shape[1],
    )  # fmt: skip
    cuda_abi.check("sample", library.paged_cuda_sample(arguments, None))
    return tokens.tolist(), faults.tolist()


@dataclass
class Found:
    """Log-probabilities of tokens: [rows] and, of alternatives, [rows, most]."""

    logprobs: Array
    ranks: Array
    ids: Array
    top: Array


def logprobs(library: ctypes.CDLL, logits: Array, tokens: Array, num_top: Array, most: int = 20) -> Found:
    """Of one token of each row."""
    count = len(logits)
    found = Found(
        np.full(count, 9.0),
        np.zeros(count, np.int64),
        np.full((count, most), -9, np.int64),
        np.full((count, most), 9.0),
    )
    rows = np.arange(count)
    wanted = (logits, rows, tokens.astype(np.int64), num_top.astype(np.int64))
    arrays = (*wanted, found.logprobs, found.ranks, found.ids, found.top)
    addresses = [array.ctypes.data for array in arrays]
    arguments = cuda_abi.PagedLogprobs(*addresses, logits.strides[0] // 4, count, logits.shape[1], most)
    cuda_abi.check("logprobs", library.paged_cuda_logprobs(arguments, None))
    return found
