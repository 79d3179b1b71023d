"""The quality report: figures against transformers, the schema, suspects, the contract."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.quant.contract import next_to_keep
from pagedcli.quant.evaluation import evaluate
from pagedcli.quant.measure import behave_in_turns, first_divergence
from pagedcli.quant.options import PlannedLinear, QuantizeOptions, QuantizePlan
from pagedcli.quant.quality import (
    Contract,
    LinearQuality,
    Quality,
    card_lines,
    quality_rows,
    write_card,
    write_quality,
)
from tests.conftest import MakeModel
from tests.fixtures_checkpoints import tiny_config, tiny_tensors, write_tiny_checkpoint


def _windows(vocab: int, lengths: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(3, vocab, length) for length in lengths]


def _logits(folder: Path, windows: list[np.ndarray]) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return [model(torch.from_numpy(ids)[None]).logits[0].double() for ids in windows]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_figures_are_those_of_plain_transformers(
    family: str, tiny_checkpoint: MakeModel, tmp_path: Path
) -> None:
    first = tiny_checkpoint(family)
    second = _spoiled(tmp_path / "second", family, 0.05)
    windows = _windows(tiny_config(family)["vocab_size"], (48, 33, 7))
    found = evaluate(open_checkpoint(first), open_checkpoint(second), windows, folded=False)
    losses: list[list[torch.Tensor]] = [[], []]
    divergence, agreed = [], []
    for ids, p, q in zip(windows, _logits(first, windows), _logits(second, windows), strict=True):
        log_p, log_q = p[:-1].log_softmax(1), q[:-1].log_softmax(1)
        target = torch.from_numpy(ids[1:])[:, None]
        losses[0].append(-log_p.gather(1, target))
        losses[1].append(-log_q.gather(1, target))
        divergence.append((log_p.exp() * (log_p - log_q)).sum(1))
        agreed.append(log_p.argmax(1) == log_q.argmax(1))
    assert found.scored_tokens == 47 + 32 + 6
    assert found.perplexity_original == pytest.approx(float(torch.cat(losses[0]).mean().exp()), rel=1e-4)
    assert found.perplexity_quantized == pytest.approx(float(torch.cat(losses[1]).mean().exp()), rel=1e-4)
    assert found.kl_mean == pytest.approx(float(torch.cat(divergence).mean()), rel=1e-3)
    assert found.kl_mean > 0.001
    assert found.top1_agreement == pytest.approx(float(torch.cat(agreed).double().mean()), abs=0.013)


def _spoiled(folder: Path, family: str, noise: float) -> Path:
    """The tiny model with noise on its linears."""
    from tests.fixtures_checkpoints import safetensors_bytes

    write_tiny_checkpoint(folder, family)
    tensors = tiny_tensors(tiny_config(family))
    random = np.random.default_rng(1)
    for name, values in tensors.items():
        if "_proj.weight" in name:
            spoil = random.standard_normal(values.shape, dtype=np.float32)
            tensors[name] = values + np.float32(noise * values.std()) * spoil
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


def test_a_model_beside_itself_has_no_error(tiny_checkpoint: MakeModel) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("qwen2"))
    found = evaluate(
        checkpoint, checkpoint, _windows(tiny_config("qwen2")["vocab_size"], (20,)), folded=False
    )
    assert (found.kl_mean, found.top1_agreement) == (0.0, 1.0)
    assert set(found.errors.values()) == {0.0}
    assert len(found.errors) == 7 * tiny_config("qwen2")["num_hidden_layers"]


def test_a_sabotaged_layer_is_named(tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 6}
    first = tiny_checkpoint("llama", **layers)
    second = write_tiny_checkpoint(tmp_path / "second", "llama", **layers)
    tensors = tiny_tensors(tiny_config("llama", **layers))
    random = np.random.default_rng(1)
    target = "model.layers.3.mlp.down_proj"
    for name, values in tensors.items():
        if "_proj.weight" in name:
            size = 1.0 if name == f"{target}.weight" else 0.05
            spoil = random.standard_normal(values.shape, dtype=np.float32)
            tensors[name] = values + np.float32(size * values.std()) * spoil
    from tests.fixtures_checkpoints import safetensors_bytes

    (second / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    windows = _windows(tiny_config("llama")["vocab_size"], (64,))
    found = evaluate(open_checkpoint(first), open_checkpoint(second), windows, folded=False)
    layers_found = tuple(LinearQuality(name, error, "rtn") for name, error in found.errors.items())
    assert [layer.name for layer in _quality(layers=layers_found).suspects()] == [target]


def test_a_scale_that_awq_moved_is_no_error_and_others_are(
    tiny_checkpoint: MakeModel, tmp_path: Path
) -> None:
    first = tiny_checkpoint("llama")
    tensors = tiny_tensors(tiny_config("llama"))
    up, down = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
    scale = np.random.default_rng(2).uniform(0.5, 2.0, tensors[f"{up}.weight"].shape[0]).astype(np.float32)
    tensors[f"{up}.weight"] = tensors[f"{up}.weight"] / scale[:, None]
    tensors[f"{down}.weight"] = tensors[f"{down}.weight"] * scale
    from tests.fixtures_checkpoints import safetensors_bytes

    second = write_tiny_checkpoint(tmp_path / "second", "llama")
    (second / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    windows = _windows(tiny_config("llama")["vocab_size"], (64,))
    pair = open_checkpoint(first), open_checkpoint(second)
    folded = evaluate(*pair, windows, folded=True)
    plain = evaluate(*pair, windows, folded=False)
    assert folded.errors[up] < 1e-9
    assert plain.errors[up] > 0.01
    assert folded.errors[down] < 1e-9
    assert folded.kl_mean < 1e-9


def _quality(**changes: Any) -> Quality:
    base = Quality(
        perplexity_original=10.0,
        perplexity_quantized=10.5,
        kl_mean=0.04,
        top1_agreement=0.9,
        first_divergence=12.5,
        bits_per_weight=4.5,
        bytes=1_000_000,
        original_bytes=4_000_000,
        layers=(
            LinearQuality("model.layers.0.q_proj", 0.01, "awq"),
            LinearQuality("model.layers.0.k_proj", 0.02, "kept"),
        ),
        calibration={"source": "a.jsonl", "tokens": 100, "seed": 1},
        eval_source="a text",
        eval_tokens=99,
        eval_window=50,
        eval_stride=50,
        tokens_per_second_before=10.0,
        tokens_per_second_after=20.0,
    )
    return dataclasses.replace(base, **changes)


def test_quality_json_has_the_documented_fields(tmp_path: Path) -> None:
    write_quality(tmp_path, _quality(), ())
    value = json.loads((tmp_path / "quality.json").read_text())
    assert value == {
        "perplexity": {"original": 10.0, "quantized": 10.5},
        "kl_mean": 0.04,
        "top1_agreement": 0.9,
        "first_divergence": 12.5,
        "bits_per_weight": 4.5,
        "bytes": 1_000_000,
        "layers": [
            {"name": "model.layers.0.q_proj", "error": 0.01, "method": "awq"},
            {"name": "model.layers.0.k_proj", "error": 0.02, "method": "kept"},
        ],
        "calibration": {"source": "a.jsonl", "tokens": 100, "seed": 1},
        "eval": {"tokens": 99, "window": 50, "stride": 50},
        "tokens_per_second": {"before": 10.0, "after": 20.0},
    }


def test_a_ruined_model_still_gives_valid_json(tmp_path: Path) -> None:
    layers = (LinearQuality("model.layers.0.q_proj", math.nan, "awq"),)
    ruined = _quality(perplexity_quantized=math.inf, kl_mean=math.nan, layers=layers)
    write_quality(tmp_path, ruined, ruined.misses(Contract(max_kl=1.0)))
    value = json.loads((tmp_path / "quality.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert value["perplexity"] == {"original": 10.0, "quantized": None}
    assert [layer.name for layer in ruined.suspects()] == ["model.layers.0.q_proj"]


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({}, None),
        ({"perplexity_quantized": 20.0, "kl_mean": 1.0}, None),
        ({"perplexity_quantized": 53.0}, "perplexity is 5.3 times the original's (over 2 times)"),
        ({"perplexity_quantized": math.nan}, "perplexity is nan times the original's (over 2 times)"),
        ({"perplexity_quantized": math.inf}, "perplexity is inf times the original's (over 2 times)"),
        ({"kl_mean": 1.25}, "KL from the original is 1.25 nats a token (over 1)"),
        ({"kl_mean": math.nan}, "KL from the original is nan nats a token (over 1)"),
        ({"repeats_one_token": True}, "it repeats a single token whatever the prompt"),
    ],
)
def test_absurd_quality_is_marked_without_a_contract(
    tmp_path: Path, changes: dict[str, Any], warning: str | None
) -> None:
    quality = _quality(**changes)
    write_quality(tmp_path, quality, ())
    write_card(tmp_path, "a model", "made so", quality, ())
    value, card = (
        json.loads((tmp_path / "quality.json").read_text()),
        (tmp_path / "README.md").read_text(),
    )
    assert value.get("warnings") == (None if warning is None else [warning])
    assert ("not usable" in card) == (warning is not None)
    assert warning is None or f"**WARNING: not usable: {warning}.**" in card


def test_models_take_turns_and_the_median_is_reported(tmp_path: Path) -> None:
    first, second = tmp_path / "original", tmp_path / "quantized"
    # The machine gets slower and slower, and hiccups in one of the original's turns.
    speeds = iter([100.0, 150.0, 1.0, 135.0, 80.0, 120.0])
    opened: list[str] = []

    class FakeSession:
        def write(self, prompts: list[list[int]], **_: Any) -> list[list[int]]:
            return [[1, 2, len(opened)] for _ in prompts]

        def tokens_per_second(self) -> float:
            return next(speeds)

    class FakeEngines:
        @contextmanager
        def open(self, model: Path) -> Iterator[FakeSession]:
            opened.append(model.name)
            yield FakeSession()
            opened.append("closed")

    watcher = SimpleNamespace(phase=lambda name: nullcontext(), progress=lambda *_: None)
    tokenizer = SimpleNamespace(encode=lambda text: [len(text)])
    engines: Any = FakeEngines()
    before, after = behave_in_turns(engines, (first, second), tokenizer, watcher)  # type: ignore[arg-type]
    assert opened == ["original", "closed", "quantized", "closed"] * 3
    assert (before.tokens_per_second, after.tokens_per_second) == (80.0, 135.0)
    assert first_divergence(before, after) == 2.0


def test_an_absurd_perplexity_stays_short() -> None:
    rows = {
        what: (first, second) for what, first, second in quality_rows(_quality(perplexity_quantized=2.1e40))
    }
    assert rows["perplexity"][0] == "10.000"
    assert rows["perplexity"][1].startswith("2.1e+40 (")


def test_a_missed_contract_is_marked_in_both_files(tmp_path: Path) -> None:
    missed = _quality().misses(Contract(max_kl=0.03, max_perplexity_increase=0.06))
    assert missed == ("KL 0.0400 is over --max-kl 0.03",)
    write_quality(tmp_path, _quality(), missed)
    write_card(tmp_path, "a model", "made so", _quality(), missed)
    assert json.loads((tmp_path / "quality.json").read_text())["contract_missed"] == list(missed)
    assert "was missed" in (tmp_path / "README.md").read_text()


def test_both_limits_are_checked() -> None:
    assert _quality().misses(Contract(0.04, 0.05 + 1e-12)) == ()
    assert len(_quality().misses(Contract(0.0399, 0.0499))) == 2
    assert len(_quality(kl_mean=math.nan, perplexity_quantized=math.inf).misses(Contract(1.0, 1.0))) == 2


def test_the_card_keeps_what_was_there_and_replaces_its_own(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A model\n\nText.\n")
    write_card(tmp_path, "x", "first", _quality(), ())
    write_card(tmp_path, "x", "second", _quality(), ())
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("---\nlicense: mit\n---\n# A model\n\nText.\n")
    assert text.count("## Quantization") == 1
    assert "second" in text
    assert "first" not in text


def test_the_card_tells_all_that_the_figures_depend_on() -> None:
    text = "\n".join(card_lines("how", _quality(), ()))
    for part in ("99 tokens of a text", "windows of 50", "stride of 50", "100 tokens of a.jsonl", "seed 1"):
        assert part in text
    assert "Left unquantized: model.layers.0.k_proj" in text


def _plan(errors: list[float]) -> tuple[QuantizePlan, dict[str, float]]:
    linears = tuple(
        PlannedLinear(index, (f"l{index}.q_proj", f"l{index}.k_proj"), (8, 8), 64, 64, None)
        for index in range(len(errors))
    )
    plan = QuantizePlan(QuantizeOptions("rtn"), 64, linears, len(errors), 0, 0, ())
    layers = tuple(
        LinearQuality(name, error / part, "rtn")
        for linear, error in zip(linears, errors, strict=True)
        for part, name in enumerate(linear.names, start=1)
    )
    return plan, {layer.name: layer.error for layer in layers}


def test_whole_groups_with_the_largest_errors_are_kept_first() -> None:
    plan, errors = _plan([0.1, 0.5, 0.2, 0.1, 0.05, 0.05])
    # A sixth must go; the worst group alone holds half of the error.
    chosen = next_to_keep(plan, errors, 1 / 6)
    assert chosen == ("l1.q_proj", "l1.k_proj")
    more = next_to_keep(plan, errors, 0.6)
    assert more == ("l1.q_proj", "l1.k_proj", "l2.q_proj", "l2.k_proj", "l0.q_proj", "l0.k_proj")


def test_the_excess_is_that_of_the_harder_demand() -> None:
    assert Contract(max_kl=0.03).excess(0.04, 0.5) == pytest.approx(0.25)
    assert Contract(max_kl=0.03, max_perplexity_increase=0.1).excess(0.04, 0.5) == pytest.approx(0.8)
    assert Contract(max_kl=0.05).excess(0.04, 0.5) == 0.0
    assert Contract(max_kl=0.05).excess(math.nan, math.nan) == 1.0


def test_each_round_keeps_at_least_as_many_as_are_kept() -> None:
    plan, errors = _plan([0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1])
    linears = tuple(
        dataclasses.replace(linear, kept="--keep x") if linear.layer < 3 else linear
        for linear in plan.linears
    )
    chosen = next_to_keep(dataclasses.replace(plan, linears=linears), errors, 0.01)
    assert chosen[::2] == ("l3.q_proj", "l4.q_proj", "l5.q_proj")


def test_never_more_than_three_quarters_are_kept() -> None:
    plan, errors = _plan([0.1] * 8)
    assert len(next_to_keep(plan, errors, 1.0)) == 2 * 6
    kept = dataclasses.replace(
        plan,
        linears=tuple(
            dataclasses.replace(linear, kept="--keep x") if linear.layer < 6 else linear
            for linear in plan.linears
        ),
    )
    assert next_to_keep(kept, errors, 1.0) == ()
