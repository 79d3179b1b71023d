from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pagedcli.checkpoint import open_checkpoint
from pagedcli.checkpoint.base import RawTensor
from pagedcli.errors import ConfigError
from pagedcli.models.load import load_model
from pagedcli.ops.torch_ops import TorchOps
from pagedcli.quant.options import QuantizeOptions, QuantizePlan
from pagedcli.quant.plan import matches, plan_quantization
from tests.cpu.quant.quant_support import SMALL, MakeModel

WIDE = SMALL | {"hidden_size": 192, "num_attention_heads": 4, "head_dim": 32}


def plan(model: Path, options: QuantizeOptions) -> QuantizePlan:
    return plan_quantization(open_checkpoint(model), options, [] if options.method == "rtn" else [64], 1)


@pytest.mark.parametrize(
    ("inner", "expected", "said"),
    [
        (
            256,
            64,
            "64: the largest of 128, 64 and 32 that divides every layer (model.layers.0.self_attn.q_proj has 192",
        ),
        (
            224,
            32,
            "32: the largest of 128, 64 and 32 that divides every layer (model.layers.0.mlp.down_proj has 224",
        ),
        (200, 64, "64: none of 128, 64 and 32 divides every layer"),
    ],
)
def test_the_default_group_size_is_chosen_and_said(
    inner: int, expected: int, said: str, tiny_checkpoint: MakeModel
) -> None:
    model = tiny_checkpoint("llama", **WIDE | {"intermediate_size": inner})
    found = plan(model, QuantizeOptions("rtn"))
    assert found.group_size == expected
    assert any(said in note for note in found.notes)


def test_the_default_is_128_where_it_fits(tiny_checkpoint: MakeModel) -> None:
    sizes = SMALL | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
    found = plan(tiny_checkpoint("llama", **sizes), QuantizeOptions("rtn"))
    assert (found.group_size, found.kept, found.notes) == (
        128,
        (),
        ("group size 128: it divides every layer",),
    )


def test_a_kept_layer_does_not_decide_the_group_size(tiny_checkpoint: MakeModel) -> None:
    sizes = SMALL | {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "head_dim": 32}
    found = plan(tiny_checkpoint("llama", **sizes), QuantizeOptions("rtn", keep=("down_proj",)))
    assert found.group_size == 128
    assert found.kept == ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")


def test_whole_rows(tiny_checkpoint: MakeModel) -> None:
    found = plan(tiny_checkpoint("llama", **WIDE), QuantizeOptions("rtn", group_size=-1))
    assert found.group_size == -1
    assert {linear.group_size for linear in found.linears} == {192, 128, 96}
    assert found.kept == ()


def test_what_shares_an_input_is_one_group_and_kept_together(tiny_checkpoint: MakeModel) -> None:
    found = plan(
        tiny_checkpoint("llama", **SMALL), QuantizeOptions("rtn", keep=("layers.0.self_attn.k_proj",))
    )
    first = found.linears[0]
    assert [name.split(".")[-1] for name in first.names] == ["q_proj", "k_proj", "v_proj"]
    assert (first.sizes, first.in_features) == ((64, 32, 32), 64)
    assert first.kept is not None
    assert len(found.kept) == 3
    assert any("layers.0.self_attn.q_proj and 2 more" in note and "--keep" in note for note in found.notes)
    assert len(found.linears) == 8


@pytest.mark.parametrize(
    ("pattern", "hit"),
    [
        ("down_proj", True),
        ("*.down_proj", True),
        ("mlp", True),
        ("model.layers.1", True),
        ("layers.1", True),
        ("layers.?.mlp.d*", True),
        ("model.layers.1.mlp.down_proj", True),
        ("own_proj", False),
        ("layers.11", False),
        ("model.layers.0", False),
    ],
)
def test_patterns(pattern: str, hit: bool) -> None:
    assert matches("model.layers.1.mlp.down_proj", pattern) is hit


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (QuantizeOptions("rtn", keep=("nothing",)), "--keep nothing matches no linear"),
        (QuantizeOptions("rtn", keep=("layers.*",)), "nothing would be quantized: .* leave a --keep out"),
        (QuantizeOptions("rtn", group_size=128), "64 inputs are no multiple of .* 128: use --group-size 64 "),
    ],
)
def test_a_plan_that_does_nothing_is_refused(
    options: QuantizeOptions, said: str, tiny_checkpoint: MakeModel
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(tiny_checkpoint("llama", **SMALL), options)


def test_rows_that_no_group_divides_are_told_of_whole_rows(tiny_checkpoint: MakeModel) -> None:
    odd = {"hidden_size": 72, "intermediate_size": 104}
    with pytest.raises(ConfigError, match=r"nothing would be quantized: .* use --group-size -1 "):
        plan(tiny_checkpoint("llama", **odd), QuantizeOptions("gptq"))
    assert plan(tiny_checkpoint("llama", **odd), QuantizeOptions("gptq", group_size=-1)).kept == ()


def test_the_head_is_never_quantized_and_may_be_named(tiny_checkpoint: MakeModel) -> None:
    found = plan(tiny_checkpoint("llama", **SMALL), QuantizeOptions("rtn", keep=("lm_head",)))
    assert found.kept == ()
    assert not any("lm_head" in name for linear in found.linears for name in linear.names)


def test_calibration_is_needed_or_not(tiny_checkpoint: MakeModel) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama", **SMALL))
    with pytest.raises(ConfigError, match="uses no calibration text"):
        plan_quantization(checkpoint, QuantizeOptions("rtn"), [64], 1)
    for method in ("awq", "gptq"):
        with pytest.raises(ConfigError, match="needs calibration text: 0 samples, 0 tokens"):
            plan_quantization(checkpoint, QuantizeOptions(method), [], 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": "squeeze"}, "choose one of awq, gptq, rtn"),
        ({"bits": 3}, "gptq with 3 bits is not made: use --bits 4 or 8"),
        ({"method": "awq", "bits": 8}, "awq with 8 bits is not made: use --bits 4"),
        ({"group_size": 48}, "use -1 .a whole row., 32, 64 or 128"),
        ({"method": "awq", "desc_act": True}, "--desc-act is for --gptq"),
        ({"damp": 1.5}, "--damp is 1.5"),
        ({"damp": -0.1}, "--damp is -0.1"),
    ],
)
def test_slips_in_options(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(QuantizeOptions("gptq"), **change)  # type: ignore[arg-type]


def test_defaults_of_symmetry() -> None:
    assert not QuantizeOptions("awq").symmetric
    assert QuantizeOptions("gptq").symmetric
    assert QuantizeOptions("rtn").symmetric
    assert not QuantizeOptions("rtn", sym=False).symmetric


MEASURE = """
import re, sys
from pathlib import Path
import numpy as np
from pagedcli.checkpoint import open_checkpoint
from pagedcli.quant.options import QuantizeOptions
from pagedcli.quant.pipeline import quantize_layers
from pagedcli.quant.plan import plan_quantization
checkpoint = open_checkpoint(Path(sys.argv[1]))
samples = np.random.default_rng(0).integers(3, 320, (16, 512))
plan = plan_quantization(checkpoint, QuantizeOptions(sys.argv[3], group_size=32), [512] * 16, 2)
for _ in quantize_layers(checkpoint, plan, samples, Path(sys.argv[2]), threads=2):
    pass
# ru_maxrss of a process counts the memory of the one that started it.
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(plan.peak_bytes, int(peak[1]) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_the_peak_that_is_said_is_held(method: str, tiny_checkpoint: MakeModel, tmp_path: Path) -> None:
    sizes = SMALL | {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 64}
    model = tiny_checkpoint("llama", num_hidden_layers=1, **sizes)
    command = [sys.executable, "-c", MEASURE, str(model), str(tmp_path / "work"), method]
    said, held = map(
        int, subprocess.run(command, check=True, capture_output=True, timeout=110).stdout.split()
    )
    assert 0.6 * said < held <= said


COMPARE = """
import re, sys
from pathlib import Path
import numpy as np
from pagedcli.checkpoint import open_checkpoint
from pagedcli.models.spec import ModelSpec
from pagedcli.quant.evaluation import evaluate
from pagedcli.quant.memory import MAX_EVAL_TOKENS, evaluation_bytes
from pagedcli.quant.options import QuantizeOptions
from pagedcli.quant.plan import plan_quantization
checkpoint = open_checkpoint(Path(sys.argv[1]))
plan = plan_quantization(checkpoint, QuantizeOptions("rtn", group_size=32), [], 2)
ids = np.random.default_rng(0).integers(3, 320, (MAX_EVAL_TOKENS // 512, 512))
evaluate(checkpoint, checkpoint, list(ids)[: int(sys.argv[2])], folded=False)
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(evaluation_bytes(plan, ModelSpec.from_config(checkpoint.config, "config")), int(peak[1]) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.nightly
@pytest.mark.parametrize("tied", [False, True])
def test_the_peak_of_the_comparison_is_held_by_large_vocabularies(
    tied: bool, tiny_checkpoint: MakeModel
) -> None:
    sizes = SMALL | {"hidden_size": 512, "vocab_size": 100_000, "tie_word_embeddings": tied}
    model = tiny_checkpoint("llama", dtype="bfloat16", num_hidden_layers=1, **sizes)
    command = [sys.executable, "-c", COMPARE, str(model), "2"]
    said, held = map(
        int, subprocess.run(command, check=True, capture_output=True, timeout=110).stdout.split()
    )
    assert 0.5 * said < held <= said


def test_the_reference_keeps_none_of_the_files_pages(
    tiny_checkpoint: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has copied it gives back: else the files of both models lie in memory during the comparison."""
    checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    released: list[str] = []
    monkeypatch.setattr(RawTensor, "release", lambda tensor: released.append(tensor.name))
    load_model(checkpoint, TorchOps("cpu", "float32"), 64)
    assert sorted(released) == sorted(checkpoint.names())
