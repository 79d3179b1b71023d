"""Whole engines whose requests begin with more than a split of attention in common: the answers of each alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedcli.api.llm import LLM
from pagedcli.core.sampling import SamplingParams
from tests.conftest import MakeModel

SETTINGS: dict[str, Any] = {"device": "cpu", "threads": 2, "max_model_len": 900, "num_pages": 900, "seed": 3}
# Token ids, so that lengths are what they seem: 600 in common, then none, few or many of their own.
COMMON = [(7 * at + at // 11) % 300 for at in range(600)]
PROMPTS = [
    [*COMMON, *((at * at + index) % 300 for at in range(own))] for index, own in enumerate((0, 1, 9, 130, 40))
]
PARAMS = [
    SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0),
    SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, n=3, seed=5),
    SamplingParams(max_tokens=50, ignore_eos=True, temperature=0.8, seed=6, logprobs=2),
    SamplingParams(max_tokens=25, ignore_eos=True, temperature=1.0, seed=7),
    SamplingParams(max_tokens=20, ignore_eos=True, repetition_penalty=1.2),
]


def answers(path: Path, **changes: Any) -> list[Any]:
    with LLM(str(path), **{**SETTINGS, **changes}) as llm:
        assert llm.engine.resolved.backend == "native"
        return [output.samples for output in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def path(request: pytest.FixtureRequest, tiny_checkpoint: MakeModel) -> Path:
    return tiny_checkpoint("llama", dtype=request.param, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[Any]:
    """One request at a time: only the samples of one have something to share."""
    with LLM(str(path), **{**SETTINGS, "depth": 1, "prefix_caching": False}) as llm:
        return [
            llm.generate([prompt], [params])[0].samples
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"depth": 3, "threads": 1},
        {"page_size": 1, "num_pages": 9000},
        {"page_size": 48},
        {"page_size": 256, "num_pages": 60},
        {"max_num_batched_tokens": 70, "max_num_seqs": 8},
        {"num_pages": 90},
        {"prefix_caching": False},
    ],
    ids=str,
)
def test_a_common_beginning_changes_no_answer(
    path: Path, expected: list[Any], changes: dict[str, Any]
) -> None:
    assert answers(path, **changes) == expected
