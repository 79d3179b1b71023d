"""P2 and I5 with real (tiny) models: ids and log-probabilities equal those of each request alone, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagedcli.checkpoint import open_checkpoint
from pagedcli.core.request import Request
from pagedcli.core.sampling import SamplingParams
from pagedcli.models.load import Model, load_model
from pagedcli.ops.select import make_ops
from tests.cpu.engine_support import Answer, Setup, alone, run_requests

MAX_LEN = 160
KINDS: tuple[dict[str, object], ...] = (
    {"logprobs": 3},
    {"temperature": 4.0, "logprobs": 0},
    {"temperature": 3.0, "top_k": 20, "top_p": 0.95, "logprobs": 1},
    {"temperature": 4.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"prompt_logprobs": 2, "logprobs": 2},
    {"temperature": 1.5, "min_p": 0.02, "min_tokens": 6},
)
SETUPS = {
    "batched": Setup(),
    "chunks": Setup(budget=16),
    "odd-chunks": Setup(budget=23, depth=2, block_size=7, num_blocks=400),
    "pages-of-1": Setup(block_size=1, num_blocks=3000, depth=3),
    "pages-of-256": Setup(block_size=256, num_blocks=20, depth=2, budget=50),
    "no-prefix-caching": Setup(caching=False, depth=2),
    "preempted": Setup(num_blocks=11, budget=64, depth=1),
    "preempted-deep": Setup(num_blocks=44, block_size=4, budget=40, depth=3),
    "two-at-once": Setup(max_num_seqs=2, depth=2),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_requests() -> list[Request]:
    """Prompts of 1 to 130 tokens, many with a common beginning, three samples of some."""
    draw = random.Random(17)
    trunk = [draw.randrange(320) for _ in range(64)]
    requests: list[Request] = []
    for index, (shared, own) in enumerate(
        [(0, 1), (64, 9), (64, 30), (33, 15), (0, 16), (64, 64), (48, 1), (17, 40)]
    ):
        prompt = trunk[:shared] + [draw.randrange(320) for _ in range(own)]
        params = SamplingParams(max_tokens=draw.randint(8, 24)).replace(**KINDS[index % len(KINDS)])
        first, seed = len(requests), draw.randrange(2**64)
        stop_ids = frozenset(draw.sample(range(320), 3))
        for sample in range(3 if index in (1, 3) else 1):
            parent = first if sample else None
            requests.append(
                Request(len(requests), prompt, len(prompt), params, stop_ids, seed, sample, parent)
            )
    return requests


@pytest.fixture(
    scope="module",
    params=[
        f"{model}-{backend}"
        for backend in ("torch", "native")
        for model in ("llama-float32", "mistral-bfloat16", "qwen3-bfloat16")
    ],
)
def model(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Model:
    family, dtype, backend = request.param.split("-")
    return load_model(open_checkpoint(tiny_checkpoint(family)), make_ops("cpu", dtype, backend), MAX_LEN)


@pytest.fixture(scope="module")
def expected(model: Model) -> dict[int, Answer]:
    return alone(model, make_requests(), MAX_LEN)


@pytest.mark.parametrize("name", SETUPS)
def test_P2_the_answer_is_that_of_the_request_alone(
    model: Model, expected: dict[int, Answer], name: str
) -> None:
    requests = make_requests()
    run = run_requests(model, requests, SETUPS[name], MAX_LEN)
    for request in requests:
        want = expected[request.id]
        if request.sample_index:
            # Sample 0 delivers the prompt's log-probabilities for all.
            want = replace(want, prompt_logprobs=())
        assert run.answers[request.id] == want
    assert (run.num_preemptions > 0) == name.startswith("preempted")
    assert run.num_cached > 0 or not SETUPS[name].caching


def test_samples_of_one_prompt_differ(expected: dict[int, Answer]) -> None:
    outputs = [
        tuple(expected[request.id].tokens) for request in make_requests() if request.fork_of is not None
    ]
    assert len(set(outputs)) == len(outputs) == 4


def test_the_order_of_arrival_changes_nothing(model: Model, expected: dict[int, Answer]) -> None:
    requests = [request for request in make_requests() if request.fork_of is None]
    run = run_requests(model, requests[::-1], Setup(budget=48, depth=2), MAX_LEN)
    assert run.answers == {request.id: expected[request.id] for request in requests}
