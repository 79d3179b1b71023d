"""Programs and their threads: recording is checked, buffers are shared rightly, an idle pool costs nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_support import Array, Stored, dtypes, isas, random, runtime
from paged_kernels.native import KVPool, NativeError, PackedWeight, Program, Runtime, available_isas

HIDDEN, INNER, VOCABULARY = 48, 96, 130
HEADS = (3, 1, 16)


class TinyModel:
    """Two layers of a Llama, recorded on one runtime; `fuse` and the block size may differ between recordings."""

    def __init__(self, on: Runtime, dtype: str, block_size: int = 4, *, fuse: bool = True) -> None:
        self.block_size = block_size
        self.kv = KVPool(2, 256 // block_size, 1, block_size, 16, dtype)
        program = self.program = Program(on, dtype, block_size)

        def weight(rows: int, columns: int, seed: int) -> PackedWeight:
            return on.pack([Stored(random((rows, columns), "bfloat16", seed, scale=columns**-0.5))], dtype)

        table, ones = weight(VOCABULARY, HIDDEN, 1), on.upload(np.ones(HIDDEN, np.float32))
        angles = np.random.default_rng(5).uniform(0, 6, (64, 8)).astype(np.float32)
        turns = (on.upload(np.cos(angles)), on.upload(np.sin(angles)))
        x, residual = program.embedding(table), None
        for layer in range(2):
            if residual is None:
                h, residual = program.rms_norm(x, ones, 1e-5), x
            else:
                h, residual = program.add_rms_norm(x, residual, ones, 1e-5)
            qkv = program.linear(h, weight(80, HIDDEN, 10 + layer))
            q = program.rope_kv_write(qkv, HEADS, turns, self.kv, layer)
            attended = program.attention(q, HEADS, 0.25, None, self.kv, layer)
            h, residual = program.add_rms_norm(
                program.linear(attended, weight(HIDDEN, 48, 20 + layer)), residual, ones, 1e-5
            )
            inner = program.gated(program.linear(h, weight(2 * INNER, HIDDEN, 30 + layer)), "silu")
            x = program.linear(inner, weight(HIDDEN, INNER, 40 + layer))
        h = program.rms_norm(program.logit_rows(program.add(x, residual)), ones, 1e-5)
        program.finish(program.head(h, table), fuse=fuse)

    def run(self, chunks: list[tuple[int, int, int]]) -> Array:
        """Chunks (sequence, start, end) of fixed token sequences; logits of all rows."""
        self.program.run(*self.step_of(chunks))
        return self.program.logits().copy()

    def step_of(self, chunks: list[tuple[int, int, int]]) -> tuple[Array, ...]:
        blocks = 64 // self.block_size
        positions = np.concatenate([np.arange(start, end) for _, start, end in chunks])
        sequence = np.repeat([s for s, _, _ in chunks], [end - start for _, start, end in chunks])
        starts = np.concatenate([[0], np.cumsum([end - start for _, start, end in chunks])])
        table = np.array(
            [[s * blocks + (b * 7 + s) % blocks for b in range(blocks)] for s, _, _ in chunks], np.int32
        )
        place = np.searchsorted(starts, np.arange(len(positions)), side="right") - 1
        slots = table[place, positions // self.block_size] * self.block_size + positions % self.block_size
        return (
            (positions * 31 + sequence * 17) % VOCABULARY,
            positions,
            slots.astype(np.int64),
            starts.astype(np.int32),
            np.array([end for _, _, end in chunks], np.int32),
            table,
            np.arange(len(positions)),
        )


@isas
@dtypes
def test_a_row_has_the_same_bits_in_every_step_and_with_every_number_of_threads(isa: str, dtype: str) -> None:
    whole = TinyModel(runtime(isa), dtype).run([(0, 0, 50), (1, 0, 20)])
    for threads in (1, 2, 5):
        model = TinyModel(runtime(isa, threads), dtype)
        np.testing.assert_array_equal(model.run([(0, 0, 50), (1, 0, 20)]), whole)
    for block_size in (1, 16, 64):
        model = TinyModel(runtime(isa), dtype, block_size)
        rows = [model.run([(1, 0, 20)])] + [model.run([(0, at, at + 1)]) for at in range(50)]
        np.testing.assert_array_equal(np.concatenate(rows[1:]), whole[:50])
        np.testing.assert_array_equal(rows[0], whole[50:])


@isas
@dtypes
def test_fused_calls_compute_the_same_up_to_rounding(isa: str, dtype: str) -> None:
    plain, fused = TinyModel(runtime(isa), dtype, fuse=False), TinyModel(runtime(isa), dtype)
    want, got = (model.run([(0, 0, 30)]) for model in (plain, fused))
    np.testing.assert_allclose(got, want, atol=1e-5 if dtype == "float32" else 0.06)
    assert len(fused.program.describe().splitlines()) < len(plain.program.describe().splitlines())


def test_buffers_are_shared_by_values_that_do_not_meet() -> None:
    model = TinyModel(runtime("portable"), "float32")
    slots = {word.split("@")[1] for word in model.program.describe().split() if "@" in word}
    assert len(slots) <= 5
    model.run([(0, 0, 64)])
    assert model.program.workspace_bytes < 64 * 4 * (5 * 256 + VOCABULARY + 64)


def test_logits_of_an_earlier_step_may_be_held_while_buffers_grow() -> None:
    model = TinyModel(runtime("portable"), "float32")
    model.run([(0, 0, 1)])
    held = model.program.logits()
    before = held.copy()
    model.run([(1, 0, 60)])
    np.testing.assert_array_equal(held, before)


def step(**changes: Any) -> list[Array]:
    arrays = {
        "token_ids": np.array([1, 2]), "positions": np.array([0, 1]), "slot_mapping": np.array([0, 1]),
        "query_start": np.array([0, 2], np.int32), "seq_lens": np.array([2], np.int32),
        "block_table": np.array([[0, 1]], np.int32), "logit_rows": np.array([1]),
    }  # fmt: skip
    return list((arrays | changes).values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.array([1, VOCABULARY])}, "token id 130 of a vocabulary of 130"),
        ({"positions": np.array([0, 64])}, "position 64 of 64"),
        ({"positions": np.array([0])}, "positions has 1 elements, at least 2"),
        ({"slot_mapping": np.array([0, 256])}, "slot 256 of 64 blocks of 4"),
        ({"slot_mapping": np.array([-1, 0])}, "slot -1"),
        ({"query_start": np.array([0, 1], np.int32)}, "query_start does not span the step's 2 rows"),
        ({"seq_lens": np.array([1], np.int32)}, "2 rows and 1 tokens"),
        ({"seq_lens": np.array([9], np.int32)}, "9 tokens, its table holds 8"),
        ({"block_table": np.array([[64, 0]], np.int32)}, "block 64 of 64"),
        ({"logit_rows": np.array([2])}, "row of logits is 2 of 2"),
        ({"token_ids": np.array([1, 2], np.int32)}, "elements of 4 bytes, expected 8"),
        ({"token_ids": np.array([1, 5, 2])[::2]}, "token_ids is not contiguous"),
    ],
)
def test_steps_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    model = TinyModel(runtime("portable"), "float32")
    with pytest.raises(NativeError, match=message):
        model.program.run(*step(**changes))
    model.program.run(*step())
    assert model.program.logits().shape == (1, VOCABULARY)


def test_recordings_that_do_not_fit_are_refused() -> None:
    on = runtime("portable")
    weight = on.pack([Stored(random((20, 30), "float32"))], "float32")
    program = Program(on, "float32", 4)
    x = program.embedding(weight)
    with pytest.raises(NativeError, match="value 7 does not exist"):
        program.linear(7, weight)
    with pytest.raises(NativeError, match="a norm's weight has 20 elements, its input 30"):
        program.rms_norm(x, on.upload(np.ones(20, np.float32)), 1e-5)
    y = program.linear(x, weight)
    with pytest.raises(NativeError, match="packed weight has 4096 bytes, expected"):
        program.linear(y, PackedWeight(weight.buffer, 40, 20, "float32"))
    with pytest.raises(NativeError, match="3 heads are no multiple of 2"):
        program.attention(y, (3, 2, 16), 1.0, None, KVPool(1, 4, 2, 4, 16, "float32"), 0)
    with pytest.raises(NativeError, match="not finished"):
        program.run(*step())


def test_an_unknown_variant_is_refused_with_those_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NativeError, match=r"instruction set is 'mmx': this machine and build run .*portable"):
        Runtime(1, isa="mmx")
    monkeypatch.setenv("PAGED_CPU_ISA", "sse9")
    with pytest.raises(NativeError, match="PAGED_CPU_ISA is 'sse9'"):
        Runtime(1)
    monkeypatch.setenv("PAGED_CPU_ISA", "portable")
    assert Runtime(1).isa == "portable"
    monkeypatch.delenv("PAGED_CPU_ISA")
    assert Runtime(1).isa == available_isas()[0]


def cpu_seconds(tasks: set[int]) -> dict[int, float]:
    """What each thread of this process has computed so far, to the nanosecond (Linux: a clock for every thread)."""
    return {task: time.clock_gettime((~task << 3) | 6) for task in tasks}


def tasks() -> set[int]:
    return {int(folder.name) for folder in Path("/proc/self/task").iterdir()}


def test_idle_threads_sleep() -> None:
    """An idle thread computes nothing at all; one that still spins is seen however busy a machine is."""
    before = tasks()
    model = TinyModel(Runtime(3), "float32")
    model.run([(0, 0, 10)])
    mine = tasks() - before
    assert len(mine) == 2
    deadline = time.monotonic() + 60
    spent = {0: -1.0}
    while cpu_seconds(mine) != spent:
        assert time.monotonic() < deadline, "they go on computing"
        spent = cpu_seconds(mine)
        time.sleep(0.3)
    assert min(spent.values()) > 0


def test_a_step_lets_other_python_threads_run() -> None:
    """Nobody but a step gives the lock away here: Python itself would only after an hour."""
    model = TinyModel(Runtime(2), "float32")
    step = model.step_of([(0, 0, 60)])  # arrays' operations would give it away
    go, ran = threading.Lock(), [False]
    go.acquire()

    def wait() -> None:
        go.acquire()
        ran[0] = True

    waiting = threading.Thread(target=wait)
    interval = sys.getswitchinterval()
    waiting.start()
    sys.setswitchinterval(3600)
    try:
        go.release()
        for _ in range(100_000):  # a busy machine may need some steps until the other thread is there
            if ran[0]:
                break
            model.program.run(*step)
        has_run = ran[0]
    finally:
        sys.setswitchinterval(interval)
    waiting.join()
    assert has_run


def test_a_second_caller_is_told_not_made_to_wait() -> None:
    on = Runtime(2)
    model = TinyModel(on, "float32")
    errors: list[str] = []

    def steps() -> None:
        for _ in range(300):
            try:
                model.run([(0, 0, 60)])
            except NativeError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=steps) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("at work for another thread" in error for error in errors)


def test_more_threads_than_cores_give_the_same_steps() -> None:
    models = [TinyModel(Runtime(threads), "float32") for threads in (1, 9)]
    generator = np.random.default_rng(0)
    for _ in range(300):
        chunks = [(s, 0, int(generator.integers(1, 9))) for s in range(int(generator.integers(1, 4)))]
        np.testing.assert_array_equal(models[1].run(chunks), models[0].run(chunks))


def test_the_module_imports_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys; import paged_kernels.native;"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'pagedcli')])"
    )
    path = [entry for entry in sys.path if entry]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def affinities() -> set[frozenset[int]]:
    return {frozenset(os.sched_getaffinity(task)) for task in tasks()}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_threads_are_pinned_only_where_it_is_asked_for() -> None:
    """Pools that leave some CPUs to others choose none: two of them would choose the same."""
    mine = frozenset(os.sched_getaffinity(0))
    second = sorted(mine)[1]
    free, pinned = Runtime(2), Runtime(2, cpus=sorted(mine)[:2])
    before = affinities()
    for on in (free, pinned):
        on.pack([Stored(np.ones((64, 64), np.float32))], "float32")
    deadline = time.monotonic() + 10
    while frozenset({second}) not in affinities() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert affinities() - before <= {frozenset({second})}
    del on, pinned
    assert affinities() == {mine}
