"""The whole engine on a GPU: greedy ids against transformers, and the same under other batches and depths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagedcli import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

PROMPTS = [[5, 9, 200, 31, 7], [300, 2, 11], [17] * 40, list(range(60, 180))]
NEW_TOKENS = 24


def greedy_of_transformers(folder: Path) -> list[tuple[int, ...]]:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    answers = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            with torch.inference_mode():
                logits = model(torch.tensor([ids], device="cuda")).logits[0, -1]
            ids.append(int(logits.argmax()))
        answers.append(tuple(ids[len(prompt) :]))
    return answers


def generate(folder: Path, prompts: list[list[int]], **settings: object) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(str(folder), device="cuda", dtype="float32", num_pages=256, **settings) as llm:
        return [output.samples[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_greedy_ids_equal_transformers(tiny_checkpoint: Callable[..., Path], family: str) -> None:
    folder = tiny_checkpoint(family)
    assert generate(folder, PROMPTS) == greedy_of_transformers(folder)


@pytest.mark.parametrize(
    "settings",
    [{"depth": 1}, {"depth": 3}, {"page_size": 1}, {"max_num_batched_tokens": 16, "max_num_seqs": 4}],
)
def test_schedule_does_not_change_float32_ids(
    tiny_checkpoint: Callable[..., Path], settings: dict[str, int]
) -> None:
    folder = tiny_checkpoint("llama")
    alone = [generate(folder, [prompt])[0] for prompt in PROMPTS]
    assert generate(folder, PROMPTS, **settings) == alone
