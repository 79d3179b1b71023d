"""Every family's logits against transformers' on tiny random models in float32: prefill, chunks, decode.

Tolerance: 2e-5 of the largest logit, over all rows and the whole vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pagedcli.checkpoint import open_checkpoint
from pagedcli.models.load import Model, load_model
from pagedcli.ops.select import make_ops
from tests.forward_support import chunked, run_steps

TOLERANCE = 2e-5
LENGTH = 150  # more than one split of attention

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def rope(theta: float = 10_000.0, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": theta, **settings}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa3": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 3, "tie_word_embeddings": True}),
    "llama-gqa7-head12-biases": (
        "llama",
        {
            "hidden_size": 56,
            "num_attention_heads": 7,
            "head_dim": 12,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-gelu-tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3}),
    "llama-theta": ("llama", rope(500_000.0, rope_type="default")),
    "llama-linear": ("llama", rope(rope_type="linear", factor=4.0)),
    "llama-llama3": ("llama", rope(500_000.0, **LLAMA3, original_max_position_embeddings=64)),
    "llama-yarn": ("llama", rope(**YARN)),
    "llama-yarn-factor": ("llama", rope(**YARN, attention_factor=1.3, beta_fast=20.0, beta_slow=2.0)),
    "llama-yarn-mscale": ("llama", rope(**YARN, mscale=1.2, mscale_all_dim=0.7, truncate=False)),
    "mistral-window": (
        "mistral",
        {"sliding_window": 5, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10},
    ),
    "mistral-window-over-splits": ("mistral", {"sliding_window": 130, "num_hidden_layers": 3}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2-layer-types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "qwen3-biases-window": (
        "qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
}


def tiny_oracle(family: str, settings: dict[str, Any]) -> Any:
    """A transformers model whose weights, norms and biases are all random and whose logits differ clearly."""
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(3)
    config = config_class(**{**SIZES, **settings}, attn_implementation="eager")
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.2 * torch.randn_like(weight))
            elif name.endswith(".bias"):
                weight.copy_(0.3 * torch.randn_like(weight))
            else:
                weight.copy_(
                    torch.randn_like(weight) * (1.0 if "embed" in name else 1.4 / weight.shape[1] ** 0.5)
                )
    return model


def oracle_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def load_float32(folder: Path) -> Model:
    return load_model(open_checkpoint(folder), make_ops("cpu", "float32"), 256)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (actual - expected).abs().max().item()
    assert difference <= TOLERANCE * expected.abs().max().item()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    oracle = tiny_oracle(family, settings)
    oracle.save_pretrained(tmp_path)
    tokens = torch.randint(0, SIZES["vocab_size"], (LENGTH,)).tolist()
    expected = oracle_logits(oracle, tokens)
    assert expected.std() > 0.3  # else a wrong model would pass too
    model = load_float32(tmp_path)
    (prefill,) = run_steps(model, [tokens], [[(0, LENGTH)]])
    assert_close(prefill, expected)
    decodes = [[(0, 1)]] * 13
    (mixed,) = run_steps(model, [tokens], [*chunked(0, LENGTH - 13, 37), *decodes], block_size=8)
    assert_close(mixed, expected)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_rope_settings_of_older_configs_are_read(kind: str, tmp_path: Path) -> None:
    family, settings = CASES[f"llama-{kind}"]
    oracle = tiny_oracle(family, settings)
    oracle.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    if kind == "linear":  # the oldest spelling
        scaling["type"] = scaling.pop("rope_type")
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    tokens = list(range(90))
    (logits,) = run_steps(load_float32(tmp_path), [tokens], [[(0, 90)]])
    assert_close(logits, oracle_logits(oracle, tokens))


def test_oracle_of_another_rope_is_told_apart(tmp_path: Path) -> None:
    """The tolerance is tight enough to notice a wrong setting."""
    oracle = tiny_oracle(*CASES["llama-yarn"])
    oracle.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["beta_fast"] = 31.0
    config["rope_parameters"]["truncate"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    (logits,) = run_steps(load_float32(tmp_path), [list(range(90))], [[(0, 90)]])
    expected = oracle_logits(oracle, list(range(90)))
    assert (logits - expected).abs().max() > 10 * TOLERANCE * expected.abs().max()


def test_stored_precision_is_kept_exactly(tmp_path: Path) -> None:
    """bfloat16 weights run in float32 give the logits of transformers run the same way."""
    tiny_oracle("llama", {}).bfloat16().save_pretrained(tmp_path)
    # Read anew: a model cast to bfloat16 and back keeps rounded rope frequencies.
    oracle = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    (logits,) = run_steps(load_float32(tmp_path), [list(range(40))], [[(0, 40)]])
    assert_close(logits, oracle_logits(oracle, list(range(40))))
