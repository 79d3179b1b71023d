"""Whole runs on tiny models, against transformers in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcli.checkpoint import open_checkpoint
from pagedcli.errors import CheckpointError, ConfigError
from pagedcli.quant import gptq
from pagedcli.quant.linears import LayerQuantizer
from pagedcli.quant.memory import BASE_BYTES
from pagedcli.quant.options import QuantizeEvent, QuantizeOptions
from pagedcli.quant.plan import plan_quantization
from pagedcli.quant.stream import product_dtype
from tests.cpu.quant.quant_support import (
    SMALL,
    MakeModel,
    folder_digest,
    last_hidden,
    run,
    some_samples,
    transformers_model,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
METHODS = {
    "awq": QuantizeOptions("awq", group_size=32),
    "gptq": QuantizeOptions("gptq", group_size=32),
    "gptq-8-desc": QuantizeOptions("gptq", bits=8, group_size=32, desc_act=True, sym=False),
}


def pipeline_hidden(work: Path, layers: int, lengths: list[int]) -> list[torch.Tensor]:
    values = np.fromfile(work / f"hidden-{layers:04d}.bin", dtype=np.float32).reshape(sum(lengths), -1)
    return [torch.from_numpy(part).double() for part in np.split(values, np.cumsum(lengths)[:-1])]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_stored_computes_what_was_calibrated(
    family: str, method: str, tiny_checkpoint: MakeModel, tmp_path: Path
) -> None:
    # Folded norms, divided rows, biases and groups: put into transformers, they give the activations that the run
    # ended with. A scale that was folded wrongly would be off by its own size.
    model, samples = tiny_checkpoint(family, **SMALL), some_samples()
    results = run(model, tmp_path / "work", METHODS[method])
    expected = last_hidden(transformers_model(model, results), samples)
    lengths = [len(sample) for sample in samples]
    for found, wanted in zip(pipeline_hidden(tmp_path / "work", 2, lengths), expected, strict=True):
        error = float((found - wanted).norm() / wanted.norm())
        assert error < (
            2e-3 if method == "awq" else 1e-5
        )  # awq: rows are divided after their scales were rounded
    names = [tensor.name for result in results for tensor in result.tensors]
    assert len(names) == len(set(names)) == 14
    if method == "awq":
        changed = {name.split(".")[-2] for result in results for name in result.dense}
        assert {"input_layernorm", "post_attention_layernorm"} <= changed


@pytest.mark.parametrize(("kv_heads", "folded"), [(4, True), (2, False), (1, False)])
def test_values_are_scaled_only_where_heads_do_not_share_them(
    kv_heads: int, folded: bool, tiny_checkpoint: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    divided: list[str] = []
    real = LayerQuantizer._fold_rows

    def note(self: LayerQuantizer, name: str, scales: torch.Tensor) -> None:
        divided.append(name.split(".")[-1])
        real(self, name, scales)

    monkeypatch.setattr(LayerQuantizer, "_fold_rows", note)
    model = tiny_checkpoint("qwen2", **SMALL | {"num_key_value_heads": kv_heads})  # v has a bias to divide
    samples = some_samples()
    results = run(model, tmp_path / "work", METHODS["awq"])
    assert ("v_proj" in divided) is folded
    assert "up_proj" in divided
    assert any(name.endswith("v_proj.bias") for result in results for name in result.dense) is folded
    expected = torch.cat(last_hidden(transformers_model(model, results), samples))
    found = torch.cat(pipeline_hidden(tmp_path / "work", 2, [len(sample) for sample in samples]))
    assert float((found - expected).norm() / expected.norm()) < 2e-3


@pytest.mark.parametrize("kept", ["up_proj", "v_proj", "down_proj"])
def test_scales_fold_into_linears_that_are_kept(
    kept: str, tiny_checkpoint: MakeModel, tmp_path: Path
) -> None:
    model = tiny_checkpoint("qwen2", **SMALL | {"num_key_value_heads": 4})
    samples = some_samples()
    results = run(model, tmp_path / "work", QuantizeOptions("awq", group_size=32, keep=(kept,)))
    changed = {name.split(".", 3)[-1] for result in results for name in result.dense}
    assert (f"mlp.{kept}.weight" in changed or f"self_attn.{kept}.weight" in changed) is (kept != "down_proj")
    expected = torch.cat(last_hidden(transformers_model(model, results), samples))
    found = torch.cat(pipeline_hidden(tmp_path / "work", 2, [len(sample) for sample in samples]))
    assert float((found - expected).norm() / expected.norm()) < 2e-3


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_better_than_rounding(method: str, tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", **SMALL)
    samples = some_samples([64] * 12)
    plain = QuantizeOptions("rtn", group_size=32, sym=method == "gptq")
    results = {
        "rtn": run(model, tmp_path / "rtn", plain),
        method: run(model, tmp_path / method, QuantizeOptions(method, group_size=32), samples),
    }
    exact = torch.cat(last_hidden(transformers_model(model, []), samples))
    errors = {
        name: float((torch.cat(last_hidden(transformers_model(model, found), samples)) - exact).norm())
        for name, found in results.items()
    }
    assert errors[method] < 0.95 * errors["rtn"]


@pytest.mark.parametrize("family", FAMILIES)
def test_products_in_bfloat16_stay_near(family: str, tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    model, samples = tiny_checkpoint(family, dtype="bfloat16", **SMALL), some_samples()
    results = run(model, tmp_path / "work", METHODS["gptq"])
    expected = torch.cat(last_hidden(transformers_model(model, results), samples))
    found = torch.cat(pipeline_hidden(tmp_path / "work", 2, [len(sample) for sample in samples]))
    exact = torch.cat(last_hidden(transformers_model(model, []), samples))
    error = float((found - expected).norm())
    assert error < 0.15 * float((expected - exact).norm())  # what 4 bits cost


def test_products_are_float32_unless_the_model_is_bfloat16() -> None:
    assert product_dtype("float32") == product_dtype("float16") == torch.float32
    assert product_dtype("bfloat16") in (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", [*METHODS, "rtn"])
def test_threads_do_not_change_a_byte(
    method: str, dtype: str, tiny_checkpoint: MakeModel, tmp_path: Path
) -> None:
    # Wide enough that every product is cut into several tasks.
    sizes = SMALL | {"hidden_size": 320, "intermediate_size": 1120, "num_attention_heads": 20}
    model = tiny_checkpoint("llama", dtype=dtype, **sizes, num_hidden_layers=1)
    options = METHODS.get(method) or QuantizeOptions("rtn", group_size=32)
    before = torch.get_num_threads()
    digests = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)  # what the caller's torch is set to does not matter either
        run(model, tmp_path / str(threads), options, threads=threads)
        assert torch.get_num_threads() == threads
        digests.append(folder_digest(tmp_path / str(threads)))
    torch.set_num_threads(before)
    assert digests[0] == digests[1] == digests[2]


def test_records_and_events_name_everything(tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    events: list[QuantizeEvent] = []
    model = tiny_checkpoint("llama", **SMALL)
    results = run(model, tmp_path / "work", METHODS["gptq"], progress=events.append)
    records = [record for result in results for record in result.records]
    assert [record.name.split(".")[-1] for record in records[:7]] == [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip
    assert all(record.error is not None and 0 < record.error < 0.2 for record in records)
    assert all(0 < record.weight_error < 0.1 and record.damp == 0.01 for record in records)
    linears = [event for event in events if event.phase == "linear"]
    assert len(linears) == 8
    assert "q_proj + model.layers.0.self_attn.k_proj" in linears[0].linear
    assert [event.layer for event in events if event.phase == "layer"] == [0, 1]
    assert all(event.memory_bytes > 1 << 20 and event.num_layers == 2 for event in events)
    assert events[0].phase == "check"


def test_a_hessian_that_cannot_be_factored_is_rounded_and_said(
    tiny_checkpoint: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = gptq.factorize, []

    def factorize(gram: torch.Tensor, damp: float, *, by_activation: bool) -> Any:
        calls.append(gram)
        bent = gram - 5 * gram.diagonal().mean() * torch.eye(len(gram)) if len(calls) == 2 else gram
        return real(bent, damp, by_activation=by_activation)

    monkeypatch.setattr(gptq, "factorize", factorize)
    results = run(tiny_checkpoint("llama", **SMALL), tmp_path / "work", METHODS["gptq"])
    output = next(record for record in results[0].records if record.name.endswith("0.self_attn.o_proj"))
    assert output.method == "rtn"
    assert "Hessian" in output.note
    assert output.damp is None
    assert {record.method for record in results[0].records if record is not output} == {"gptq"}
    kinds = {tensor.name: tensor.method for tensor in results[0].tensors}
    assert kinds["model.layers.0.self_attn.o_proj"] == "rtn"


@pytest.mark.parametrize("method", METHODS)
def test_C18_one_short_sample(method: str, tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    results = run(tiny_checkpoint("llama", **SMALL), tmp_path / "work", METHODS[method], [[5, 9, 7]])
    for tensor in (tensor for result in results for tensor in result.tensors):
        assert bool(np.isfinite(tensor.dequantize()).all())


def rewritten(model: Path, target: Path, name: str, change: Any) -> Path:
    from safetensors.torch import load_file, save_file

    target.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    change(tensors[name])
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("value", [float("inf"), float("nan"), float("-inf")])
@pytest.mark.parametrize("method", ["awq", "rtn"])
def test_C18_a_weight_that_is_no_number_is_named_before_any_work(
    method: str, value: float, tiny_checkpoint: MakeModel, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(tensor: torch.Tensor) -> None:
        tensor[17, 3] = value

    model = rewritten(tiny_checkpoint("llama", **SMALL), tmp_path / "model", name, spoil)
    events: list[QuantizeEvent] = []
    with pytest.raises(CheckpointError, match=rf"{name} holds -?(inf|nan) at \[17, 3\] \(1 such"):
        run(model, tmp_path / "work", QuantizeOptions(method, group_size=32), progress=events.append)
    assert {event.phase for event in events} == {"check"}
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("method", METHODS)
def test_C18_channels_of_zeros(method: str, tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    def silence(tensor: torch.Tensor) -> None:
        tensor[3] = 0
        tensor[:, 5] = 0

    def mute(tensor: torch.Tensor) -> None:
        tensor[7] = 0

    name = "model.layers.0.mlp.up_proj.weight"
    model = rewritten(tiny_checkpoint("llama", **SMALL), tmp_path / "a", name, silence)
    model = rewritten(model, tmp_path / "b", "model.layers.0.input_layernorm.weight", mute)
    results = run(model, tmp_path / "work", METHODS[method])
    tensors = {tensor.name: tensor.dequantize() for result in results for tensor in result.tensors}
    assert all(bool(np.isfinite(values).all()) for values in tensors.values())
    assert not tensors["model.layers.0.mlp.up_proj"][3].any()
    for values in results[0].dense.values():
        assert bool(np.isfinite(values).all())


def test_C18_weights_too_large_for_their_scales_are_named(tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    def swell(tensor: torch.Tensor) -> None:
        tensor[2, 1] = 1e6

    name = "model.layers.0.mlp.gate_proj"
    model = rewritten(tiny_checkpoint("llama", **SMALL), tmp_path / "model", f"{name}.weight", swell)
    with pytest.raises(CheckpointError, match=f"{name}: weights up to 1e.06 need scales beyond 65504"):
        run(model, tmp_path / "work", QuantizeOptions("rtn", group_size=32))
    run(model, tmp_path / "kept", QuantizeOptions("rtn", group_size=32, keep=(name,)))


@pytest.mark.parametrize(("hidden", "inner", "group"), [(192, 256, 128), (96, 128, 64), (64, 96, 64)])
def test_C17_a_group_size_that_does_not_divide_leaves_the_layer_and_says_so(
    hidden: int, inner: int, group: int, tiny_checkpoint: MakeModel, tmp_path: Path
) -> None:
    sizes = SMALL | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": 4,
        "head_dim": 32,
    }
    model = tiny_checkpoint("llama", **sizes)
    options = QuantizeOptions("awq", group_size=group)
    plan = plan_quantization(open_checkpoint(model), options, [40], 1)
    undivided = {hidden, inner, 128} - {size for size in (hidden, inner, 128) if size % group == 0}
    assert plan.kept
    assert all(any(str(size) in note for note in plan.notes) for size in undivided)
    results = run(model, tmp_path / "work", options)
    made = {tensor.name for result in results for tensor in result.tensors}
    kept = {record.name for result in results for record in result.records if record.method == "kept"}
    assert kept == set(plan.kept)
    assert len(made) + len(kept) == 14
    assert not made & kept


def test_peak_memory_is_said_and_grows_with_the_text(tiny_checkpoint: MakeModel) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama", **SMALL))
    few, many = (
        plan_quantization(checkpoint, METHODS["gptq"], [512] * count, 2).peak_bytes for count in (16, 4096)
    )
    assert BASE_BYTES < few < many
    # The residual and what a linear reads, at least.
    assert many - few > 4 * 512 * (4096 - 300) * (64 + 96)


def test_tokens_of_another_model_are_refused(tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="token ids 5 to 320, the model has 320 tokens"):
        run(tiny_checkpoint("llama", **SMALL), tmp_path / "work", METHODS["awq"], [[5, 320]])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_gguf_file_is_a_source(family: str, tiny_gguf: Any, tmp_path: Path) -> None:
    sizes = SMALL | {"hidden_size": 64, "intermediate_size": 96}
    if family == "qwen2":
        sizes.pop("head_dim")
    results = run(tiny_gguf(family, **sizes), tmp_path / "work", METHODS["awq"])
    assert len([tensor for result in results for tensor in result.tensors]) == 14
