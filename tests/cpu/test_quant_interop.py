"""Small checkpoints made by the packages themselves (tests/data/quantized), read by ours with equal codes and logits.

What the packages make of ours is `make interop`, which needs their environments.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pagedcli.checkpoint.folder import SafetensorsCheckpoint
from tests.quant_logits import native_logits, reference_logits
from tests.quant_support import unpack_independently

DATA = Path(__file__).parents[1] / "data" / "quantized"
FOLDERS = sorted(path.name for path in DATA.iterdir())


@pytest.mark.parametrize("name", FOLDERS)
def test_theirs_is_read_with_equal_codes(name: str) -> None:
    """Against an unpacker that shares no code with ours."""
    checkpoint = SafetensorsCheckpoint(DATA / name)
    independent = unpack_independently(DATA / name)
    assert len(independent) == 14
    assert checkpoint.quantization is not None
    assert checkpoint.quantization.num_linears == 14
    for linear, values in independent.items():
        found = checkpoint.quantized(linear.removesuffix(".weight"))
        assert found is not None
        assert found.zeros is not None
        steps = np.asarray(found.codes, np.int64) - found.zeros.astype(np.int64)[:, found.groups()]
        np.testing.assert_array_equal(steps * found.scales.astype(np.float64)[:, found.groups()], values)


@pytest.mark.parametrize("name", FOLDERS)
def test_theirs_runs_as_its_dequantized_weights_do(name: str) -> None:
    checkpoint = SafetensorsCheckpoint(DATA / name)
    config = json.loads((DATA / name / "config.json").read_text())
    config.pop("quantization_config")
    kinds = {"F16": np.float16, "F32": np.float32}
    tensors = {}
    for tensor in map(checkpoint.tensor, checkpoint.names()):
        values = np.array(tensor.data).view(kinds[tensor.dtype]).reshape(tensor.shape)
        tensors[tensor.name] = values.astype(np.float32)
    if checkpoint.config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    tensors = {name: values for name, values in tensors.items() if not name.endswith(".bias")}
    want = reference_logits(config, tensors)
    np.testing.assert_allclose(native_logits(DATA / name), want, rtol=0, atol=1e-4 * np.abs(want).max())
