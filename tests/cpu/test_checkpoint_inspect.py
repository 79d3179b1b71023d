"""`judge`: what is said of good, incomplete and unusable models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pagedcli.checkpoint.inspect import Finding, judge
from pagedcli.errors import CheckpointError
from tests.fixtures_checkpoints import tensor_shapes, tiny_config

MakeModel = Callable[..., Path]


def expected_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return tensor_shapes(dict(config))


def texts(findings: list[Finding], level: str) -> str:
    return "\n".join(finding.message for finding in findings if finding.level == level)


def test_a_good_folder(tiny_checkpoint: MakeModel) -> None:
    findings = judge(
        tiny_checkpoint("qwen3", dtype="bfloat16"), expected_shapes=expected_shapes, page_size=16
    )
    assert {finding.level for finding in findings} == {"ok"}
    said = texts(findings, "ok")
    shapes = tensor_shapes(tiny_config("qwen3"))
    assert "family: Qwen3ForCausalLM" in said
    assert "tied head" in said
    assert f"all {len(shapes)} are there" in said
    assert "stored as bfloat16" in said
    # 2 (K and V) x 2 layers x 2 heads x 16 dimensions x 2 bytes
    assert "KV: 256 bytes a token, 4 KiB a page of 16" in said
    assert "128 KiB for the KV of one sequence of 512 tokens" in said
    assert "chat template: present" in said
    assert "2 '<|im_end|>'" in said


def test_a_good_gguf_file(tiny_gguf: MakeModel) -> None:
    findings = judge(tiny_gguf("llama", tensor_type="F16"), expected_shapes=expected_shapes)
    assert {finding.level for finding in findings} == {"ok"}
    assert "F16 (16), F32 (5); auto runs it as float16" in texts(findings, "ok")


def test_missing_extra_and_misshapen_tensors(tiny_checkpoint: MakeModel) -> None:
    def other(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        shapes = expected_shapes(config)
        del shapes["lm_head.weight"]
        return shapes | {"model.extra.weight": (3,), "model.norm.weight": (49,)}

    findings = judge(tiny_checkpoint("llama"), expected_shapes=other)
    refused = texts(findings, "refused")
    assert "1 missing: model.extra.weight" in refused
    assert "model.norm.weight [48] instead of [49]" in refused
    assert "1 that the model does not use: lm_head.weight" in texts(findings, "note")


def test_refusals_of_the_layers_above_are_findings(tiny_checkpoint: MakeModel) -> None:
    def refuse(*_: object) -> Any:
        raise CheckpointError("rope scaling dynamic is refused")

    for findings in (
        judge(tiny_checkpoint("llama"), expected_shapes=refuse),
        judge(tiny_checkpoint("llama"), check=refuse),
    ):
        assert texts(findings, "refused") == "rope scaling dynamic is refused"
        assert "KV:" in texts(findings, "ok")


def test_what_cannot_be_opened_is_one_refusal(tmp_path: Path) -> None:
    findings = judge(tmp_path)
    assert [finding.level for finding in findings] == ["refused"]
    assert "has no config.json" in findings[0].message


@pytest.fixture
def folder(tmp_path: Path, tiny_checkpoint: MakeModel) -> Path:
    return Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))


def test_no_template_and_no_end_token_are_warnings(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for key in ("chat_template", "eos_token"):
        del settings[key]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (folder / "generation_config.json").unlink()
    warnings = texts(judge(folder), "warning")
    assert "chat template: none" in warnings
    assert "no end token is known" in warnings


def test_a_missing_tokenizer_is_a_refusal_beside_the_rest(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    findings = judge(folder)
    assert "tokenizer.json" in texts(findings, "refused")
    assert "KV:" in texts(findings, "ok")


def test_a_vocabulary_larger_than_the_embedding_is_a_warning(tiny_checkpoint: MakeModel) -> None:
    findings = judge(tiny_checkpoint("llama", vocab_size=200))
    assert "the embedding has 200 rows" in texts(findings, "warning")


def test_a_config_without_sizes_is_a_warning(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert "how many layers and heads" in texts(judge(folder), "warning")
