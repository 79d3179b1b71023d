"""Steps of slots by one call: the same as arrays run by hand, whatever the mix; memory for logits is bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from native_support import Array, Stored, isas, random, runtime
from paged_kernels.native import (
    HAS_PROMPT,
    HAS_SCORES,
    SAMPLE_ROW,
    KVPool,
    NativeError,
    Program,
    Runtime,
    SampleOutput,
    Slots,
    available_isas,
)

HIDDEN, HEADS = 48, (3, 1, 16)


class OneLayer:
    """Embedding, attention and head over a vocabulary of any size."""

    def __init__(self, on: Runtime, vocabulary: int, dtype: str = "bfloat16") -> None:
        self.runtime, self.vocabulary = on, vocabulary
        self.kv = KVPool(1, 256, 1, 4, 16, dtype)
        program = self.program = Program(on, dtype, 4)
        table = on.pack([Stored(random((vocabulary, HIDDEN), "bfloat16", 1))], dtype)
        ones = on.upload(np.ones(HIDDEN, np.float32))
        angles = np.random.default_rng(5).uniform(0, 6, (1024, 8)).astype(np.float32)
        turns = (on.upload(np.cos(angles)), on.upload(np.sin(angles)))
        qkv = on.pack([Stored(random((80, HIDDEN), "bfloat16", 2, scale=HIDDEN**-0.5))], dtype)
        x = program.embedding(table)
        q = program.rope_kv_write(program.linear(x, qkv), HEADS, turns, self.kv, 0)
        attended = program.attention(q, HEADS, 0.25, None, self.kv, 0)
        h, _ = program.add_rms_norm(attended, x, ones, 1e-5)
        program.finish(program.head(program.logit_rows(h), table))

    def slots(self, max_model_len: int = 1000) -> Slots:
        return Slots(4, max_model_len=max_model_len, block_size=4, vocab_size=self.vocabulary, max_top=5)


def row(num_prompt: int, **fields: Any) -> Array:
    """Greedy unless `fields` say otherwise."""
    made = np.zeros(1, SAMPLE_ROW)
    defaults = {"top_p": 1.0, "repetition_penalty": 1.0, "num_allowed": -1, "num_top": -1, "seed": 3}
    for name, value in (defaults | fields).items():
        made[name] = value
    made["num_prompt"] = num_prompt
    return made


def entry(
    slot: int, start: int, n: int, samples: bool, rows: tuple[int, ...], blocks: tuple[int, ...] = ()
) -> Any:
    return (slot, slot, 0, start, n, samples, rows, blocks, None)


@isas
def test_a_step_equals_its_arrays_run_by_hand(isa: str) -> None:
    """Prompt scores, a sampled row with scores and a decode in one step: tokens and scores to the last bit."""
    model, other = OneLayer(runtime(isa, 2), 300), OneLayer(runtime(isa, 1), 300)
    ids = tuple(int(i) for i in np.random.default_rng(0).integers(0, 300, 21))
    slots = model.slots()
    hot = row(6, temperature=1.0, num_top=3)
    for each in (slots, laid := other.slots()):
        each.admit(0, ids[:6], (3, 1), hot, 0)
        each.admit(2, ids, (5, 6, 7, 8, 9, 10), row(21), 2)
    begun = (entry(0, 0, 6, True, (5,)), entry(2, 0, 4, False, ()))
    (first, none), notes = model.program.step(slots, begun)
    assert (none, notes) == (-1, HAS_SCORES)
    other.program.run(*laid.lay_out(begun))
    (first_by_hand, _), _ = laid.read(other.runtime, other.program.logits().copy())
    assert first == first_by_hand
    mixed = (entry(2, 4, 17, True, tuple(range(17))), entry(0, 6, 1, True, (0,)))
    tokens, notes = model.program.step(slots, mixed)
    assert notes == HAS_SCORES | HAS_PROMPT
    arrays = laid.lay_out(mixed)
    other.program.run(*arrays)
    logits = other.program.logits().copy()
    assert laid.read(other.runtime, logits) == (tokens, notes)
    assert slots.scores() == laid.scores()
    assert slots.prompt_scores() == laid.prompt_scores()
    assert [found[1] for found in slots.prompt_scores()] == list(ids[5:])
    out = SampleOutput(16, 5)
    wanted = np.array(ids[5:], np.int64)
    other.runtime.logprobs(logits, np.arange(16), wanted, np.full(16, 2), out)
    assert [found[2] for found in slots.prompt_scores()] == out.logprobs.tolist()
    assert [found[4] for found in slots.prompt_scores()] == [
        tuple(zip(a[:2], b[:2], strict=True))
        for a, b in zip(out.top_ids.tolist(), out.top.tolist(), strict=True)
    ]


def test_logits_of_many_rows_take_bounded_memory_and_come_out_the_same() -> None:
    """600 rows of 131,072 logits are 315 MB; they are computed 256 at a time."""
    model = OneLayer(runtime(available_isas()[0], 2), 1 << 17)
    ids = tuple(int(i) for i in np.random.default_rng(0).integers(0, 1 << 17, 601))
    slots = model.slots()
    slots.admit(0, ids, tuple(range(151)), row(601), 1)
    (token,), notes = model.program.step(slots, (entry(0, 0, 601, True, tuple(range(601))),))
    assert notes == HAS_PROMPT
    assert model.program.workspace_bytes < 150 << 20
    whole = slots.prompt_scores()
    assert len(whole) == 600
    slots.free(0)
    slots.admit(1, ids, tuple(range(151)), row(601), 1)
    parts: list[Any] = []
    for first in range(0, 601, 200):
        count = min(200, 601 - first)
        rows = tuple(range(count))
        (last,), _ = model.program.step(slots, (entry(1, first, count, first + count == 601, rows),))
        parts += slots.prompt_scores()
    assert parts == whole
    assert last == token


def test_what_does_not_fit_is_refused() -> None:
    model = OneLayer(runtime("portable"), 50)
    with pytest.raises(NativeError, match="another vocabulary"):
        model.program.step(Slots(1, max_model_len=8, block_size=4, vocab_size=51, max_top=1), ())
    slots = model.slots(8)
    with pytest.raises(AssertionError, match="slot 1: 9 tokens"):
        slots.admit(1, (1,) * 9, (1, 2, 3), row(9))
    slots.admit(1, (1,) * 8, (1, 2), row(8))
    with pytest.raises(AssertionError, match="logits of no row"):
        model.program.step(slots, (entry(1, 0, 8, True, (8,)),))
    with pytest.raises(AssertionError, match="more blocks"):
        model.program.step(slots, (entry(1, 0, 8, True, (7,), (4,)),))
    with pytest.raises(NativeError, match="at most 2097152"):
        Slots(1, max_model_len=8, block_size=4, vocab_size=(1 << 21) + 1, max_top=1)
