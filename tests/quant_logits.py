"""Logits of a quantized folder on either backend, and of its dequantized weights in plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from pagedcli.checkpoint.sources import open_checkpoint
from pagedcli.models.load import load_model
from pagedcli.ops.native_ops import NativeOps
from pagedcli.ops.select import make_ops
from tests.forward_support import run_steps
from tests.native_support import NativeModel, run_native
from tests.quant_support import Written

IDS = [1, 70, 200, 33, 5, 5, 91, 140, 12, 250, 77, 8]


def torch_logits(folder: Path, ids: list[int] = IDS) -> np.ndarray:
    """Float32, dequantized by `TorchOps`."""
    torch.set_num_threads(1)
    model = load_model(open_checkpoint(folder), make_ops("cpu", "float32", "torch"), 512)
    return run_steps(model, [ids], [[(0, len(ids))]])[0].numpy()


def native_logits(
    folder: Path, dtype: str = "float32", activation: str = "", ids: list[int] = IDS
) -> np.ndarray:
    """By the native kernels."""
    ops = NativeOps(dtype, threads=1, activation=activation)
    model = NativeModel(load_model(open_checkpoint(folder), ops, max(512, len(ids))), ops)
    return np.asarray(run_native(model, [ids], [[(0, len(ids))]])[0])


def reference_logits(
    config: dict[str, Any], tensors: dict[str, np.ndarray], ids: list[int] = IDS, dtype: str = "float32"
) -> np.ndarray:
    """Plain transformers; float32 [tokens, vocab]."""
    torch.set_num_threads(1)
    settings = transformers.AutoConfig.for_model(**{k: v for k, v in config.items() if k != "torch_dtype"})
    settings._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(settings).float().eval()
    state = {name: torch.from_numpy(np.array(values, np.float32)) for name, values in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= ({"lm_head.weight"} if config["tie_word_embeddings"] else set())
    model.tie_weights()
    model.to(getattr(torch, dtype))
    with torch.no_grad():
        return np.asarray(model(torch.tensor([ids])).logits[0].float())


def assert_as_dequantized(written: Written, backend: str) -> None:
    """Float32 logits against transformers on the weights that the codes mean."""
    want = reference_logits(written.config, written.tensors())
    got = (torch_logits if backend == "torch" else native_logits)(written.folder)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())
