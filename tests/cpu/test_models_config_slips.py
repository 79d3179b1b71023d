"""Every key of a config in every wrong shape: the model is read, or one line says which key is wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pagedcli.errors import CheckpointError
from pagedcli.models.rope import MOST_NUMBER, rope_tables
from pagedcli.models.spec import ModelSpec
from tests.fixtures_checkpoints import tiny_config

SLIPS = ("x", "", -1, 0, 1, 2.5, True, [], ["x"], [None], {}, {"a": 1}, None, math.inf, math.nan, 10**400)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
FURTHER_KEYS = (
    "head_dim",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "quantization_config",
    "rope_scaling",
    "rope_parameters",
    "torch_dtype",
    "dtype",
    "attention_bias",
    "mlp_bias",
    "model_type",
)
ROPES = (
    {"rope_type": "linear", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "mscale": 1,
    },
)


def refusal(config: dict[str, Any]) -> str | None:
    """Why the config is refused; None if it is read."""
    try:
        ModelSpec.from_config(config, "c/config.json")
    except CheckpointError as error:
        return str(error)
    return None


def read(config: dict[str, Any]) -> None:
    """Reads the config; what is accepted must give finite rotary tables."""
    message = refusal(config)
    if message is not None:
        assert message.startswith("c/config.json: ")
        assert "\n" not in message
        return
    spec = ModelSpec.from_config(config)
    assert 0 <= spec.norm_eps <= MOST_NUMBER
    with np.errstate(all="raise", under="ignore"):
        for table in rope_tables(spec.rope, spec.head_dim, 4):
            assert np.isfinite(table).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_slip_in_any_key_is_read_or_refused_by_name(family: str) -> None:
    config = tiny_config(family)
    for key in (*config, *FURTHER_KEYS):
        for value in SLIPS:
            read({**config, key: value})


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_a_slip_in_any_rope_setting_is_read_or_refused_by_name(rope: dict[str, Any]) -> None:
    config = tiny_config("llama")
    for key in (*rope, "rope_theta", "mscale_all_dim", "attention_factor", "beta_slow", "truncate"):
        for value in SLIPS:
            read({**config, "rope_scaling": {**rope, key: value}})


@pytest.mark.parametrize("value", [0, 1, -1.0, "x", True, math.inf, math.nan])
def test_a_rotary_base_that_is_none_is_named(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"rope_theta is .*: it must be a number above 1"):
        ModelSpec.from_config({**tiny_config("llama"), "rope_theta": value})
