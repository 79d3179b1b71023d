"""Calibration text that the model writes itself, so that nothing has to be fetched. May import `text`; no torch.

After M. Williams, G. Chrysostomou, N. Aletras, "Self-calibration for Language Model Quantization and Pruning" (2024,
arXiv:2410.17170): text sampled from the model itself is at least as good for calibration as text from outside, because
it has the distribution that the model works on. Half of it are documents, begun at the start token with a few tokens
at a high temperature so that they differ, as in the paper; half, where the model has a chat template, are answers to
questions of our own, in the template. Everything is seeded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from pagedcli.errors import ConfigError
from pagedcli.text.tokenizer import Tokenizer

SELF_WRITTEN = "written by the model itself"

OPENING_TOKENS, OPENING_TEMPERATURE = 4, 1.5
TEMPERATURE = 0.8
TEXT_TOKENS = 512
_ROUND = 32
TOKENS_AT_ONCE = _ROUND * TEXT_TOKENS
"""In the KV cache while a round is written, about."""
_MAX_ROUNDS_WITHOUT_TEXT = 4

TASKS = (
    "Explain {} to a curious child.",
    "Write a short story about {}.",
    "List five facts about {} and say why each one matters.",
    "What do people often get wrong about {}?",
    "Write a dialogue between two friends who argue about {}.",
    "Compare {} with something similar, step by step.",
    "Write an email that asks a colleague for help with {}.",
    "Give a detailed introduction to {} for a student.",
    "How has {} changed over the last hundred years?",
    "Write a Python program that has to do with {}, and explain it.",
)
TOPICS = (
    "rivers and floods",
    "the history of bread",
    "sorting a list of numbers",
    "how vaccines work",
    "planning a garden",
    "the moons of Jupiter",
    "learning to play the violin",
    "compound interest",
    "migrating birds",
    "the printing press",
    "railway timetables",
    "probability and dice",
    "volcanoes",
    "writing good documentation",
    "the French Revolution",
    "recycling glass",
    "chess openings",
    "electric cars",
    "the human heart",
    "old maps",
)


class WriteText(Protocol):
    """Continues prompts with the model; given from above, where engines are built."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        """The new token ids of each prompt, at most `max_tokens`, ended by the model's own end token."""


def write_texts(
    write: WriteText,
    tokenizer: Tokenizer,
    *,
    tokens: int,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[int]]:
    """Texts of at least `tokens` tokens together, prompts included, in a seeded order.

    Args:
        write: The model.
        tokenizer: Its tokenizer.
        tokens: How much is wanted.
        seed: Of everything.
        progress: Told (tokens so far, tokens) after each round.

    Raises:
        ConfigError: The model writes nothing.
    """
    chooser = random.Random(seed)
    texts: list[list[int]] = []
    idle = 0
    while (missing := tokens - sum(map(len, texts))) > 0:
        count = max(2, min(_ROUND, -(-missing // TEXT_TOKENS)))
        prompts = _prompts(write, tokenizer, count, chooser)
        answers = write(
            prompts, max_tokens=TEXT_TOKENS, temperature=TEMPERATURE, seed=chooser.getrandbits(31)
        )
        texts += [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        progress(min(tokens, sum(map(len, texts))), tokens)
        idle = 0 if any(answers) else idle + 1
        if idle == _MAX_ROUNDS_WITHOUT_TEXT:
            raise ConfigError("the model writes no text to calibrate with: give --calibration FILE")
    chooser.shuffle(texts)
    return texts


def _prompts(write: WriteText, tokenizer: Tokenizer, count: int, chooser: random.Random) -> list[list[int]]:
    questions = count // 2 if tokenizer.chat_template else 0
    return [_question(tokenizer, chooser) for _ in range(questions)] + _openings(
        write, tokenizer, count - questions, chooser
    )


def _question(tokenizer: Tokenizer, chooser: random.Random) -> list[int]:
    text = chooser.choice(TASKS).format(chooser.choice(TOPICS))
    return tokenizer.encode_chat([{"role": "user", "content": text}])


def _openings(write: WriteText, tokenizer: Tokenizer, count: int, chooser: random.Random) -> list[list[int]]:
    """The start token and a few more, at a temperature at which no two are alike."""
    starts = [start_tokens(tokenizer)] * count
    first = write(
        starts, max_tokens=OPENING_TOKENS, temperature=OPENING_TEMPERATURE, seed=chooser.getrandbits(31)
    )
    return [[*start, *more] for start, more in zip(starts, first, strict=True)]


def start_tokens(tokenizer: Tokenizer) -> list[int]:
    """What a text begins with: what the tokenizer puts there, else its start or end token, else a line end."""
    added = tokenizer.encode("")
    if added:
        return added
    if tokenizer.bos_token_id is not None:
        return [tokenizer.bos_token_id]
    if tokenizer.eos_token_ids:
        return [tokenizer.eos_token_ids[0]]
    return tokenizer.encode("\n", add_special_tokens=False)
