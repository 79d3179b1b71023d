"""How much memory and disk a quantization takes, said before it starts. Standard library and `models` only.

The terms follow `stream.py` and the quantizers: activations of all samples (the residual, a linear's input and the
value that it was made from), one fused linear with what its search needs, and each thread's share.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedcli.models.spec import ModelSpec
from pagedcli.quant.options import PlannedLinear, QuantizePlan

BASE_BYTES = 340 << 20
"""The interpreter with torch, its threads and buffers, and pieces of the model's file."""
MAX_EVAL_TOKENS = 8192
"""Of held-out text, all of whose states are held."""
SCORED_ROWS = 128
"""Whose logits are there at once."""
_ROW_BLOCK = 512
_PACKED = 1.1
"""Packed weights, padded, with what is read ahead, to the bytes of the files."""
_LEFT = 128 << 20
"""What the allocator still holds of calibration and search while models are compared (measured: up to 110 MiB)."""
_SLACK = 1.25
"""What the allocator holds between values that come and go (measured: 1.1 to 1.2)."""


def peak_bytes(plan: QuantizePlan, spec: ModelSpec, lengths: Sequence[int], threads: int) -> int:
    """Resident memory at the peak."""
    tokens, longest = sum(lengths), max(lengths, default=0)
    widest = max(linear.in_features for linear in plan.linears)
    # The residual before and after, what the MLP and the output projection read, and the widest input.
    activations = 4 * tokens * (3 * spec.hidden_size + spec.q_size + widest)
    outputs = max(linear.out_features for linear in plan.linears)
    samples = 4 * threads * longest * (3 * outputs + 2 * spec.hidden_size)
    layer_codes = sum(linear.weights for linear in plan.linears if linear.layer == 0)
    linear = max(_linear_bytes(plan, linear, threads) for linear in plan.linears)
    return BASE_BYTES + int(_SLACK * (activations + layer_codes + max(samples, linear)))


def running_bytes(spec: ModelSpec, weights_bytes: int, dtype: str, tokens: int) -> int:
    """Resident memory while the engine runs the original: weights as they are kept, and KV of so many tokens."""
    width = 4 if dtype == "float32" else 2
    return BASE_BYTES + int(_PACKED * weights_bytes) + tokens * width * spec.kv_elements_per_token()


def evaluation_bytes(plan: QuantizePlan, spec: ModelSpec) -> int:
    """Resident memory while original and quantized model are compared: a layer of each, or the heads of both."""
    table = 4 * spec.vocab_size * spec.hidden_size
    states = 4 * 8 * MAX_EVAL_TOKENS * spec.hidden_size
    layer = 4 * sum(linear.weights for linear in plan.linears if linear.layer == 0)
    heads = 3 * table + 8 * 6 * SCORED_ROWS * spec.vocab_size
    left = 0 if plan.options.method == "rtn" else _LEFT
    return BASE_BYTES + left + int(_SLACK * (states + max(heads, 3 * layer)))


def work_bytes(plan: QuantizePlan, spec: ModelSpec, lengths: Sequence[int]) -> int:
    """What the work folder takes at most: codes of all layers, and the activations between two layers twice.

    A linear that AWQ folds scales into and that is not quantized itself is kept there in float32.
    """
    codes = sum(
        linear.weights * (1 + 8 / linear.group_size) for linear in plan.linears if linear.kept is None
    )
    if plan.options.method == "awq":
        codes += 4 * sum(linear.weights for linear in plan.linears if linear.kept is not None)
    return int(codes) + 8 * sum(lengths) * spec.hidden_size


def _linear_bytes(plan: QuantizePlan, linear: PlannedLinear, threads: int) -> int:
    """Weights with the copies that are alive together, statistics, and each thread's temporary values."""
    square = linear.in_features**2
    rows = min(_ROW_BLOCK, linear.out_features)
    weights = 4 * 5 * linear.weights
    if plan.options.method == "rtn":
        return weights
    per_thread = 4 * 10 * rows * linear.in_features * threads
    statistics = 4 * 4 * square
    factor = 8 * 8 * square if plan.options.method == "gptq" else 0
    return weights + per_thread + statistics + factor
