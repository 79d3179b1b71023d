"""SmolLM2 in float32, 64 greedy tokens for 40 prompts through the engine, held against transformers.

The weights are those of our own reading of the file, which other tests hold against transformers' reading. Transformers
is asked for every position at once, given the tokens that the engine chose: its argmax must be the engine's next token,
unless its two greatest logits lie within 0.001 and the engine's token is one of them. Token by token that says that the
continuations are equal up to such a tie, and more: it goes on checking behind one. For some prompts transformers
generates by itself as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedcli.checkpoint import open_checkpoint
from pagedcli.checkpoint.base import Checkpoint
from pagedcli.core.request import Request
from pagedcli.core.sampling import SamplingParams
from pagedcli.models.load import load_model
from pagedcli.ops.select import make_ops
from tests.cpu.engine_support import Answer, Setup, run_requests
from tests.cpu.parity_prompts import CHATS, TEXTS

NUM_TOKENS = 64
MAX_LEN = 256
NEAR_TIE = 0.001
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Where others use the cores, threads that wait for each other at every op take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(smollm2_gguf: Path) -> Checkpoint:
    return open_checkpoint(smollm2_gguf)


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[list[int]]:
    tokenizer = checkpoint.load_tokenizer()
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in CHATS]
    encoded = [tokenizer.encode(text) for text in TEXTS]
    return encoded + [tokenizer.encode(text, add_special_tokens=False) for text in chats]


@pytest.fixture(scope="module", params=["native", "torch"])
def answers(request: pytest.FixtureRequest, checkpoint: Checkpoint, prompts: list[list[int]]) -> list[Answer]:
    """The engine's, all prompts together in one batch."""
    model = load_model(checkpoint, make_ops("cpu", "float32", request.param), MAX_LEN)
    params = SamplingParams(max_tokens=NUM_TOKENS, logprobs=1)
    requests = [Request(i, list(prompt), len(prompt), params) for i, prompt in enumerate(prompts)]
    setup = Setup(num_blocks=1000, max_num_seqs=40, budget=512, depth=2)
    run = run_requests(model, requests, setup, MAX_LEN)
    return [run.answers[i] for i in range(len(prompts))]


@pytest.fixture(scope="module")
def theirs(checkpoint: Checkpoint) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**checkpoint.config))
    weights = {}
    for name in checkpoint.names():
        raw = checkpoint.tensor(name)
        values = torch.from_numpy(raw.data.copy()).view(DTYPES[raw.dtype]).view(raw.shape)
        weights[name] = values.float()
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    model.load_state_dict(weights, assign=True)
    # What a meta model has besides weights are the rotary frequencies.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    return model.eval()


def test_there_are_40_prompts_and_64_tokens_of_each(prompts: list[list[int]], answers: list[Answer]) -> None:
    assert len(prompts) == len({tuple(prompt) for prompt in prompts}) == 40
    assert [len(answer.tokens) for answer in answers] == [NUM_TOKENS] * 40
    assert len({tuple(answer.tokens) for answer in answers}) == 40


@torch.inference_mode()
def test_greedy_continuations_equal_transformers(
    prompts: list[list[int]], answers: list[Answer], theirs: Any
) -> None:
    differences, near_ties = [], 0
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.tensor([prompt + answer.tokens[:-1]])
        logits = theirs(ids, use_cache=False, logits_to_keep=NUM_TOKENS).logits[0].double()
        best, best_ids = logits.topk(2, dim=1)
        logprobs = logits.log_softmax(dim=1)
        for step, token in enumerate(answer.tokens):
            item = answer.logprobs[step]
            assert item is not None
            assert item.logprob == pytest.approx(logprobs[step, token].item(), abs=5e-4)
            if token != int(best_ids[step, 0]):
                gap = float(best[step, 0] - best[step, 1])
                near_ties += 1
                if gap > NEAR_TIE or token not in best_ids[step].tolist():
                    differences.append((index, step, token, best_ids[step].tolist(), gap))
    assert differences == []
    # A few of 2,560 positions may be that close; many would mean that something is off.
    assert near_ties <= 5


@torch.inference_mode()
@pytest.mark.parametrize("index", [0, 17, 36])
def test_transformers_generates_the_same_by_itself(
    prompts: list[list[int]], answers: list[Answer], theirs: Any, index: int
) -> None:
    """Prompts whose continuations meet no near tie."""
    ids = torch.tensor([prompts[index]])
    output = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert output[0, len(prompts[index]) :].tolist() == answers[index].tokens
