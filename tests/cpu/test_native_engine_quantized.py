"""Whole engines on quantized checkpoints: the same texts under every setting that only decides when something runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from paged_kernels.native import available_isas

from pagedcli.api.llm import LLM
from tests.cpu.test_native_engine import PARAMS, PROMPTS, SETTINGS
from tests.quant_support import write_quantized_model

# Format, options of the file, settings of the engine.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "awq-int8": ("awq", {"symmetric": False}, {"activation": "int8"}),
    "gptq-act-order-int8": ("gptq", {"act_order": True}, {"activation": "int8"}),
    "8-bit-bf16": ("compressed-tensors", {"bits": 8}, {"activation": "bf16"}),
    "partly-float32": ("gptq", {"kept": ("k_proj", "up_proj")}, {"activation": "float32"}),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {"threads": 2, "depth": 3},
    "chunks-of-11": {"max_num_batched_tokens": 11, "max_num_seqs": 8},
    "pages-of-1": {"page_size": 1, "num_pages": 2000},
    "pages-of-256": {"page_size": 256, "num_pages": 30, "prefix_caching": False},
    "small-pool": {"num_pages": 16, "threads": 2},
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """96 and 192 inputs in groups of 32; with biases."""
    form, options, _ = KINDS[kind]
    return write_quantized_model(
        tmp_path_factory.mktemp(kind),
        form,
        family="qwen2",
        dtype="bfloat16",
        hidden_size=96,
        intermediate_size=192,
        **options,
    ).folder


def answers(folder: Path, **settings: Any) -> tuple[list[Any], int]:
    """All that a schedule must not change; preemptions."""
    with LLM(str(folder), **{**SETTINGS, **settings}) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
    return [(output.samples, output.prompt_logprobs) for output in outputs], sum(
        output.num_preemptions for output in outputs
    )


@pytest.mark.parametrize("isa", available_isas())
def test_no_setting_of_the_schedule_changes_an_answer(
    folder: Path, kind: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGED_CPU_ISA", isa)
    own = KINDS[kind][2]
    expected, _ = answers(folder, max_num_seqs=1, depth=1, prefix_caching=False, **own)
    for name, changes in SCHEDULES.items():
        actual, preemptions = answers(folder, **own, **changes)
        assert actual == expected, name
        assert (preemptions > 0) == (name == "small-pool")
